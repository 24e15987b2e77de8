"""`kernels_hash` moves with every code change and with nothing else."""

import shutil

import pytest

from rl_consistency.kernels.core.kernels_hash import KERNELS, kernels_hash

SOURCE = '''"""A module."""

LIMIT = 3
"""The most."""


class Sum:
    """Adds."""

    total: float = 0.0
    """So far."""


def fold(x, y, scale=2.0, *, first=True):
    """x and y."""
    # Left to right.
    total = x + y
    total = total * scale
    if first and total > LIMIT:
        return x
    return total
'''


def hash_of(tmp_path, *files):
    """Of a new folder that holds files, each a path and a text."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return kernels_hash(folder)


def changed(old, new):
    assert SOURCE.count(old) == 1
    return SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3.0"),
        ("LIMIT = 3", 'LIMIT = "3"'),
        ("LIMIT = 3", "LIMIT = True"),
        ("LIMIT = 3", "LIMIT: int = 3"),
        ("LIMIT = 3", "LIMIT = None"),
        ("def fold(x, y,", "def fold(y, x,"),
        ("def fold(", "def folded("),
        ("def fold(", "async def fold("),
        ("def fold(", "@staticmethod\ndef fold("),
        ("scale=2.0", "scale=0.5"),
        ("scale=2.0", "scale=None"),
        ("first=True", "first=False"),
        ("*, first", "first"),
        ("x + y", "x - y"),
        ("x + y", "y + x"),
        ("x + y\n", "(x + y,)\n"),
        ("first and", "first or"),
        ("total > LIMIT", "total >= LIMIT"),
        ("return x", "return y"),
        ("    return total\n", "    return total\n    return None\n"),
        ("    return total\n", "    return total\n    pass\n"),
        ("total: float = 0.0", "total: float = -0.0"),
        ("total: float = 0.0", "sum: float = 0.0"),
        ("class Sum:", "class Sum(list):"),
        (
            "    total = x + y\n    total = total * scale\n",
            "    total = total * scale\n    total = x + y\n",
        ),
    ],
)
def test_a_change_of_code_moves_the_hash(tmp_path, old, new):
    assert hash_of(tmp_path, ("a.py", changed(old, new))) != hash_of(tmp_path, ("a.py", SOURCE))


def test_a_renamed_variable_moves_the_hash(tmp_path):
    renamed = SOURCE.replace("    total", "    result")
    assert hash_of(tmp_path, ("a.py", renamed)) != hash_of(tmp_path, ("a.py", SOURCE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Left to right.", "# Right to left, it says."),
        ("    # Left to right.\n", ""),
        ('"""A module."""', '"""Another."""'),
        ('"""A module."""\n', ""),
        ('"""Adds."""', '"""Subtracts, at length."""'),
        ('    """x and y."""\n', ""),
        ('"""The most."""', '"""The least."""'),
        ('    """So far."""\n', ""),
        ("LIMIT = 3\n", "LIMIT = 3\n\n\n\n"),
        ("    total = x + y\n", "    total = (\n        x\n        + y\n    )\n"),
        (
            "x, y, scale=2.0, *, first=True",
            "\n    x,\n    y,\n    scale=2.0,\n    *,\n    first=True,\n",
        ),
    ],
)
def test_comments_docstrings_and_layout_do_not(tmp_path, old, new):
    assert hash_of(tmp_path, ("a.py", changed(old, new))) == hash_of(tmp_path, ("a.py", SOURCE))


def test_a_new_definition_moves_the_hash_and_an_empty_file_does_not(tmp_path):
    alone = hash_of(tmp_path, ("a.py", SOURCE))
    found = {
        alone,
        hash_of(tmp_path, ("a.py", SOURCE), ("deep/down/b.py", "x = 1\n")),
        hash_of(tmp_path, ("a.py", SOURCE), ("deep/b.py", "x = 2\n")),
        hash_of(tmp_path, ("a.py", SOURCE), ("deep/b.py", "print(1)\n")),
    }
    assert len(found) == 4
    assert hash_of(tmp_path, ("a.py", SOURCE), ("deep/b.py", '"""Nothing."""\n')) == alone
    assert hash_of(tmp_path, ("a.py", SOURCE), ("notes.txt", "x = 1\n")) == alone


CALLER = (
    "from rl_consistency.kernels.a import fold\n\n\ndef twice(x):\n    return fold(fold(x, x), x)\n"
)


@pytest.mark.parametrize(
    "files",
    [
        [("deep/a.py", SOURCE)],
        [("limit.py", "LIMIT = 3\n"), ("a.py", "from rl_consistency.kernels.limit import LIMIT\n")],
        [
            ("limit.py", "LIMIT = 3\n"),
            ("a.py", "from rl_consistency.kernels.limit import LIMIT as M\n"),
        ],
        [("limit.py", "LIMIT = 3\n"), ("a.py", "from rl_consistency.kernels import limit\n")],
        [("limit.py", "LIMIT = 3\n"), ("a.py", "import rl_consistency.kernels.limit as l\n")],
    ],
)
def test_a_moved_definition_does_not_move_the_hash(tmp_path, files):
    """Nor does how the file that uses it imports it."""
    *moved, (path, text) = files
    if moved:
        name = {
            "import LIMIT\n": "LIMIT",
            "as M\n": "M",
            "limit\n": "limit.LIMIT",
            "as l\n": "l.LIMIT",
        }
        used = next(used for ending, used in name.items() if text.endswith(ending))
        text += changed("LIMIT = 3\n", "").replace("> LIMIT", f"> {used}")
    assert hash_of(tmp_path, *moved, (path, text)) == hash_of(tmp_path, ("a.py", SOURCE))


def test_a_moved_function_and_its_caller_keep_the_hash(tmp_path):
    moved = CALLER.replace("kernels.a", "kernels.deep.b")
    apart = hash_of(tmp_path, ("a.py", SOURCE), ("caller.py", CALLER))
    assert hash_of(tmp_path, ("deep/b.py", SOURCE), ("caller.py", moved)) == apart
    together = SOURCE + CALLER.split("\n\n\n")[1]
    assert hash_of(tmp_path, ("a.py", together)) == apart


def test_a_caller_of_another_function_of_the_same_name_moves_the_hash(tmp_path):
    files = ("a.py", SOURCE), ("b.py", changed("x + y", "x - y"))
    one = hash_of(tmp_path, *files, ("caller.py", CALLER))
    other = hash_of(tmp_path, *files, ("caller.py", CALLER.replace("kernels.a", "kernels.b")))
    assert other != one


def test_another_function_from_outside_moves_the_hash(tmp_path):
    def of(line):
        return hash_of(tmp_path, ("a.py", f"{line}\n\ndef f(x):\n    return rsqrt(x)\n"))

    assert of("from torch import rsqrt") == of("from torch import rsqrt, nn")
    assert of("from torch import rsqrt") != of("from triton.language import rsqrt")


def test_every_kernel_file_is_in_the_hash(tmp_path):
    copy = shutil.copytree(KERNELS, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    whole = kernels_hash(copy)
    assert whole == kernels_hash()
    files = sorted(copy.rglob("*.py"))
    assert len(files) > 50
    for file in files[:: len(files) // 2]:
        kernels_hash.cache_clear()
        source = file.read_text()
        file.write_text(source + "\nchanged = True\n")
        assert kernels_hash(copy) != whole, file
        file.write_text(source)
