"""Kills at random points and flipped bits in random files: the same digest, or a refusal by name.

A few of each by default; `pytest --attempts 100` on this file makes a hundred kills and a hundred
flips.
"""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from itertools import count

import pytest

from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.run_directory.directory import RunDirectoryError
from rl_consistency.trainers.run_directory.manifest import write_own
from rl_consistency.trainers.run_directory.step_files import read_metrics

SEED = 20
FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
RELATIVE = ("os.remove", "os.rmdir")
"""rmtree names what it removes relative to an open directory."""


@pytest.fixture
def attempts(request):
    return request.config.getoption("--attempts")


@pytest.fixture
def changes(tiny_run):
    checks = {"consistency.gradient_check_every": 0, "consistency.shadow_every": 0}
    return tiny_run.LONG | checks | {"training.keep_checkpoints": 3}


def in_a_child(run, directory, *, kill_at_event=None, kill_after=None):
    """Run in a process of its own, and kill it; returns its count of file events, or None."""
    fork = multiprocessing.get_context("fork")
    events = fork.Value("i", 0, lock=False)

    def hook(event, args):
        if event in FILE_EVENTS and (event in RELATIVE or str(directory) in str(args[0])):
            events.value += 1
            if events.value == kill_at_event:
                os.kill(os.getpid(), signal.SIGKILL)

    def child():
        sys.addaudithook(hook)
        run()

    process = fork.Process(target=child)
    process.start()
    if kill_after is not None:
        time.sleep(kill_after)
        process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return None if process.exitcode else events.value


def prepare(mode, whole, directory):
    """The directory as a run of this mode finds it, with a file of the user's in it."""
    shutil.rmtree(directory, ignore_errors=True)
    if mode == "begin":
        directory.mkdir()
    else:
        shutil.copytree(whole, directory)
    if mode == "resume":
        shutil.rmtree(directory / "checkpoints" / "step_000006")
    (directory / "notes.txt").write_text("mine")


@pytest.mark.thorough
def test_a_run_killed_at_random_points_ends_with_the_digest_of_one_that_was_not(
    tiny_run, lasting, changes, attempts
):
    rng, outcomes = random.Random(SEED), Counter()
    whole, directory = tiny_run.directory / "whole", tiny_run.directory / "run"
    started = time.perf_counter()
    events = in_a_child(lambda: tiny_run.of_its_own("whole", **changes), whole)
    seconds = time.perf_counter() - started
    digest = json.loads((whole / "summary.json").read_text())["parameter_digest"]
    rows = read_metrics(whole / "metrics.jsonl")
    modes = {"begin": {}, "resume": {"resume": True}, "overwrite": {"overwrite": True}}
    for number in count():
        mode = list(modes)[number % 3]

        def run(mode=mode):
            tiny_run(**changes, **modes[mode])

        prepare(mode, whole, directory)
        share = 0.5 if mode == "resume" else 1.0  # so much of the whole run's work is done then
        if number % 2:
            kill = {"kill_after": share * rng.uniform(0, seconds)}
        else:
            kill = {"kill_at_event": rng.randint(1, int(share * events))}
        if in_a_child(run, directory, **kill) is not None:
            continue  # it had ended before
        try:
            resumed, resumed_rows = tiny_run(**changes, resume=True)
            outcomes[mode, "resumed"] += 1
        except RunDirectoryError as error:
            refusal = re.search("no run to resume|no complete checkpoint to resume", str(error))
            assert refusal and str(directory) in str(error)
            outcomes[mode, f"refused: {refusal[0]}"] += 1
            resumed, resumed_rows = tiny_run(**changes, overwrite=True)
        assert resumed["parameter_digest"] == digest, (mode, kill)
        assert lasting(resumed_rows) == lasting(rows), (mode, kill)
        assert (directory / "notes.txt").read_text() == "mine"
        assert not list(directory.rglob(".rl_consistency-*")), (mode, kill)
        if sum(outcomes.values()) == attempts:
            break
    print(*sorted(outcomes.items()), sep="\n")


def test_a_run_resumed_without_its_moments_ends_with_another_digest(tiny_run, changes, monkeypatch):
    """Negative control."""
    summary, _ = tiny_run(**changes)
    shutil.rmtree(tiny_run.directory / "run" / "checkpoints" / "step_000006")
    monkeypatch.setattr(PolicyOptimizer, "load", lambda *given: None)
    resumed, _ = tiny_run(**changes, resume=True)
    assert resumed["parameter_digest"] != summary["parameter_digest"]


@pytest.mark.thorough
def test_a_bit_flipped_in_a_random_file_is_refused_by_name_or_changes_nothing(
    tiny_run, lasting, changes, attempts
):
    """Nothing resumes from older checkpoints and replay bundles: a flip there is without effect.
    The other files are replaced, and so have to be what the run wrote."""
    rng, outcomes = random.Random(SEED), Counter()
    summary, rows = tiny_run.of_its_own("whole", **changes)
    whole, directory = tiny_run.directory / "whole", tiny_run.directory / "run"
    shutil.rmtree(whole / "checkpoints" / "step_000006")
    for name in ("drift.png", "report.html"):
        write_own(whole / name, json.dumps(summary))
    bundle = whole / "replay/bundle-0123456789abcdef/bundle.json"
    bundle.parent.mkdir(parents=True)
    bundle.write_text(json.dumps(summary))
    newest = whole / "checkpoints" / "step_000004"
    files = sorted(path for path in whole.rglob("*") if path.is_file() and path.stat().st_size)
    for _ in range(attempts):
        file = rng.choice(files)
        place, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(whole, directory)
        name = file.relative_to(whole)
        data = bytearray(file.read_bytes())
        data[place] ^= 1 << bit
        (directory / name).write_bytes(data)
        if newest in file.parents or file.parent == whole:
            with pytest.raises(ValueError) as error:
                tiny_run(**changes, resume=True)
            assert str(directory) in str(error.value) and name.name in str(error.value)
            outcomes["refused by name"] += 1
        else:
            resumed, resumed_rows = tiny_run(**changes, resume=True)
            assert resumed["parameter_digest"] == summary["parameter_digest"], (name, place, bit)
            assert lasting(resumed_rows) == lasting(rows), (name, place, bit)
            outcomes["the same digest"] += 1
    print(*sorted(outcomes.items()), sep="\n")
    assert sum(outcomes.values()) == attempts
