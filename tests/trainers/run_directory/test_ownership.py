"""What a run may remove: only what its manifest lists, and never through a link."""

import os
import shutil

import pytest

from rl_consistency.numerics.files import remove_leftovers
from rl_consistency.trainers import run as run_module
from rl_consistency.trainers.run_directory import checkpoint, manifest
from rl_consistency.trainers.run_directory import directory as directory_module
from rl_consistency.trainers.run_directory.directory import RunDirectoryError

SHORT = {"training.steps": 1}
TWO = {"training.steps": 2, "training.save_every": 1, "training.keep_checkpoints": 1}
SAVING = {"training.steps": 3, "training.save_every": 1, "training.keep_checkpoints": 1}


def contents(directory):
    """Every file below a directory, and where its links lead."""
    return {
        str(path.relative_to(directory)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def put(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["checkpoints/epoch3.pt", "config.yaml", "metrics.jsonl", "replay/a", "report.html"]
)
def test_a_directory_with_a_user_s_own_files_is_refused_by_name(tiny_run, name, overwrite):
    directory = tiny_run.directory / "run"
    put(directory / name)
    with pytest.raises(RunDirectoryError, match=rf"{name.split('/')[0]}.* no run of ours"):
        tiny_run(**SHORT, overwrite=overwrite)
    assert contents(directory) == {name: b"mine"}


@pytest.fixture
def unchecked(monkeypatch):
    """No run looks at what is in its directory."""
    for place in (run_module, directory_module):
        monkeypatch.setattr(place, "check_directory", lambda config, **modes: None)
    monkeypatch.setattr(manifest, "is_written", lambda file, states: True)


@pytest.mark.parametrize("name", ["checkpoints/epoch3.pt", "config.yaml", "replay/a"])
def test_without_the_check_a_user_s_own_files_are_deleted(tiny_run, unchecked, name):
    """Negative control."""
    put(tiny_run.directory / "run" / name)
    tiny_run(**SHORT, overwrite=True)
    assert b"mine" not in tiny_run.files().values()


def test_overwriting_leaves_a_user_s_wandb_and_notes(tiny_run):
    directory = tiny_run.directory / "run"
    put(directory / "wandb" / "run-1" / "run.wandb")
    put(directory / "notes.txt")
    for overwrite in (False, True):
        tiny_run(**SHORT, overwrite=overwrite)
        assert (directory / "wandb" / "run-1" / "run.wandb").read_text() == "mine"
        assert (directory / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/notes.txt",
        "checkpoints/best/model.safetensors",
        "checkpoints/step_000001/notes.txt",
        "replay/notes.txt",
        "replay/bundle-0123456789abcdef/notes.txt",
    ],
)
def test_a_user_s_files_among_those_of_a_run_are_refused_by_name(tiny_run, finished, name):
    finished(**SHORT)
    directory = tiny_run.directory / "run"
    put(directory / name)
    before = contents(directory)
    with pytest.raises(RunDirectoryError, match=r"notes\.txt|checkpoints/best|replay/bundle"):
        tiny_run(**SHORT, overwrite=True)
    assert contents(directory) == before


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "metrics.jsonl", "checkpoints", "checkpoints/step_000001", "replay"],
)
def test_overwriting_neither_follows_nor_removes_a_link(tiny_run, finished, name):
    finished(**SHORT)
    directory, archive = tiny_run.directory / "run", tiny_run.directory / "archive"
    if name == "replay":
        archive.mkdir()
    else:
        shutil.move(directory / name, archive)
    (directory / name).symlink_to(archive)
    before, kept = contents(directory), contents(archive) if archive.is_dir() else {}
    with pytest.raises(RunDirectoryError, match=f"{name}.*link"):
        tiny_run(**SHORT, overwrite=True)
    assert contents(directory) == before
    assert archive.exists() and (contents(archive) if archive.is_dir() else {}) == kept


def test_without_the_check_a_link_is_removed(tiny_run, unchecked):
    """Negative control."""
    tiny_run(**TWO)
    linked, archived = tiny_run.directory / "run" / "metrics.jsonl", tiny_run.directory / "mine"
    shutil.move(linked, archived)
    linked.symlink_to(archived)
    tiny_run(**SAVING, resume=True)
    assert not linked.is_symlink()


