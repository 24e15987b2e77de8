"""The README's GPU figures are those of the results file, and of nothing else."""

import pytest

from benchmarks import readme_prose
from benchmarks.readme import BEGIN, END, README, RESULTS, current, rewritten, section
from benchmarks.results_file import Results, Row, load
from rl_consistency.kernels.core.kernels_hash import kernels_hash

META = {
    "device": "Test GPU",
    "versions": {"torch": "2.11", "triton": "3.6"},
    "kernels_sha256": kernels_hash(),
}


@pytest.fixture
def results():
    row = Row(
        suite="training_step",
        work="training step",
        shape={"model": "qwen3-0.6b", "sequences": 16, "length": 1024},
        dtype="bfloat16",
        ours_us=250_000.0,
        stock_us=320_000.0,
        ratio=1.28,
        tokens_per_second={"stock": 51_200.0, "ours": 65_536.0},
    )
    record = {"complete": True}
    return Results((), {}).merged("training_step", [row], META, record)


def test_the_readme_says_what_the_results_file_says():
    assert current(README.read_text("utf-8")) == section(load(RESULTS)), (
        "run python -m benchmarks.readme"
    )


def test_the_sentences_say_what_the_results_file_says():
    lacking = readme_prose.missing(README.read_text("utf-8"), load(RESULTS))
    assert not lacking, "the README's text differs: python -m benchmarks.readme_prose"


def test_another_figure_in_a_sentence_is_noticed():
    text, results = README.read_text("utf-8"), load(RESULTS)
    for phrase in readme_prose.phrases(results):
        digit = phrase[-1] if phrase[-1].isdigit() else phrase[0]
        other = phrase.replace(digit, str((int(digit) + 1) % 10) if digit.isdigit() else "x")
        before, after = text.split(END)
        changed = " ".join(after.split()).replace(phrase, other)
        assert phrase in readme_prose.missing(f"{before}{END}{changed}", results)


def test_a_span_reads_as_one_figure_where_both_ends_do():
    assert readme_prose.span([0.641, 0.7589]) == "0.64 to 0.76"
    assert readme_prose.span([0.991, 0.9932]) == "0.99"
    assert readme_prose.span([9.73], digits=1) == "9.7"


def test_the_section_has_every_bar_and_the_tokens_per_second(results):
    text = section(results)
    assert (
        "| training step against Hugging Face with SDPA, the lowest | 1.28 | &ge; 1.15 | yes |"
        in text
    )
    assert "| qwen3-0.6b, 16 x 1024 | 65,536 | 51,200 |" in text
    others = [name for name in results.bars if not name.startswith("rollout")]
    assert text.count("not measured") == len(others) - 1


def test_rollout_rows_bring_their_bars_and_their_table(results):
    assert "Rollout" not in section(results) and "decode throughput" not in section(results)
    row = Row(
        suite="rollout_decode_qwen3-0.6b",
        work="decode",
        shape={"model": "qwen3-0.6b", "sequences": 256, "prompt": 512, "new_tokens": 1024},
        dtype="bfloat16",
        ours_us=20.0,
        stock_us=19.8,
        ratio=0.99,
        ceiling_fraction=0.5,
        tokens_per_second={"ours": 50_000.0, "stock": 50_505.0},
        figures={"strict/idle_share": 0.021},
    )
    own = Row(**{**vars(row), "suite": "rollout_own", "work": "not for the README"})
    both = results.merged(row.suite, [row], META, {"complete": True})
    both = both.merged(own.suite, [own], META, {"complete": True})
    text = section(both)
    line = "| qwen3-0.6b: decode, 256 x (512 + 1024) | 50,000 | 50,505 | 0.99 | 50% | 2.1% | - |"
    assert line in text and "not for the README" not in text
    assert "the lowest | 0.99 | &ge; 0.97 | not all cases measured |" in text
    assert text.count("| training step, tokens/s |") == 1


def test_a_missed_and_an_incomplete_bar_are_shown_as_such(results):
    (row,) = results.rows
    slow = Row(**{**vars(row), "ratio": 1.02})
    missed = results.merged("training_step", [slow], META, {"complete": True})
    assert "| 1.02 | &ge; 1.15 | **no** |" in section(missed)
    cut = results.merged("training_step", [row], META, {"complete": False})
    assert "| 1.28 | &ge; 1.15 | not all cases measured |" in section(cut)


def test_rows_of_other_kernels_are_called_that(results):
    assert "Not this tree" not in section(results)
    (row,) = results.rows
    meta = META | {"kernels_sha256": "0" * 64}
    old = Results((), {}).merged("training_step", [row], meta, {"complete": True})
    assert "**Not this tree.**" in section(old) and "`000000000000`" in section(old)


def test_a_figure_changed_by_hand_is_noticed(results):
    readme = rewritten(f"before\n{BEGIN}\n{END}\nafter\n", section(results))
    assert current(readme) == section(results)
    assert readme.startswith("before\n") and readme.endswith("\nafter\n")
    assert current(readme.replace("| 1.28 |", "| 1.38 |")) != section(results)


def test_missing_or_repeated_markers_are_named():
    for text in ("", BEGIN, f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(ValueError, match="exactly one"):
            current(text)


def test_without_results_no_figure_is_claimed():
    text = section(Results((), {}))
    assert not any(c.isdigit() for c in text)
