"""Files that processes share: what is read, how one is replaced. Whose files are refused, see the
tests of winners and of certificates."""

import json
import threading
import time

import pytest

from rl_consistency.kernels.core import own_file
from rl_consistency.kernels.core.own_file import locked, make_own, own_text, replace_whole


def test_what_was_replaced_is_read_and_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b"
    assert make_own(folder) and folder.stat().st_mode & 0o777 == 0o700
    path = folder / "file.json"
    replace_whole(path, {"a": 1})
    assert json.loads(own_text(path)) == {"a": 1}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for fails, error in ((full, OSError), (interrupted, KeyboardInterrupt)):
        monkeypatch.setattr(own_file.json, "dump", fails)
        with pytest.raises(error):
            replace_whole(path, {"a": 2})
        assert json.loads(own_text(path)) == {"a": 1} and [*folder.iterdir()] == [path]


def test_what_a_killed_writer_left_is_removed_by_the_next_and_nothing_else(tmp_path, monkeypatch):
    path, other = tmp_path / "file[1].json", tmp_path / "file[1].json.lock"
    other.touch()
    monkeypatch.setattr(own_file.os, "replace", lambda *_: None)  # killed before this
    replace_whole(path, {"a": 1})
    monkeypatch.undo()
    assert len([*tmp_path.iterdir()]) == 2
    replace_whole(path, {"a": 2})
    assert {*tmp_path.iterdir()} == {path, other} and json.loads(path.read_text()) == {"a": 2}


def test_a_folder_that_others_could_write_to_is_closed_and_says_so(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert not make_own(folder) and folder.stat().st_mode & 0o777 == 0o700
    assert make_own(folder)
    for mode in (0o500, 0o555):  # its user made it read-only
        folder.chmod(mode)
        assert make_own(folder) and folder.stat().st_mode & 0o777 == 0o500


def test_one_holds_a_lock_at_a_time(tmp_path):
    order = []

    def other():
        with locked(tmp_path / "lock"):
            order.append("other")

    with locked(tmp_path / "lock"):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
