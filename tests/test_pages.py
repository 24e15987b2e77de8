"""Pages whose tables are checked: keys beside those of TRL and verl, and memory."""

import re
import runpy
from pathlib import Path

import pytest

from rl_consistency.trainers.config.mistakes import OTHER_NAMES
from rl_consistency.trainers.config.recipe import all_paths

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("page", ["coming_from_trl.md", "coming_from_verl.md"])
def test_the_keys_beside_those_of_others_are_ours_and_those_that_errors_name(page):
    known, others = {*all_paths()}, set()
    for row in (ROOT / "docs" / page).read_text().splitlines():
        cells = row.split(" | ")
        if not row.startswith("| `") or len(cells) != 3:
            continue
        theirs, ours = (set(re.findall(r"`([\w.]+)`", cell)) for cell in cells[:2])
        ours = {key for key in ours if key.split(".")[0] in known and "." in key}
        assert ours <= known, ours - known
        for name in (key.rpartition(".")[2] for key in theirs):
            if name in OTHER_NAMES and not name.startswith("gpu_memory"):
                others.add(name)
                assert OTHER_NAMES[name] in ours or "functions" in str(ours), name
    assert len(others) >= 10


def test_the_table_of_what_fits_where_is_what_its_tool_writes():
    tool = runpy.run_path(str(ROOT / "tools" / "which_fits.py"))
    assert tool["page"]() == tool["PAGE"].read_text("utf-8")
    sizes, needed = tool["MODELS"]["Qwen3-8B"], tool["needed"]
    assert abs(sizes.parameters / 8.19e9 - 1) < 0.01  # its model card
    each = [needed(sizes, world, 8192, 65_536) for world in (1, 2, 4, 8)]
    assert each == sorted(each, reverse=True) and each[0] > 18 * 8.19e9 / 2**30
    assert needed(sizes, 1, 4096, 65_536) < each[0]
    assert tool["fit"]()[1] < 0.15
