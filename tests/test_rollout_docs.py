"""docs/rollout.md runs as printed and names what is exported."""

import re
from pathlib import Path
from types import SimpleNamespace

import rl_consistency
from rl_consistency.verify.presets import build_preset

TEXT = (Path(__file__).resolve().parents[1] / "docs/rollout.md").read_text("utf-8")


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    tokenizer = SimpleNamespace(eos_token_id=1, decode=lambda ids, **_: str(ids))
    names = {"model": build_preset("tiny-qwen3"), "prompts": [[1, 2, 3], [4, 5]]}
    names["tokenizer"] = tokenizer
    exec(code.replace("max_tokens=1024", "max_tokens=6"), names)
    assert len(names["completions"]) == len(names["rewards"]) == 16
    assert all(1 <= reward <= 6 for reward in names["rewards"].values())
    names["session"].restore()
    for name in re.findall(r"rlc\.(\w+)", TEXT):
        assert name in rl_consistency.__all__, name
