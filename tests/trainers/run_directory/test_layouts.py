"""Random files of a user's in and around a run: no command changes one of them."""

import argparse
import os
import random
import shutil
from collections import Counter
from contextlib import suppress

import pytest

from rl_consistency.cli.arguments import add_outputs
from rl_consistency.cli.outputs import outputs
from rl_consistency.cli.report import render
from rl_consistency.numerics import files
from rl_consistency.trainers.run_directory import directory as directory_module
from rl_consistency.trainers.run_directory import manifest
from rl_consistency.trainers.run_directory.directory import (
    NAMES,
    check_directory,
    locked,
    open_directory,
)

LAYOUTS = 100
SHORT = {"training.steps": 1, "training.save_every": 1}
FOLDERS = ("", "checkpoints", "checkpoints/step_000001", "replay", "replay/bundle-0", "wandb/run-1")
MINE = ("notes.txt", "model.safetensors", "found.json", *(n for n in NAMES if "." in n))


def state(path):
    """A file's bytes, where a link leads, or that it is a folder."""
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else "folder" if path.is_dir() else None


def states(folder):
    return {path: state(path) for path in folder.rglob("*")}


def change(rng, run, outside):
    """Do one thing that a user does; returns the paths that are theirs from now on."""
    folder = run / rng.choice(FOLDERS)
    kind = rng.choice(("add", "add", "edit", "edit", "replace", "link", "move", "delete", "empty"))
    there = [p for p in sorted(run.rglob("*")) if p.is_file() and not p.is_symlink()]
    there = [p for p in there if p.name not in ("manifest.json", ".rl_consistency.lock")]
    chosen = rng.choice(there)
    if kind == "add":
        file = folder / rng.choice(MINE)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(f"mine {rng.random()}")
            return [file.resolve()]
    elif kind == "edit":
        data = bytearray(chosen.read_bytes() or b"\0")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        chosen.write_bytes(data)
        return [chosen.resolve()]
    elif kind == "replace":
        kept = outside / f"copy{rng.random()}"
        shutil.copy(chosen, kept)
        chosen.write_bytes(b"mine, longer" + chosen.read_bytes())
        return [chosen.resolve(), kept]
    elif kind in ("link", "move"):  # to an archive, with a link in its place
        path = rng.choice([p for p in sorted(run.iterdir()) if p.name in NAMES] or [chosen])
        target = outside / f"archive{rng.random()}"
        shutil.move(path, target)
        path.symlink_to(target)
        return [path, target, *(p for p in target.rglob("*") if not target.is_file())]
    elif kind == "delete":
        chosen.unlink()
    elif not folder.exists():
        folder.mkdir(parents=True)
        return [folder]
    return []


def overwrite(rng, config, outside):
    modes = {"resume": False, "overwrite": True}
    check_directory(config, **modes)
    with locked(config.run.output_dir):
        open_directory(config, overwrite=True)


def report(rng, config, outside):
    render(config.run.output_dir)


def json(rng, config, outside):
    parser = argparse.ArgumentParser()
    add_outputs(parser, json="")
    around = [p for p in sorted(config.run.output_dir.parent.rglob("*")) if not p.is_dir()]
    file = rng.choice([rng.choice(around), outside / "new.json"])
    with outputs(parser.parse_args(["--json", str(file)]), "diff", "json") as written:
        written["json"]({"found": 1})


@pytest.fixture
def layouts(tiny_run, finished, monkeypatch):
    """Lays files out by a seed, lets a command work there, and tells what it did to those of the
    user: which are changed, and whether the command was refused."""
    finished(**SHORT)
    monkeypatch.setattr(files, "flush", lambda *paths: None)  # takes most of the time
    monkeypatch.setattr("rl_consistency.cli.report._svg", lambda figure, title: "")
    monkeypatch.setattr("rl_consistency.cli.plots.section_figure", lambda section, rows: None)
    whole = tiny_run.directory / "whole"
    shutil.move(tiny_run.directory / "run", whole)
    render(whole)

    def lay(seed, command):
        rng, place = random.Random(seed), tiny_run.directory / f"layout{seed}-{command.__name__}"
        run, outside = place / "run", place / "outside"
        shutil.copytree(whole, run)
        outside.mkdir()
        mine = {path for _ in range(rng.randint(0, 3)) for path in change(rng, run, outside)}
        mine = {path: state(path) for path in mine if os.path.lexists(path)}
        before, config = states(place), tiny_run.config(**{"run.output_dir": str(run)})
        try:
            command(rng, config, outside)
            refused = False
        except (ValueError, OSError):
            refused = True
        lost = [path for path, was in mine.items() if state(path) != was]
        unchanged = states(place) == before
        shutil.rmtree(place)
        return lost, refused, unchanged

    return lay


@pytest.mark.parametrize("command", [overwrite, report, json])
def test_no_file_of_a_user_s_is_changed_and_a_refusal_changes_none(layouts, command):
    outcomes = Counter()
    for seed in range(LAYOUTS):
        lost, refused, unchanged = layouts(seed, command)
        assert not lost, (seed, lost)
        assert unchanged or not refused, seed
        outcomes["refused" if refused else "done"] += 1
    assert min(outcomes["refused"], outcomes["done"]) > 5, outcomes


@pytest.mark.parametrize("command", [overwrite, report, json])
def test_where_all_that_is_there_counts_as_written_files_are_lost(layouts, command, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(manifest, "is_written", lambda file, states: True)
    monkeypatch.setattr(directory_module, "is_written", lambda file, states: True)
    monkeypatch.setattr("rl_consistency.cli.outputs._wrote", lambda *given: True)
    monkeypatch.setattr("rl_consistency.cli.outputs.is_run", lambda directory: False)
    assert any(layouts(seed, command)[0] for seed in range(LAYOUTS))
