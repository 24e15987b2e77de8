"""The README's example of a loop runs as printed, and names nothing that does not exist."""

import re
from pathlib import Path
from types import SimpleNamespace

import rl_consistency
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.verify.presets import build_preset

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_ten_lines_run_and_find_no_differing_token(capsys):
    _attached, code = re.findall(r"```python\n(.*?)```", README, re.S)
    # The tiny preset has fewer tokens than the byte tokenizer.
    tokenizer = SimpleNamespace(eos_token_id=97, decode=byte_tokenizer().decode)
    names = {
        "model": build_preset("tiny-qwen3"),
        "tokenizer": tokenizer,
        "prompts": [[1, 2, 3], [4, 5]],
    }
    exec(code.replace("max_tokens=256", "max_tokens=6"), names)
    printed = capsys.readouterr().out
    assert "mismatched_tokens=0" in printed and "ratio_min=1.0" in printed
    names["session"].restore()


def test_every_public_name_is_exported():
    for name in re.findall(r"(?:rlc|rl_consistency)\.(\w+)\(", README):
        assert name in rl_consistency.__all__, name
