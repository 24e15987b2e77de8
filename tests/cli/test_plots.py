import json
import math

import pytest

from rl_consistency.cli.plots import (
    drift_counts,
    drift_picture,
    save_picture,
    section_figure,
)
from rl_consistency.parity.metric_table import DRIFT_SECTION, SECTIONS, WORST

OF_TITLE = {section.title: section for section in SECTIONS}


def drawn_axes(title, rows):
    return section_figure(OF_TITLE[title], rows).axes


def drift_axes(rows):
    size, share, _ = drift_picture(rows).axes
    return size, share


def row(step, *, ours=0.0, stock=None, **more):
    def drift(path, largest):
        return {
            f"{path}/tokens": 100,
            f"{path}/mismatched_tokens": 0 if largest == 0 else 40,
            f"{path}/mismatch_fraction": 0.0 if largest == 0 else 0.4,
            f"{path}/logprob_abs_diff/max": largest,
            f"{path}/logprob_abs_diff/mean": largest / 10,
        }

    found = {"step": step, "reward/mean": step / 10} | drift("consistency", ours)
    return found | (drift("stock", stock) if stock is not None else {}) | more


ROWS = [row(1, stock=3e-6), row(2), row(3, stock=5e-7)]


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def pixel_height(axes, value):
    return axes.transData.transform((1, value))[1]


def test_zero_has_a_line_of_its_own_below_every_difference():
    size, share = drift_axes(ROWS)
    ours, stock = lines(size)["rl_consistency, max"], lines(size)["stock, max"]
    assert list(ours.get_ydata()) == [0.0, 0.0, 0.0]
    assert list(stock.get_ydata()) == [3e-6, 5e-7] and list(stock.get_xdata()) == [1, 3]
    low, high = size.get_ylim()
    assert low < 0 and high > 3e-6
    assert pixel_height(size, 5e-8) - pixel_height(size, 0.0) > 20
    labels = [size.yaxis.get_major_formatter()(tick) for tick in size.get_yticks()]
    assert labels[0] == "0 (same bits)" and "$10^{-6}$" in labels
    assert list(lines(share)["stock"].get_ydata()) == [0.4, 0.4]


@pytest.mark.parametrize("rows", [[row(1)], [row(1, stock=0.0)], [row(1, ours=2.5, stock=1e-300)]])
def test_extreme_runs_can_be_drawn(rows):
    drift_picture(rows).canvas.draw()


def test_a_drifted_step_is_marked_however_small_its_share():
    rows = [row(1), row(2, ours=1e-7), row(3)]
    _, share = drift_axes(rows)
    assert list(lines(share)["rl_consistency drifted"].get_xdata()) == [2]
    assert "rl_consistency drifted" not in lines(drift_axes(ROWS)[1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_marked(value):
    size, _ = drift_axes([row(1), row(2, ours=value), row(3)])
    assert list(lines(size)["not finite"].get_xdata()) == [2]


def test_counts_sum_over_the_run():
    assert drift_counts(ROWS) == {
        "rl_consistency": "0 of 300 tokens differ",
        "stock": "80 of 200 tokens differ",
    }
    assert drift_counts([{"step": 1}]) == {}


def test_gradient_checks_are_split_into_passed_and_failed():
    key = "consistency/gradient_check"
    rows = [
        row(step, **{f"{key}/passed": count == 0, f"{key}/mismatched_elements": count})
        for step, count in [(1, 0), (2, 7), (3, 0)]
    ]
    drawn = lines(drawn_axes("Gradient checks", rows)[0])
    assert list(drawn["passed (2)"].get_xdata()) == [1, 3]
    assert list(drawn["failed (1)"].get_ydata()) == [7]


def test_a_check_reported_as_failed_is_never_drawn_as_passed():
    key = "consistency/gradient_check"
    rows = [row(1, **{f"{key}/passed": False, f"{key}/mismatched_elements": 0})]
    assert "failed (1)" in lines(drawn_axes("Gradient checks", rows)[0])


def test_what_was_not_measured_says_so():
    for section in SECTIONS:
        if section is not WORST:
            for axes in section_figure(section, [{"step": 1}]).axes:
                assert [text.get_text() for text in axes.texts] == ["not measured in this run"]


def test_a_histogram_has_a_square_for_each_bin_that_is_not_empty():
    key = "consistency/logprob_abs_diff/count"
    rows = [row(1, **{f"{key}/0": 90}), row(2, **{f"{key}/0": 80, f"{key}/0.1..1": 9}), row(3)]
    rows[2][f"{key}/nan"] = math.inf
    axes = section_figure(DRIFT_SECTION, rows).axes[2]
    names = [label.get_text() for label in axes.get_yticklabels()]
    (squares,) = axes.collections
    found = [(x, names[round(y)]) for x, y in squares.get_offsets()]
    assert sorted(found) == [(1, "0"), (2, "0"), (2, "0.1..1"), (3, "nan")]
    shades = dict(zip(found, squares.get_facecolors()[:, 3]))
    assert shades[1, "0"] == 1.0 > shades[2, "0"] > shades[2, "0.1..1"]


def write_metrics(run_dir, rows):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_the_picture_is_a_png_in_the_run_directory(tmp_path):
    write_metrics(tmp_path / "run", ROWS)
    path = save_picture(tmp_path / "run")
    assert path == tmp_path / "run" / "drift.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in path.parent.iterdir()) == ["drift.png", "metrics.jsonl"]


def test_a_users_file_beside_the_picture_and_behind_a_link_is_left_alone(tmp_path):
    write_metrics(tmp_path, [row(1)])
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".drift.png.unfinished").symlink_to("mine")
    save_picture(tmp_path)
    (tmp_path / "drift.png").unlink()
    (tmp_path / "drift.png").symlink_to("mine")
    with pytest.raises(ValueError, match=r"drift.png is a link, or not what a run of ours wrote"):
        save_picture(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
