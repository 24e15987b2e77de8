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


UNWRITABLE = {
    "a directory": "",
    "no directory around it": "absent/x.json",
    "under a file": "file/x.json",
    "a place without files": READ_ONLY / "x.json",
    "a file of such a place": READ_ONLY / "version",
    "too long a name": f"{'x' * 251}.json",
}


@pytest.mark.parametrize("place", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_file_that_cannot_be_written_is_refused_by_option_and_path(place, tmp_path):
    (tmp_path / "file").write_text("kept")
    file, before = tmp_path / place, state(tmp_path)
    with pytest.raises(OSError) as refusal:
        require_writable("--json", file)
    assert f"--json {file}: " in str(refusal.value)
    with pytest.raises(OSError):
        write_output(file, "new")
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


def test_asking_changes_nothing_and_what_is_accepted_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in ("first", "second"):
        before = state(tmp_path)
        require_writable("--json", Path("x.json"))
        assert state(tmp_path) == before
        write_output(Path("x.json"), content)
        written = {name: text for name, (text, *_) in state(tmp_path).items()}
        assert written == {"x.json": content.encode()}


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
