"""`python -m benchmarks`: arguments, refusals, the rows, the last line."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.distributed import distributed_suites
from benchmarks.ops.suites import op_suites, random_op_suites
from benchmarks.rollout.suites import (
    named_rollout_suites,
    random_rollout_suites,
    rollout_suites,
)
from benchmarks.shapes import BANDS, draw_folds
from benchmarks.suite import Case
from benchmarks.timing import Ceilings
from benchmarks.train import named_training_suites, random_training_suites, training_suites
from benchmarks.trl import trl_suites
from benchmarks.tune.shipped import write_shipped
from rl_consistency.kernels.core.findings import SHIPPED, Winner


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("what", ["ops", "rollout", "train", "tune matmul"])
def test_a_missing_gpu_is_one_line_and_status_2(capsys, what):
    assert command.main(what.split()) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the benches measure an NVIDIA GPU (sm_80 or later); none is here."
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ops --only matmul_forward,nothing", "--only nothing: `ops` has matmul_forward, "),
        ("ops --random-shapes 3 --only matmul_forward", "`ops` has matmul_random, "),
        ("train --random-shapes 3 --model llama3.2-1b", "give it or --model"),
        ("train --model llama3.2-1b,gpt2", "no model 'gpt2'"),
        ("rollout --vllm /absent", "--vllm /absent: no folder `vllm` with a package is in it"),
        ("rollout --against defaults", "--against goes with --vllm FOLDER"),
        ("rollout --vllm /absent --random-shapes 3", "--random-shapes draws its models"),
        ("ops --json /absent/x.json", "not a file in an existing directory"),
        ("accuracy --device bogus", "--device"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, arguments, message):
    assert command.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def run(monkeypatch, suites, *options):
    class Machine(SimpleNamespace):
        def __init__(self, device):
            super().__init__(device=torch.device("cpu"), ceilings=Ceilings(1.0, 1.0))

    monkeypatch.setitem(command.SUITES, "ops", (lambda: suites, ""))
    monkeypatch.setattr(command, "Machine", Machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return command.main(["ops", *options])


def raising(error):
    def run(machine):
        raise error

    return run


def test_a_run_saves_its_rows_and_ends_with_a_line_of_json(monkeypatch, tmp_path, capsys):
    good = Case(
        work="-", shape={"n": 2}, run=lambda m: {"ours_us": 1.0, "ratio": 0.5, "stock": "torch"}
    )
    full = Case(work="-", shape={"n": 3}, run=raising(torch.OutOfMemoryError("CUDA out of memory")))
    file = tmp_path / "gpu.json"
    assert run(monkeypatch, {"fold": [full, good]}, "--json", str(file)) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = {"fold": {"cases": 1, "mean": 0.5, "lowest": 0.5}}
    assert last == {"failed": ["fold {'n': 3}"], "figures": figures}
    content = json.loads(file.read_text())
    failed, fine = content["rows"]
    assert failed["error"] == "OutOfMemoryError: CUDA out of memory" and fine["ratio"] == 0.5
    meta = content["meta"]
    assert meta["command"] == f"python -m benchmarks ops --json {file}"
    assert {"device", "versions", "commit", "kernels_sha256", "ceilings"} <= meta.keys()
    killed = Case(work="-", shape={"n": 4}, run=raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, {"fold": [good, killed]}, "--json", str(file))
    assert len(json.loads(file.read_text())["rows"]) == 1
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert run(monkeypatch, {"fold": [Case(work="-", shape={}, run=raising(lost))]}) == 2
    assert "the GPU no longer answers" in capsys.readouterr().err


def test_no_case_is_there_twice_and_random_ones_name_their_seed():
    models = ["llama3.2-1b", "olmoe-1b-7b"]
    suites = {**op_suites(), **training_suites(), **rollout_suites(), **distributed_suites()}
    suites |= trl_suites() | named_training_suites(models) | named_rollout_suites(models)
    for suites_of in (random_op_suites, random_training_suites, random_rollout_suites):
        found, others = suites_of(5), suites_of(6)
        assert found.keys() == others.keys() and not suites.keys() & found.keys()
        for name, drawn in found.items():
            assert name.endswith("_random") and all(case.shape["seed"] == 5 for case in drawn)
            assert [c.shape | {"seed": 0} for c in drawn] != [
                c.shape | {"seed": 0} for c in others[name]
            ], name
        suites |= found
    for cases_of in suites.values():
        shapes = [(case.work, case.dtype, *case.shape.items()) for case in cases_of]
        assert shapes and len(set(shapes)) == len(shapes)
    for low, high in BANDS:
        assert sum(low <= c.shape["m"] <= high for c in suites["matmul_random"]) == 12
    assert [c.shape for c in suites["gradient_fold_random"]] == [
        {"seed": 5} | shape for shape in draw_folds(5, 24)
    ]


def test_mixtures_of_experts_are_measured_in_suites_of_their_own():
    models = ["qwen2.5-0.5b", "qwen3-30b-a3b-6l"]
    steps = named_training_suites(models)
    sizes = [
        (case.shape["sequences"], case.shape["length"]) for case in steps["training_step_named"]
    ]
    assert sizes == [(16, 1024), (8, 2048), (1, 32768)]
    assert [c.shape["model"] for c in steps["training_step_sparse"]] == 2 * models[1:]
    (cases_of,) = named_rollout_suites(models[1:]).values()
    assert [case.shape["sequences"] for case in cases_of] == [1, 8, 32, 64, 256]


def test_winners_go_over_those_that_are_shipped_and_the_rest_stays(tmp_path):
    file = tmp_path / "shipped.json"
    file.write_text(SHIPPED.read_text("utf-8"))
    before = json.loads(file.read_text())
    work = next(iter(before["winners"]))
    write_shipped({work: Winner("another"), "matmul/new": Winner("tile")}, {"device": "G"}, file)
    after = json.loads(file.read_text())
    found = {work: {"schedule": "another"}, "matmul/new": {"schedule": "tile"}}
    assert after == before | {"identity": {"device": "G"}, "winners": before["winners"] | found}
    assert file.read_text().count("\n") < 2 * len(after["winners"])
