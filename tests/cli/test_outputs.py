"""Files that a user names are written whole, through links, and in the place of nothing else."""

import argparse
import errno
import json
import os
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from rl_consistency.cli import outputs as module
from rl_consistency.cli.arguments import add_outputs
from rl_consistency.cli.main import main
from rl_consistency.cli.outputs import outputs
from rl_consistency.numerics.files import seal

READ_ONLY = Path("/proc")
"""Takes no files, not even from root."""


def state(folder):
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ino)
        for p in folder.rglob("*")
        if p.is_file()
    }


def write(*arguments, content=None, command="diff"):
    parser = argparse.ArgumentParser()
    add_outputs(parser, json="the result", picture="a picture")
    with outputs(parser.parse_args([*map(str, arguments)]), command, "json", "picture") as written:
        print("for people")
        for option, take in written.items():
            take({"found": content} if option == "json" else Figure())


UNWRITABLE = {
    "a directory": "",
    "no directory around it": "absent/x.json",
    "under a file": "file/x.json",
    "a place without files": READ_ONLY / "x.json",
    "a file of such a place": READ_ONLY / "version",
    "too long a name": f"{'x' * 251}.json",
}


@pytest.mark.parametrize("place", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_file_that_cannot_be_written_is_refused_by_option_and_path(place, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    file, before = tmp_path / place, state(tmp_path)
    with pytest.raises(OSError) as refusal:
        write("--json", file, "--force")
    assert f"--json {file}: " in str(refusal.value)
    assert state(tmp_path) == before and capsys.readouterr().out == ""


def test_a_read_only_file_is_refused_though_its_folder_could_replace_it(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    file.write_text("kept")

    def read_only(path, mode="r", *rest):
        assert path == file and mode == "r+b"
        raise PermissionError(errno.EACCES, "Permission denied")

    # Root, who runs many a test machine, may write to every file of a folder.
    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(OSError, match="--json .*Permission denied"):
        write("--json", file)


def test_a_command_replaces_what_it_wrote_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in ("first", "second"):
        write("--json", "x.json", "--picture", "x.png", content=content)
        assert {p.name for p in tmp_path.iterdir()} == {"x.json", "x.png"}
        found = json.loads(Path("x.json").read_text())
        assert found["found"] == content and found["written_by"] == "rl-consistency diff"


def edited(file):
    file.write_text(file.read_text().replace("result", "Result"))


FOREIGN = {
    "text": lambda file: file.write_text("mine"),
    "nothing": lambda file: file.write_text(""),
    "JSON": lambda file: file.write_text('{"written_by": "rl-consistency diff"}'),
    "sealed JSON": lambda file: file.write_text(seal({"step": 3})),
    "of another command": lambda file: write("--json", file, command="verify"),
    "a picture": lambda file: write("--picture", file),
    "weights": lambda file: file.write_bytes(bytes(range(256)) * 9),
}
FOREIGN |= {
    "its own, edited": lambda file: (write("--json", file, content="result"), edited(file)),
    "its own, and a note": lambda file: (
        write("--json", file),
        file.write_text(file.read_text() + "\nmy note"),
    ),
}


@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN)
def test_what_a_command_did_not_write_is_replaced_by_force_alone(tmp_path, put):
    file, link = tmp_path / "x.json", tmp_path / "link"
    put(file)
    link.symlink_to(file)
    before = state(tmp_path)
    for name in (file, link):
        with pytest.raises(ValueError, match=r"--json .*(link|x\.json): what stands .* --force"):
            write("--json", name)
        assert state(tmp_path) == before
    write("--json", link, "--force")
    assert link.is_symlink() and "found" in json.loads(file.read_text())


@pytest.mark.parametrize(
    "put", [FOREIGN["text"], FOREIGN["weights"], lambda file: Figure().savefig(file, format="png")]
)
def test_a_picture_replaces_no_other_file(tmp_path, put):
    put(tmp_path / "x.png")
    before = state(tmp_path)
    with pytest.raises(ValueError, match="--picture"):
        write("--picture", tmp_path / "x.png")
    with pytest.raises(ValueError, match="one file"):
        write("--json", tmp_path / "y", "--picture", tmp_path / "z" / ".." / "y")
    assert state(tmp_path) == before


def test_a_file_that_comes_while_the_command_works_is_kept(tmp_path):
    file, parser = tmp_path / "x.json", argparse.ArgumentParser()
    add_outputs(parser, json="the result")
    args = parser.parse_args(["--json", str(file)])
    with pytest.raises(ValueError, match="--force"), outputs(args, "diff", "json") as written:
        file.write_text("mine")
        written["json"]({})
    assert file.read_text() == "mine"


RUN = {"manifest.json": "{", "metrics.jsonl": "", "checkpoints/step_000001/model.safetensors": "w"}


@pytest.mark.parametrize("signs", [("metrics.jsonl", "config.yaml"), (".rl_consistency.lock",)])
@pytest.mark.parametrize(
    "name", ["digests.jsonl", "new.json", "checkpoints/step_000001/model.safetensors", "link"]
)
def test_nothing_is_written_inside_a_run_not_even_by_force(tmp_path, name, signs):
    run = tmp_path / "run"
    for file in (*RUN, "digests.jsonl", *signs):
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("of the run")
    (tmp_path / "link").symlink_to(run / "absent.json")
    before, file = state(tmp_path), (tmp_path if name == "link" else run) / name
    for options in ([], ["--force"]):
        with pytest.raises(ValueError, match=f"lies in the run {run}"):
            write("--json", file, *options)
    assert state(tmp_path) == before
    write("--json", tmp_path / "beside.json")


def test_where_every_file_counts_as_its_own_the_weights_go(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(module, "_wrote", lambda *given: True)
    monkeypatch.setattr(module, "is_run", lambda directory: False)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    write("--json", file)
    assert file.read_bytes() != b"weights"


def test_a_dash_is_standard_output_which_has_nothing_else(tmp_path, monkeypatch, capsysbinary):
    monkeypatch.chdir(tmp_path)
    write("--json", "-", content=3)
    said = capsysbinary.readouterr()
    assert json.loads(said.out)["found"] == 3 and said.err == b"for people\n"
    write("--picture", "-")
    said = capsysbinary.readouterr()
    assert said.out.startswith(module.PNG) and said.err == b"for people\n"
    with pytest.raises(ValueError, match="one file"):
        write("--picture", "-", "--json", "-")
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_standard_output_empty(tmp_path, capsys):
    assert main(["diff", str(tmp_path), str(tmp_path), "--json", "-"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "metrics.jsonl" in said.err


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    file = tmp_path / "x.json"
    write("--json", file)
    before = state(tmp_path)
    with pytest.raises(TypeError):
        write("--json", file, content=object())
    assert state(tmp_path) == before


def test_a_link_is_written_through(tmp_path):
    folder = tmp_path / "far"
    folder.mkdir()
    link = tmp_path / "x.json"
    link.symlink_to(folder / "real.json")
    for content in ("first", "second"):
        write("--json", link, content=content)
        assert link.is_symlink()
        assert json.loads((folder / "real.json").read_text())["found"] == content
    link.unlink()
    link.symlink_to(READ_ONLY / "x.json")
    with pytest.raises(OSError, match="--json"):
        write("--json", link)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write("--json", pipe, content="to the pipe")
    assert b"to the pipe" in os.read(reader, 1000) and pipe.is_fifo()
    os.close(reader)


def test_a_file_at_a_guessable_name_beside_it_is_left_alone(tmp_path):
    mine, target = tmp_path / ".x.json.unfinished", tmp_path / "x.json"
    mine.write_text("mine")
    write("--json", target)
    assert mine.read_text() == "mine" and target.is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".x.json.unfinished", "x.json"]
