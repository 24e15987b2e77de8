import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
TABLE = (ROOT.parent / "docs" / "findings.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_of_the_table_is_there(path, name):
    assert f"\ndef {name}(" in (ROOT / path).read_text("utf-8")


def test_every_row_of_a_defect_names_a_test():
    rows = [line for line in TABLE.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) > 20 and all("::test_" in row for row in rows)