@pytest.mark.parametrize("name", ["checkpoints/step_000002", "checkpoints"])
def test_pruning_removes_nothing_behind_a_link(tiny_run, finished, name):
    finished(**TWO)
    linked, archive = tiny_run.directory / "run" / name, tiny_run.directory / "archive"
    shutil.move(linked, archive)
    linked.symlink_to(archive)
    kept = contents(archive)
    tiny_run(**SAVING, resume=True)
    assert kept.items() <= contents(archive).items() and linked.is_symlink()
    assert tiny_run.checkpoints() == ["step_000002", "step_000003"]


@pytest.mark.parametrize("name", ["step_1", "step_9", "step_0", "step_1 copy", "step_1.bak"])
def test_a_copy_of_a_checkpoint_is_neither_pruned_nor_overwritten_nor_counted(
    tiny_run, name, monkeypatch
):
    real, copies = run_module.save_checkpoint, []

    def and_copy(directory, **given):
        path = real(directory, **given)
        if not copies:
            shutil.copytree(path, directory / name)
            copies.append(contents(directory / name))
        return path

    monkeypatch.setattr(run_module, "save_checkpoint", and_copy)
    tiny_run(**SAVING)
    directory = tiny_run.directory / "run" / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == sorted([name, "step_000003"])
    with pytest.raises(RunDirectoryError, match=f"checkpoints/{name} in"):
        tiny_run(**SHORT, overwrite=True)
    assert contents(directory / name) == copies[0]


@pytest.mark.parametrize("name", ["step_000001/mine", "step_000002/mine/too", "step_000009"])
def test_a_user_s_empty_folder_is_neither_pruned_nor_overwritten(tiny_run, finished, name):
    two = SAVING | {"training.steps": 2, "training.keep_checkpoints": 2}
    finished(**two)
    folder = tiny_run.directory / "run" / "checkpoints" / name
    folder.mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=f"checkpoints/{name.removesuffix('/too')}"):
        tiny_run(**SHORT, overwrite=True)
    if name != "step_000009":  # which stands where the run would write
        tiny_run(**SAVING | {"training.steps": 4}, resume=True)
    assert folder.is_dir()


def test_where_every_file_counts_as_ours_copies_and_empty_folders_go(tiny_run, monkeypatch):
    """Negative control."""
    for place in (checkpoint, directory_module):
        monkeypatch.setattr(place, "strangers", lambda path: [])
    tiny_run(**SHORT)
    directory = tiny_run.directory / "run" / "checkpoints"
    shutil.copytree(directory / "step_000001", directory / "step_0")
    (directory / "step_000001" / "mine").mkdir()
    tiny_run(**TWO, resume=True)
    assert [path.name for path in directory.iterdir()] == ["step_000002"]
    (directory / "step_000009").mkdir()
    tiny_run(**SHORT, overwrite=True)
    assert [path.name for path in directory.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "summary.json"])
def test_resuming_does_not_write_through_a_link(tiny_run, finished, name):
    finished(**TWO)
    directory = tiny_run.directory / "run"
    archived = tiny_run.directory / name
    shutil.move(directory / name, archived)
    (directory / name).symlink_to(archived)
    before = archived.read_bytes()
    with pytest.raises(RunDirectoryError, match=f"{name}.*link"):
        tiny_run(**SAVING, resume=True)
    assert archived.read_bytes() == before and (directory / name).is_symlink()


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def link(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        *(
            (name, make, "regular file")
            for name in (
                "manifest.json",
                "config.yaml",
                "metrics.jsonl",
                "summary.json",
                "drift.png",
            )
            for make in (os.mkdir, os.mkfifo)
        ),
        *((name, make, "directory") for name in ("checkpoints", "replay") for make in (put, link)),
    ],
)
def test_what_stands_in_the_place_of_a_file_or_a_folder_is_refused_at_once(
    tiny_run, finished, name, make, kind
):
    finished(**SAVING)
    directory = tiny_run.directory / "run"
    remove(directory / name)
    make(directory / name)
    before = contents(directory)
    for mode in ("resume", "overwrite"):
        with pytest.raises(RunDirectoryError, match=f"{name} is no {kind}"):
            tiny_run(**SAVING | {"training.steps": 4}, **{mode: True})
    assert contents(directory) == before and os.path.lexists(directory / name)


