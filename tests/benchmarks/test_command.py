"""`python -m benchmarks`: arguments, refusals, the rows, the last line, and what is measured."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.shapes import BANDS
from benchmarks.suite import Case, Choice


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("what", ["ops", "rollout", "train"])
def test_a_missing_gpu_is_one_line_and_status_2(capsys, what):
    assert command.main(what.split()) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --device cuda: no CUDA device is available here; use --device cpu."
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ops --only matmul_forward,nothing", "--only nothing: `ops` has matmul_forward, "),
        ("ops --random-shapes 3", "--random-shapes draws shapes of a GPU's size"),
        ("train --random-shapes 3 --model llama3.2-1b", "give it or --model"),
        ("train --model llama3.2-1b,gpt2", "no model 'gpt2'"),
        ("rollout --vllm /absent", "--vllm /absent: no folder `vllm` with a package is in it"),
        ("rollout --against defaults", "--against goes with --vllm FOLDER"),
        ("rollout --vllm /absent --random-shapes 3", "--random-shapes draws its models"),
        ("vllm --quick", "pip install 'rl-consistency[vllm]'"),
        ("ops --json /absent/x.json", "not a file in an existing directory"),
        ("accuracy --device bogus", "--device"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    given = arguments.split()
    assert command.main(given if "--device" in given else [*given, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def raising(error):
    def run(machine):
        raise error

    return run


def test_a_run_saves_its_rows_and_ends_with_a_line_of_json(monkeypatch, tmp_path, capsys):
    good = Case(
        work="-", shape={"n": 2}, run=lambda m: {"ours_us": 1.0, "ratio": 0.5, "stock": "torch"}
    )
    full = Case(work="-", shape={"n": 3}, run=raising(torch.OutOfMemoryError("CUDA out of memory")))
    killed = Case(work="-", shape={"n": 4}, run=raising(KeyboardInterrupt()))
    suites, file = {"fold": [full, good]}, tmp_path / "rows.json"
    monkeypatch.setitem(command.SUITES, "ops", (lambda choice: suites, ""))
    arguments = ["ops", "--device", "cpu", "--json", str(file)]
    assert command.main(arguments) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = {"fold": {"cases": 1, "mean": 0.5, "lowest": 0.5}}
    assert last == {"failed": ["fold {'n': 3}"], "figures": figures}
    content = json.loads(file.read_text())
    failed, fine = content["rows"]
    assert failed["error"] == "OutOfMemoryError: CUDA out of memory" and fine["ratio"] == 0.5
    meta = content["meta"]
    assert meta["command"] == f"python -m benchmarks {' '.join(arguments)}"
    assert {"device", "versions", "commit", "kernels_sha256", "ceilings"} <= meta.keys()
    suites["fold"] = [good, killed]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    assert len(json.loads(file.read_text())["rows"]) == 1


@pytest.mark.parametrize("what", command.SUITES)
@pytest.mark.parametrize(
    "options",
    [{"tiny": True}, {}, {"seed": 5}, {"models": ["llama3.2-1b", "olmoe-1b-7b"]}],
    ids=lambda options: next(iter(options), "whole"),
)
def test_no_case_is_there_twice(what, options):
    for suite in command.SUITES[what][0](Choice(**options)).values():
        shapes = [(case.work, *case.shape.items()) for case in suite]
        assert shapes and len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("what", ["ops", "train", "rollout"])
def test_a_seed_draws_shapes_of_its_own_and_names_itself(what):
    def drawn(seed):
        args = command.parser().parse_args([what, "--random-shapes", str(seed)])
        return {
            name: [dict(case.shape) for case in suite]
            for name, suite in command.chosen_suites(args, tiny=False).items()
        }

    found = drawn(5)
    assert found == drawn(5)
    for name, others in drawn(6).items():
        assert name.endswith("_random") and all(shape["seed"] == 5 for shape in found[name])
        assert [s | {"seed": 0} for s in found[name]] != [s | {"seed": 0} for s in others]
    if what == "ops":
        rows = [s["m"] for s in found["matmul_forward_random"] + found["matmul_dx_random"]]
        assert all(sum(low <= m <= high for m in rows) >= 12 for low, high in BANDS)


def test_mixtures_of_experts_are_measured_in_suites_of_their_own():
    choice = Choice(models=["qwen2.5-0.5b", "qwen3-30b-a3b-6l"])
    steps = command.SUITES["train"][0](choice)
    sizes = [
        (case.shape["sequences"], case.shape["length"]) for case in steps["training_step_named"]
    ]
    assert sizes == [(16, 1024), (8, 2048), (1, 32768)]
    assert [c.shape["model"] for c in steps["training_step_sparse"]] == ["qwen3-30b-a3b-6l"] * 2
    decoded = command.SUITES["rollout"][0](choice)["rollout_roofline_sparse"]
    assert [case.shape["sequences"] for case in decoded] == [1, 8, 32, 64, 256]


def test_results_of_before_are_still_data():
    folder = Path(command.__file__).with_name("results")
    assert all(json.loads(file.read_text("utf-8")) for file in folder.glob("*.json"))
