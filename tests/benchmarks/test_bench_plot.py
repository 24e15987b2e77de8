"""Plots of benchmark results."""

import pytest

from benchmarks.plot import NOT_RATIOS, ratio_figure, save_plots
from benchmarks.results_file import BARS, Results, Row


def rows(suite, shapes, **fields):
    return [
        Row(
            suite=suite,
            work=suite,
            shape=shape,
            dtype="bfloat16",
            ours_us=1.0,
            stock_us=0.5 + i,
            ratio=0.5 + i,
            **fields,
        )
        for i, shape in enumerate(shapes)
    ]


MATMUL = rows("matmul_forward", [{"m": m, "n": n, "k": 64} for n in (32, 48) for m in (1, 16)])
STEPS = rows(
    "training_step",
    [{"model": "qwen3-0.6b", "sequences": 16, "length": 1024}] * 2,
    peers={"liger": 2.0},
)
FAILED = Row(suite="elementwise", work="-", shape={}, dtype="bfloat16", error="RuntimeError")


def test_every_measured_suite_has_a_png_and_an_svg(tmp_path):
    results = Results((*MATMUL, *STEPS, FAILED), {"device": "Test GPU"})
    written = save_plots(results, tmp_path)
    assert [p.name for p in written] == [
        "bench_matmul_forward.png",
        "bench_matmul_forward.svg",
        "bench_training_step.png",
        "bench_training_step.svg",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    again = tmp_path / "again"
    again.mkdir()
    for first, second in zip(written, save_plots(results, again), strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_lines_are_one_per_weight_and_sorted_by_rows():
    (axes,) = ratio_figure("matmul_forward", MATMUL[::-1], "Test GPU").axes
    lines = [line for line in axes.lines if line.get_label().startswith("n ")]
    assert [line.get_label() for line in lines] == ["n 48 k 64", "n 32 k 64"]
    assert [list(line.get_xdata()) for line in lines] == [[1, 16], [1, 16]]
    assert axes.get_ylim()[0] < 0.5 and axes.get_ylim()[1] > 3.5


def test_peers_are_marks_beside_ours():
    (axes,) = ratio_figure("training_step", STEPS, "Test GPU").axes
    found = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert found["liger"] == [0.25, 0.75]
    assert found["rl_consistency"] == [0.5, 1.5]


@pytest.mark.parametrize("name", NOT_RATIOS)
def test_what_is_no_ratio_is_a_bar(name):
    assert name in BARS