def test_without_the_check_a_folder_in_the_place_of_a_file_is_found_at_the_end(
    tiny_run, monkeypatch
):
    """Negative control."""
    monkeypatch.setattr(directory_module, "require_kinds", lambda directory: None)
    for place in (directory_module, manifest):
        monkeypatch.setattr(place, "is_written", lambda file, states: True)
    tiny_run(**SHORT)
    directory = tiny_run.directory / "run"
    (directory / "summary.json").unlink()
    (directory / "summary.json").mkdir()
    with pytest.raises(OSError, match=r"summary\.json"):
        tiny_run(**SAVING, resume=True)
    assert (directory / "checkpoints" / "step_000003").is_dir()


def test_a_pipe_in_the_place_of_a_checkpoint_s_state_is_refused_and_not_waited_for(
    tiny_run, finished
):
    finished(**SHORT)
    state = tiny_run.directory / "run" / "checkpoints" / "step_000001" / "trainer.json"
    state.unlink()
    os.mkfifo(state)
    for mode in ("resume", "overwrite"):
        with pytest.raises(RunDirectoryError, match="step_000001|no complete checkpoint"):
            tiny_run(**SHORT, **{mode: True})
    assert state.is_fifo()


def test_a_run_directory_that_is_itself_a_link_runs_resumes_and_is_overwritten(tiny_run):
    real = tiny_run.directory / "scratch"
    real.mkdir()
    (tiny_run.directory / "run").symlink_to(real)
    tiny_run(**SAVING)
    tiny_run(**SAVING, resume=True)
    tiny_run(**SHORT, overwrite=True)
    assert tiny_run.checkpoints() == tiny_run.checkpoints("scratch") == ["step_000001"]


@pytest.mark.parametrize("name", ["config.yaml.partial", "summary.json.partial"])
def test_a_file_at_a_guessable_name_beside_ours_is_left_alone(tiny_run, name):
    target = tiny_run.directory / "precious.txt"
    put(target)
    directory = tiny_run.directory / "run"
    directory.mkdir()
    (directory / name).symlink_to(target)
    tiny_run(**SHORT)
    assert target.read_text() == "mine" and (directory / name).is_symlink()


def test_a_guessable_name_destroys_what_a_link_there_leads_to(tiny_run, monkeypatch):
    """Negative control."""

    def write_beside(file, text):
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(text)
        partial.rename(file)

    monkeypatch.setattr(directory_module, "write_own", write_beside)
    target, directory = tiny_run.directory / "precious.txt", tiny_run.directory / "run"
    put(target)
    directory.mkdir()
    (directory / "config.yaml.partial").symlink_to(target)
    tiny_run(**SHORT)
    assert target.read_text() != "mine"


@pytest.mark.parametrize("damage", ["flipped", "missing", "empty"])
def test_a_damaged_manifest_lists_nothing_that_may_be_removed(tiny_run, finished, damage):
    finished(**SHORT)
    file = tiny_run.directory / "run" / "manifest.json"
    text = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else text.replace(b"config", b"confih"))
    before = contents(file.parent)
    for mode in ("overwrite", "resume"):
        with pytest.raises(RunDirectoryError, match=r"manifest\.json"):
            tiny_run(**SHORT, **{mode: True})
    assert contents(file.parent) == before


def test_overwriting_goes_on_after_a_kill_in_the_middle_of_it(tiny_run, finished, monkeypatch):
    def interrupted(path, **given):
        raise KeyboardInterrupt

    finished(**SAVING)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny_run(**SHORT, overwrite=True)
    _, rows = tiny_run(**SHORT, overwrite=True)
    assert [row["step"] for row in rows] == [1]
    assert not list((tiny_run.directory / "run").rglob(".rl_consistency-*"))


def test_a_directory_that_only_begins_like_a_leftover_is_left_alone(tmp_path):
    mine, kept = tmp_path / ".rl_consistency-notes", tmp_path / "elsewhere"
    for directory in (mine, kept / f".rl_consistency-{'0' * 32}", tmp_path / "run"):
        directory.mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").symlink_to(kept)
    remove_leftovers(tmp_path)
    remove_leftovers(tmp_path / "run" / "checkpoints")
    assert mine.is_dir() and len(list(kept.iterdir())) == 1
    remove_leftovers(kept)
    assert not list(kept.iterdir())
