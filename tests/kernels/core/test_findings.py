"""Findings in a file that processes share: merged, whole, and never trusted blindly."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

import pytest
import torch

from rl_consistency.kernels.core import findings as module
from rl_consistency.kernels.core.findings import (
    CACHE_VARIABLE,
    FOLDER,
    RULE,
    Certificate,
    Findings,
    Winner,
    choose,
    findings_of,
    forget_on_change,
    locked,
    make_own,
    own_text,
    picked_once,
    replace_whole,
    rows_bucket,
    shipped,
    withdrawn_schedules,
)

CPU = torch.device("cpu")
IDENTITY = {"device": "one", "driver": "1"}
FAST, FASTER = Winner("fast", 8.0, 10.0), Winner("faster", 7.0, 10.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / FOLDER / "file.json"


@pytest.fixture
def alone(monkeypatch):
    """This test's own findings, and picks that know of no others."""
    monkeypatch.setattr(module, "_by_device", {})
    module.forget_picks()
    yield
    module.forget_picks()


def opened(path, identity=IDENTITY):
    return Findings(path, identity)


def quiet(path):
    """The store as the next process reads it; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return opened(path)


def test_rows_share_a_bucket_to_the_next_power_of_two():
    assert [rows_bucket(m) for m in (1, 2, 16, 17, 100, 16384, 10**6)] == [
        1, 16, 16, 32, 128, 16384, 16384,
    ]  # fmt: skip


def test_what_was_found_is_kept_for_the_next_process(path):
    store = opened(path)
    store.keep("work", FAST)
    store.certify("key", 0, [16, 9])
    store.certify("key", 0, [12])
    store.certify("bad", 3, [16])
    after = quiet(path)
    assert after.winner("work") == FAST and after.winner("other") is None
    assert after.winners == {"work": FAST}
    assert after.certifies("key") and after.certificate("key").rows == [9, 12, 16]
    assert not after.certifies("bad") and not after.certifies("other")
    assert after.certificate("other") is None
    after.certify("bad", 0, [12])
    assert not after.certifies("bad")


def test_the_folder_is_the_users_own_and_its_files_too(path):
    path.parent.mkdir(mode=0o755)
    opened(path).keep("work", FAST)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in path.parent.iterdir()) == ["file.json", "file.lock"]


def test_what_was_withdrawn_is_never_used_again(path):
    store = opened(path)
    store.keep("work", FAST)
    store.certify("key", 0, [16])
    store.withdraw("work: fast", "3 elements differ")
    store.withdraw("key", "an audit")
    assert store.winner("work") is None and store.winners == {} and not store.certifies("key")
    again = quiet(path)
    assert again.withdrawn == {"work: fast": "3 elements differ", "key": "an audit"}
    again.keep("work", FAST)
    again.certify("key", 0, [12])
    assert again.winner("work") is quiet(path).winner("work") is None
    assert not quiet(path).certifies("key")


def test_processes_merge_what_they_find_and_what_is_bad_in_either_stays_so(path):
    one, two = opened(path), opened(path)
    one.keep("a", FAST)
    one.certify("good", 0, [64])
    one.certify("key", 0, [64])
    two.keep("b", FAST)
    two.certify("key", 4, [77])
    two.withdraw("a: fast", "differs")
    two.withdraw("good", "an audit")
    assert one.winner("a") == FAST and one.certifies("good")  # it has not looked since
    one.keep("c", FAST)
    assert one.winner("a") is None and one.winner("b") == FAST and not one.certifies("good")
    assert one.certificate("key") == quiet(path).certificate("key") == Certificate(4, [64, 77])
    assert set(quiet(path).winners) == {"b", "c"}


def test_a_later_finding_replaces_an_earlier_one_and_is_not_replaced_by_it(path):
    one, two = opened(path), opened(path)
    one.keep("work", FAST)
    two.keep("work", FASTER)
    one.keep("other", FAST)
    assert quiet(path).winner("work") == one.winner("work") == FASTER


WRITER = """
import sys
from pathlib import Path
from rl_consistency.kernels.core.findings import Findings, Winner
path, name = Path(sys.argv[1]), sys.argv[2]
store = Findings(path, {"device": "one", "driver": "1"})
for i in range(8):
    store.keep(f"{name}{i}", Winner("fast", 1.0, 2.0))
    store.withdraw(f"key {name}{i}", "differs")
