"""docs/rollout.md runs as printed and names what is exported."""

import re
from pathlib import Path

import rl_consistency
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
    for name in re.findall(r"rlc\.(\w+)", TEXT):
        assert name in rl_consistency.__all__, name
