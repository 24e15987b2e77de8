"""`rl-consistency verify --world`: the table, its statuses, JSON, what is refused, real runs."""

import json
from dataclasses import replace

import pytest
import torch

from rl_consistency.cli.main import main
from rl_consistency.verify import world
from rl_consistency.verify.mutants.world import WORLD_MUTANTS
from rl_consistency.verify.world import Outcome, control_cells

ROWS = [{"step": 1, "gradient_norm": 0.5, "loss": float("nan")}]


@pytest.fixture
def runs(monkeypatch):
    """Stands in for the processes: every run ends alike but those that `wrong` changes."""

    class Runs:
        cells = None
        wrong = staticmethod(lambda outcome: outcome)

    def run_cells(given, *, steps, device, on_outcome):
        Runs.cells, Runs.steps = given, steps
        plain = {"tokens": 100, "rows": ROWS}
        return [
            Runs.wrong(Outcome(cell=cell, digest=f"{cell.dtype}{cell.algorithm}", **plain))
            for cell in given
        ]

    monkeypatch.setattr(world, "run_cells", run_cells)
    return Runs


def shown(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_one_hash_is_status_0(runs, capsys, tmp_path):
    file = tmp_path / "world.json"
    options = ["--strategy", "replicated", "fsdp2", "--json", str(file)]
    assert main(["verify", "--world", *options]) == 0
    text = shown(capsys)
    assert "one hash per dtype and algorithm: 72 runs of 20 steps, 0 of 7,200 tokens" in text
    assert text.count("bfloat16grpo") == 24 and text.count("bfloat16ppo") == 12
    content = json.loads(file.read_text())
    assert content["passed"] and len(content["cells"]) == 72
    assert content["cells"][0]["strategy"] == "replicated" and content["machine"]["torch"]
    assert {c.world_size for c in runs.cells} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"digest": "beef" * 16}, "in the final parameters"),
        ({"digest": "beef" * 16, "rows": [{**ROWS[0], "loss": 1.0}]}, "in step 1, loss"),
        ({"mismatched_tokens": 3}, "3 of 100 tokens differ from the rollout's"),
        ({"tokens": 0}, "0 of 0 tokens"),
        ({"error": "lines\nValueError: no such thing\n", "digest": ""}, "ValueError: no such"),
        ({"rows": [{**ROWS[0], "gradient_norm": 0.0}]}, "step 1 has no gradient"),
    ],
)
def test_any_difference_is_status_1_and_names_the_run(runs, capsys, tmp_path, changes, text):
    file = tmp_path / "world.json"
    runs.wrong = lambda o: replace(o, **changes) if o.cell.world_size == 3 else o
    narrow = ["--strategy", "fsdp2", "--dtype", "bfloat16", "--micro-batch", "4", "--steps", "7"]
    assert main(["verify", "--world", "1,2,3", *narrow, "--json", str(file)]) == 1
    found = shown(capsys)
    assert "3 processes, fsdp2, micro-batch 4, bf16: " in found and text in found
    assert "1 runs differ or failed: 3 runs of 7 steps" in found and runs.steps == 7
    assert [bool(cell["failure"]) for cell in json.loads(file.read_text())["cells"]] == [0, 0, 1]


def test_ppo_is_compared_with_ppo_and_trains_replicated_only(runs, capsys):
    other = {(2, "fp32 ppo"): {"digest": "beef" * 16}}
    runs.wrong = lambda o: replace(o, **other.get((o.cell.world_size, o.cell.kind), {}))
    narrow = ["--micro-batch", "2", "--algorithm", "ppo"]
    assert main(["verify", "--world", "1,2", *narrow]) == 1
    assert {(cell.algorithm, cell.strategy) for cell in runs.cells} == {("ppo", "replicated")}
    found = shown(capsys)
    assert "fp32 ppo: parts from 1 process, replicated, micro-batch 2, fp32 ppo in the" in found
    assert "1 runs differ or failed: 4 runs of 20 steps" in found and "not run" not in found


def test_what_is_left_out_stands_in_the_table(runs, capsys, monkeypatch):
    libraries = {"fsdp2": "a_library_that_nobody_has"}
    monkeypatch.setattr(world, "LIBRARIES", libraries)
    monkeypatch.setattr(world, "REFUSED", {("replicated", "bfloat16"): "refused by design"})
    assert main(["verify", "--world", "1,2", "--strategy", "replicated", "fsdp2"]) == 0
    text = shown(capsys)
    assert "not run fsdp2 fp32: a_library_that_nobody_has is not installed" in text
    assert "not run replicated bf16: refused by design" in text
    assert text.count("fsdp2 - not run not run") == 2
    assert {(c.strategy, c.dtype) for c in runs.cells} == {("replicated", "float32")}


BAD = {
    "--world 5": "--world 5: numbers of processes split by commas, 1 to 4",
    "--world two": "--world two: numbers",
    "--world 1,": "--world : numbers",
    "--world --strategy ddp": "--strategy ddp: --world trains replicated, fsdp2",
    "--world --micro-batch 5": "--micro-batch 5: --world trains 1, 2, 3, 4",
    "--world --dtype float16": "--dtype float16: --world trains float32, bfloat16",
    "--world --steps 0": "--steps 0: at least 1",
    "--world --algorithm rloo": "--algorithm rloo: --world trains grpo, ppo",
    "--world 2 --strategy fsdp2 --micro-batch 1": "1 of bf16; a single",
    "--world 2 --micro-batch 1": "1 of fp32 ppo, 1 of bf16 ppo; a single one compares",
    "--world --strategy fsdp2 --algorithm ppo": "runs: none; a single",
    "--world --quick --processes 2": "leave out --quick --processes",
    "--micro-batch 1 --steps 0": "takes them; leave out --micro-batch --steps",
    "--world --mutants --steps 3": "leave out --steps",
    "--world 2 --mutants": "give --world 1,2 or more",
}


@pytest.mark.parametrize(("options", "message"), BAD.items(), ids=BAD)
def test_bad_input_is_one_message_and_status_2(runs, capsys, options, message):
    assert main(["verify", *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert runs.cells is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda:1", "--world"], "--device cuda:1: each process takes its own GPU"),
        (["--device", "cuda", "--world", "1,3"], "at most one for each of the 2 GPUs here"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(runs, capsys, monkeypatch, options, message):
    monkeypatch.setattr("rl_consistency.cli.verify.chosen_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["verify", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_mutant_with_one_hash_survives(runs, capsys):
    hash_of_its_own = lambda o: replace(o, digest=f"{o.cell.world_size}")  # noqa: E731
    runs.wrong = lambda o: hash_of_its_own(o) if o.cell.mutant else o
    assert main(["verify", "--world", "--mutants"]) == 0
    total, shows = len(WORLD_MUTANTS), sum(not cell.mutant for cell in control_cells([1]))
    text = f"{total} of {total} mutants caught, {shows} checks green without: yes"
    assert text in shown(capsys)
    runs.wrong = lambda o: hash_of_its_own(o) if o.cell.mutant != "stock sum" else o
    assert main(["verify", "--world", "--mutants"]) == 1
    text = shown(capsys)
    assert f"{total - 1} of {total} mutants caught" in text and "red without a mutant" in text


@pytest.mark.thorough
def test_real_runs_have_one_hash(capsys):
    narrow = ["--micro-batch", "2", "--steps", "2", "--strategy", "replicated", "fsdp2"]
    assert main(["verify", "--world", "1,3", "--dtype", "bfloat16", *narrow]) == 0
    assert "one hash per dtype and algorithm: 6 runs of 2 steps, 0 of " in shown(capsys)
