import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
TABLE = (ROOT.parent / "docs" / "reference" / "findings.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_of_the_table_is_there(path, name):
    assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8")


def rows():
    """The cells of every row of a table that has a column of controls."""
    inside = False
    for line in TABLE.splitlines():
        cells = line.strip("| ").split(" | ")
        if cells[-1] == "control":
            inside = True
        elif not line:
            inside = False
        elif inside and not line.startswith("| ---"):
            yield cells


def names_of(cell):
    return set(re.findall(r"\.py::(test_\w+)", cell))


def test_every_row_of_a_defect_names_its_tests_and_other_controls():
    for cells in rows():
        tests, controls = map(names_of, cells[-2:])
        assert tests and controls and not tests & controls, cells


def test_no_defect_is_left_out():
    numbers = {cells[0] for cells in rows() if cells[0][0].isdigit()}
    assert {int(number) for number in numbers - {"9-12"}} == set(range(1, 23))
