"""Files that a user names are written whole, through links, or refused before any work."""

import errno
import os
from pathlib import Path

import pytest

from rl_consistency.numerics.files import require_writable, write_output

READ_ONLY = Path("/proc")
"""Takes no files, not even from root."""


def state(folder):
    return {
        p.name: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.iterdir()
    }


@pytest.fixture
def unwritable(tmp_path, request):
    """Paths at which no file can be written, by what is wrong with them."""
    (tmp_path / "file").write_text("kept")
    return {
        "a directory": tmp_path,
        "no directory around it": tmp_path / "absent" / "x.json",
        "under a file": tmp_path / "file" / "x.json",
        "a place without files": READ_ONLY / "x.json",
        "a file of such a place": READ_ONLY / "version",
        "too long a name": tmp_path / f"{'x' * 251}.json",
    }[request.param]


@pytest.mark.parametrize(
    "unwritable",
    [
        "a directory",
        "no directory around it",
        "under a file",
        "a place without files",
        "a file of such a place",
        "too long a name",
    ],
    indirect=True,
)
def test_a_file_that_cannot_be_written_is_refused_by_option_and_path(unwritable, tmp_path):
    before = state(tmp_path)
    with pytest.raises(OSError) as refusal:
        require_writable("--json", unwritable)
    assert f"--json {unwritable}: " in str(refusal.value)
    assert state(tmp_path) == before
    with pytest.raises(OSError):
        write_output(unwritable, "new")
    assert state(tmp_path) == before


def test_a_read_only_file_is_refused_though_its_folder_could_replace_it(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    file.write_text("kept")

    def read_only(path, mode="r", *rest):
        assert path == file and mode == "r+b"
        raise PermissionError(errno.EACCES, "Permission denied")

    # Root, who runs many a test machine, may write to every file of a folder.
    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(OSError, match="--json .*Permission denied"):
        require_writable("--json", file)


def test_asking_leaves_nothing_and_changes_nothing(tmp_path):
    file = tmp_path / "x.json"
    require_writable("--json", file)
    assert state(tmp_path) == {}
    file.write_text("kept")
    before = state(tmp_path)
    require_writable("--json", file)
    assert state(tmp_path) == before


def test_a_file_that_is_accepted_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in ("first", "second"):
        require_writable("--json", Path("x.json"))
        write_output(Path("x.json"), content)
        assert {name: text for name, (text, *_) in state(tmp_path).items()} == {
            "x.json": content.encode()
        }


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("kept")
    with pytest.raises(UnicodeEncodeError):
        write_output(file, "new \ud800")
    assert file.read_text() == "kept"


def test_a_link_is_written_through(tmp_path):
    folder = tmp_path / "far"
    folder.mkdir()
    link = tmp_path / "x.json"
    link.symlink_to(folder / "real.json")
    for content in ("first", "second"):
        require_writable("--json", link)
        write_output(link, content)
        assert link.is_symlink() and (folder / "real.json").read_text() == content
    link.unlink()
    link.symlink_to(READ_ONLY / "x.json")
    with pytest.raises(OSError, match="--json"):
        require_writable("--json", link)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable("--json", pipe)
    write_output(pipe, "content")
    assert os.read(reader, 100) == b"content" and pipe.is_fifo()
    os.close(reader)


def test_a_file_at_a_guessable_name_beside_it_is_left_alone(tmp_path):
    mine, target = tmp_path / ".x.json.unfinished", tmp_path / "x.json"
    mine.write_text("mine")
    write_output(target, "new")
    assert mine.read_text() == "mine" and target.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".x.json.unfinished", "x.json"]