"""


def test_processes_that_write_at_once_lose_nothing(path):
    command = [sys.executable, "-W", "error::UserWarning", "-c", WRITER, str(path)]
    running = [subprocess.Popen([*command, name]) for name in "abc"]
    assert [process.wait() for process in running] == [0, 0, 0]
    store, names = quiet(path), {f"{name}{i}" for name in "abc" for i in range(8)}
    assert set(store.winners) == names and set(store.withdrawn) == {f"key {n}" for n in names}


GOOD = {"schedule": "fast", "us": 1.0, "default_us": 2.0}


def content(**changes):
    return {
        "identity": IDENTITY,
        "winners": {"work": GOOD},
        "certificates": {"key": {"differing": 0, "rows": [4]}},
        "withdrawn": {"other": "why"},
    } | changes


def of_key(**entry):
    return content(certificates={"key": entry})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError"),
        ('{"identity"', "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        (b"\xff\xfe{}", "UnicodeDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        (content(identity={"device": "two"}), "of another device, driver or version"),
        (content(identity=IDENTITY | {"more": "x"}), "of another device, driver or version"),
        (content(winners=[]), "AttributeError"),
        (content(winners={"work": "fast"}), "TypeError"),
        (content(winners={"work": GOOD | {"schedule": 3}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"us": "1"}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"us": True}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"us": -1.0}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"us": float("nan")}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"us": float("inf")}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"us": 1e300}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"default_us": 1e-300}}), "TypeError: not a winner"),
        (content(winners={"work": GOOD | {"more": 1}}), "TypeError"),
        (content(certificates=[]), "AttributeError"),
        (of_key(differing=0), "TypeError"),
        (of_key(differing="0", rows=[4]), "TypeError: not a certificate"),
        (of_key(differing=True, rows=[4]), "TypeError: not a certificate"),
        (of_key(differing=0, rows=4), "TypeError: not a certificate"),
        (of_key(differing=0, rows={}), "TypeError: not a certificate"),
        (of_key(differing=0, rows=["4", None]), "TypeError: not a certificate"),
        (content(withdrawn=["bb"]), "AttributeError"),
        (content(withdrawn={"key": None}), "TypeError: not a reason"),
        (content(withdrawn={"key": {"fast": "differed"}}), "TypeError: not a reason"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_the_reason_and_made_again(path, text, reason):
    path.parent.mkdir(mode=0o700)
    text = json.dumps(text) if isinstance(text, dict) else text
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    with pytest.warns(UserWarning, match=reason) as told:
        store = opened(path)
        assert store.winners == store.withdrawn == {} and store.certificate("key") is None
        store.keep("work", FASTER)
    assert len(told) == 1
    assert quiet(path).winners == {"work": FASTER}


def test_a_good_file_is_believed(path):
    """Control of the test above."""
    path.parent.mkdir(mode=0o700)
    path.touch(0o600)
    path.write_text(json.dumps(content()))
    store = quiet(path)
    assert store.winner("work") and store.certifies("key") and store.withdrawn == {"other": "why"}


@pytest.mark.parametrize("place", ["file", "folder"])
def test_what_others_may_write_to_is_ignored(path, place):
    """It would admit products of the library that were not compared on this machine."""
    opened(path).certify("key", 0, [16])
    assert quiet(path).certifies("key")
    (path if place == "file" else path.parent).chmod(0o777)
    with pytest.warns(UserWarning, match="others may write to"):
        assert opened(path).certificate("key") is None


def test_a_cache_of_another_user_is_ignored_and_not_written_to(path, monkeypatch):
    opened(path).keep("work", FAST)
    before = path.read_bytes()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.warns(UserWarning, match=f"belongs to user {own}") as told:
        store = opened(path)
        assert store.winners == {}
        store.keep("other", FAST)
        store.keep("more", FAST)
    assert len(told) == 2 and "cannot be written" in str(told[1].message)
    assert store.winner("other") == FAST and path.read_bytes() == before


def test_a_link_or_a_pipe_is_not_read(path, tmp_path):
    opened(tmp_path / "elsewhere" / "file.json").keep("work", FAST)
    path.parent.mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere" / "file.json")
    with pytest.warns(UserWarning, match="is ignored"):
        assert opened(path).winners == {}
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.warns(UserWarning, match="is no file"):
        assert opened(path).winners == {}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_a_link_or_a_pipe_is_not_opened_and_its_target_stays(path, tmp_path, kind):
    path.parent.mkdir(mode=0o700)
    target, lock = tmp_path / "precious", path.with_suffix(".lock")
    target.write_text("kept")
    if kind == "link":
        lock.symlink_to(target)
    else:
        os.mkfifo(lock, 0o600)
    store = opened(path)
    with pytest.warns(UserWarning, match="cannot be written"):
        store.keep("work", FAST)
    assert target.read_text() == "kept" and not path.exists() and store.winner("work") == FAST


def test_where_the_rule_was_kept_there_is_no_winner_and_the_finding_says_so(path):
    opened(path).keep("work", Winner(RULE, 8.0, 8.0))
    store = quiet(path)
    assert store.winner("work") is None and store.winners == {}
    assert store.finding("work") == Winner(RULE, 8.0, 8.0) and store.finding("other") is None


def full_disk(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_write_access_there_is_one_warning_and_findings_in_memory(path):
    path.parent.parent.joinpath(FOLDER).write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="RL_CONSISTENCY_CACHE") as told:
        store = opened(path)
        store.keep("work", FAST)
        store.certify("key", 0, [16])
        store.withdraw("wrong", "differs")
    assert sum("cannot be written" in str(w.message) for w in told) == 1
    assert store.winner("work") == FAST and store.certifies("key")
    assert store.withdrawn == {"wrong": "differs"}


def test_what_a_full_disk_did_not_take_outlasts_the_older_file(path, monkeypatch):
    opened(path).keep("work", FAST)
    before, store = path.read_bytes(), quiet(path)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", full_disk)
        with pytest.warns(UserWarning, match="No space left on device") as told:
            store.keep("work", FASTER)
            store.keep("other", FAST)
    assert len(told) == 1 and path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["file.json", "file.lock"]
    assert store.winners == {"work": FASTER, "other": FAST}
    store.keep("later", FAST)
    assert quiet(path).winners == {"work": FASTER, "other": FAST, "later": FAST}
    # What another process finds after that is newer than what was written.
    opened(path).keep("work", FAST)
    store.keep("more", FAST)
    assert store.winner("work") == FAST


def test_a_folder_that_is_a_link_is_left_alone(path, tmp_path):
    target = tmp_path / "project"
    target.mkdir(mode=0o755)
    target.chmod(0o755)
    path.parent.symlink_to(target)
    store = opened(path)
    with pytest.warns(UserWarning, match=f"{FOLDER} is a link"):
        store.keep("work", FAST)
    assert store.winner("work") == FAST
    assert target.stat().st_mode & 0o777 == 0o755 and not any(target.iterdir())


def test_a_file_that_was_ignored_for_its_folder_is_not_adopted_later(path):
    opened(path).keep("work", FAST)
    path.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write to"):
        store = opened(path)
    store.keep("other", FAST)
    assert store.winners == quiet(path).winners == {"other": FAST}


def test_a_huge_file_is_not_read(path):
    opened(path).keep("work", FAST)
    os.truncate(path, 1 << 40)
    with pytest.warns(UserWarning, match="no such file has more than"):
        assert opened(path).winners == {}


def test_a_device_without_schedules_keeps_nothing_on_disk(alone, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    findings_of(CPU).keep("work", FAST)
    assert findings_of(CPU).winner("work") == FAST and findings_of(CPU).path is None
    assert list(tmp_path.iterdir()) == []


def test_only_an_ops_own_schedule_can_be_chosen(alone):
    own = ["fast", "other"]
    assert choose(CPU, "work", own) is None
    findings_of(CPU).keep("work", FAST)
    findings_of(CPU).keep("poisoned", Winner("os.system", 1.0, 2.0))
    assert choose(CPU, "work", own) == "fast" and choose(None, "work", own) is None
    with pytest.warns(UserWarning, match=r"'os\.system' is no schedule of this op") as told:
        assert choose(CPU, "poisoned", own) is choose(CPU, "poisoned", own) is None
    assert len(told) == 1


def test_the_shipped_data_are_asked_last_and_what_was_withdrawn_is_not_taken(alone, monkeypatch):
    held = module._Content(winners={"work": FAST}, withdrawn={"key": "slower"})
    monkeypatch.setattr(module, "shipped", lambda: held)
    own = ["fast", "faster"]
    assert choose(None, "work", own) == choose(CPU, "work", own) == "fast"
    assert choose(CPU, "other", own) is None and choose(CPU, "other", own, "work") == "fast"
    assert choose(CPU, "work", ["faster"]) is None
    findings_of(CPU).keep("work", Winner(RULE, 8.0, 8.0))
    assert choose(CPU, "work", own) == "fast"
    findings_of(CPU).keep("work", FASTER)
    assert choose(CPU, "work", own) == "faster" and choose(None, "work", own) == "fast"
    findings_of(CPU).withdraw("work: faster", "differs")
    assert choose(CPU, "work", own) == "fast"
    findings_of(CPU).withdraw("work: fast", "differs")
    assert choose(CPU, "work", own) is None
    findings_of(CPU).certify("key", 0, [16])
    assert findings_of(CPU).refuses("key") and not findings_of(CPU).certifies("key")


def test_a_pick_is_asked_once_until_a_winner_changes(alone):
    calls = Counter()

    @picked_once
    def pick(m):
        calls[m] += 1
        return choose(CPU, f"m{m}", ["fast", "faster"])

    try:
        assert pick(1) is pick(1) is None and calls[1] == 1
        findings_of(CPU).keep("m1", FAST)
        assert pick(1) == pick(1) == "fast" and calls[1] == 2
        findings_of(CPU).keep("m1", FASTER)
        assert pick(1) == "faster"
        findings_of(CPU).withdraw("m1: faster", "differs")
        findings_of(CPU).withdraw("a certificate", "differs")
        assert pick(1) is None and withdrawn_schedules() == ["m1: faster"]
    finally:
        module._picks.pop()


def test_what_was_made_from_picks_is_told_of_a_change(alone):
    made = []
    forget_on_change(lambda: made.append("forgotten"))
    try:
        findings_of(CPU).keep("work", FAST)
        assert made == ["forgotten"]
    finally:
        module._picks.pop()


def test_what_is_shipped_is_whole():
    assert len(shipped().winners) == 182 and shipped().certificates == {}
    assert all(of.startswith("tn/") for of in shipped().withdrawn)


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
        monkeypatch.setattr(module.json, "dump", fails)
        with pytest.raises(error):
            replace_whole(path, {"a": 2})
        assert json.loads(own_text(path)) == {"a": 1} and [*folder.iterdir()] == [path]


def test_what_a_killed_writer_left_is_removed_by_the_next_and_nothing_else(tmp_path, monkeypatch):
    path, other = tmp_path / "file[1].json", tmp_path / "file[1].json.lock"
    other.touch()
    monkeypatch.setattr(module.os, "replace", lambda *_: None)  # killed before this
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
