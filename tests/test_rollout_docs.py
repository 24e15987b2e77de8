"""docs/rollout.md runs as printed and names suites and options that exist."""

import re
from pathlib import Path

import rl_consistency
from benchmarks.__main__ import _parser
from benchmarks.rollout.suites import (
    named_rollout_suites,
    random_rollout_suites,
    rollout_suites,
)
from rl_consistency.verify.presets import build_preset

TEXT = (Path(__file__).resolve().parents[1] / "docs/rollout.md").read_text("utf-8")


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    names = {"model": build_preset("tiny-qwen3"), "prompts": [[1, 2, 3], [4, 5]], "eos_token_id": 1}
    exec(code.replace("max_tokens=1024", "max_tokens=6"), names)
    assert len(names["completions"]) == len(names["rewards"]) == 16
    for completion in names["completions"]:
        found = names["rewards"][completion.prompt_index, completion.sample_index]
        assert found == len(completion.token_ids)
    names["session"].restore()


def test_every_suite_is_explained_and_every_command_parses():
    explained = set(re.findall(r"^\| `(rollout_\w+)` \|", TEXT, re.M))
    named = {re.sub(r"decode_.*", "decode_MODEL", suite) for suite in rollout_suites()}
    named |= random_rollout_suites(0).keys()
    named |= named_rollout_suites(["llama3.2-1b", "olmoe-1b-7b"]).keys()
    # Those of `--vllm` need a folder with vLLM.
    assert explained == named | {"rollout_vllm_MODEL"}
    commands = re.findall(r"^python -m benchmarks (.+?)(?:  +#.*)?$", TEXT, re.M)
    assert len(commands) == 3
    for command in commands:
        _parser().parse_args(command.split())


def test_every_name_of_the_package_is_exported():
    for name in re.findall(r"rlc\.(\w+)", TEXT):
        assert name in rl_consistency.__all__, name
