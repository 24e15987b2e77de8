"""The README's example runs as printed, and names nothing that does not exist."""

import json
import re
from pathlib import Path

import rl_consistency
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.verify.presets import build_preset

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_ten_lines_run_and_find_no_differing_token(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    # The tiny preset has fewer tokens than the byte tokenizer; any id it has will do.
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "a"
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
    for name in re.findall(r"rlc\.(\w+)", README):
        assert name in rl_consistency.__all__, name


def test_every_linked_file_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README


def test_the_demo_table_is_the_recorded_run():
    summary = json.loads((ROOT / "benchmarks/results/cpu_demo.json").read_text("utf-8"))["summary"]
    rows = {
        "tokens compared": ("tokens", "{:,.0f}"),
        "tokens whose logprob differs": ("mismatched_tokens", "{:,.0f}"),
        "share of tokens that differ": ("mismatch_fraction", "{:.1%}"),
        "largest ULP distance": ("ulp/max", "{:,.0f}"),
        "smallest first-update ratio": ("importance_ratio/min", "{:.9g}"),
        "largest first-update ratio": ("importance_ratio/max", "{:.9g}"),
    }
    for label, (name, form) in rows.items():
        ours, stock = (form.format(summary[f"{side}/{name}"]) for side in ("consistency", "stock"))
        assert f"| {label} | {ours} | {stock} |" in README
    rewards = f"{summary['reward/first']:.3f} -> {summary['reward/last']:.3f}"
    assert f"| reward, first to last steps | {rewards} | - |" in README
