"""`python -m benchmarks`: arguments, refusals, the last line."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.random_shapes import draw_folds
from benchmarks.results import Results, load, save
from benchmarks.suite import Case
from benchmarks.timing import QUICK, Ceilings
from benchmarks.tune.works import OPS
from tests.benchmarks.made_rows import row


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("what", ["ops", "rollout", "train", "tune"])
def test_a_missing_gpu_is_one_line_and_status_2(capsys, what):
    assert command.main([what]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the benches measure an NVIDIA GPU (sm_80 or later); none is here."
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ops --only matmul_forward,nothing", "--only nothing: `ops` has matmul_forward, "),
        ("train --only matmul_forward", "`train` has training_step"),
        ("ops --random-shapes 3 --only matmul_forward", "`ops` has matmul_random, "),
        ("train --random-shapes 3 --model llama3.2-1b", "give it or --model"),
        ("train --model llama3.2-1b,gpt2", "no model 'gpt2'"),
        ("rollout --vllm /absent", "--vllm /absent: no folder `vllm` with a package is in it"),
        ("rollout --against defaults", "--against and --seconds go with --vllm FOLDER"),
        ("rollout --seconds 10", "--against and --seconds go with --vllm FOLDER"),
        ("rollout --vllm /absent --random-shapes 3", "--random-shapes does not"),
        ("rollout --vllm /absent --random-shapes 3 --model x", "give it or --model"),
        ("rollout --vllm /absent --seconds 0", "--seconds 0: give more than 0"),
        ("ops --json /absent/x.json", "not a file in an existing directory"),
        ("tune nothing", "the ops are matmul, fold"),
        ("tune fold --write", "--write goes with `tune matmul`"),
        ("tune --random-shapes 3", "--random-shapes goes with `tune matmul | fold`"),
        ("tune rotary --random-shapes 3", "--random-shapes goes with `tune matmul | fold`"),
        ("tune matmul --random-shapes 3 --write", "and without --write"),
        ("tune matmul --random-shapes 3 --count 0", "are at least 1"),
        ("tune matmul --random-shapes 3 --compile-workers 0", "are at least 1"),
        ("tune matmul --compile-workers 4", "--compile-workers go with --random-shapes"),
        ("tune matmul --count 4", "--count and --compile-workers go with --random-shapes"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, arguments, message):
    assert command.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_a_run_saves_and_ends_with_a_line_of_json(monkeypatch, tmp_path, capsys):
    good = Case(work="-", shape={}, run=lambda m: {"ours_us": 1.0, "ratio": 0.5})
    bad = Case(work="bad", shape={"n": 3}, run=lambda m: [][1])
    suites = {"gradient_fold": [good], "other": [bad]}
    machine = SimpleNamespace(device=torch.device("cpu"), ceilings=Ceilings(1.0, 1.0))
    monkeypatch.setitem(command.SUITES, "ops", lambda: suites)
    monkeypatch.setattr(command, "_machine", lambda: machine)
    file = tmp_path / "gpu.json"
    options = ["ops", "--json", str(file)]
    assert command.main([*options, "--only", "gradient_fold"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    name = "gradient_fold_geomean"
    assert last == {"failed": [], "figures": {name: 0.5}, "missed": [name]}
    assert command.main(options) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failed"] == ["other: bad bfloat16 n=3"]
    results = load(file)
    assert [row.suite for row in results.rows] == ["gradient_fold", "other"]
    assert results.meta["command"] == f"python -m benchmarks ops --json {file}"
    assert command.main(["compare", str(file), str(file)]) == 0
    assert "gradient_fold" in capsys.readouterr().out
    missing = tmp_path / "typo.json"
    assert command.main(["compare", str(missing), str(file)]) == 2
    assert f"{missing} does not exist" in capsys.readouterr().err
    file.write_text("[" * 100_000)
    assert command.main(options) == 2
    file.write_text("{")
    assert command.main(options) == 2
    assert f"{file} is no results file" in capsys.readouterr().err


def test_results_are_merged_into_the_first_file(tmp_path, capsys):
    into, other, missing = (tmp_path / f"{name}.json" for name in ("into", "other", "missing"))
    meta, record = {"device": "GPU"}, {"complete": True}
    save(other, Results().merged("matmul_dx", [row("matmul_dx")], meta, record))
    assert command.main(["merge", str(into), str(other)]) == 0
    assert load(into).rows == load(other).rows
    held = into.read_text()
    for name, text in ((missing, "does not exist"), (other, "holds results of 'another'")):
        if name == other:
            save(other, Results(meta={"device": "another"}))
        assert command.main(["merge", str(into), str(name)]) == 2
        assert text in capsys.readouterr().err and into.read_text() == held


@pytest.mark.parametrize("device", ["bogus", "meta", "cpu:x", ""])
def test_accuracy_on_no_device_is_an_error_by_name(device, capsys):
    assert command.main(["accuracy", "--device", device]) == 2
    assert "--device" in capsys.readouterr().err


def test_random_shapes_and_named_models_are_measured_instead(monkeypatch):
    asked = []

    def measure(suites, machine, results, meta, file, only):
        asked.append({name: [case.shape for case in cases] for name, cases in suites.items()})
        return Results()

    monkeypatch.setattr(command, "_machine", lambda: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(command, "measure", measure)
    assert command.main(["ops", "--random-shapes", "5", "--only", "gradient_fold_random"]) == 0
    assert asked.pop() == {"gradient_fold_random": [{"seed": 5} | x for x in draw_folds(5, 24)]}
    assert command.main(["rollout", "--random-shapes", "0"]) == 0
    assert list(asked.pop()) == ["rollout_decode_random"]
    assert command.main(["train", "--model", "llama3.2-1b,qwen2.5-1.5b"]) == 0
    (shapes,) = asked.pop().values()
    assert [shape["model"] for shape in shapes] == 3 * ["llama3.2-1b"] + 3 * ["qwen2.5-1.5b"]
    assert command.main(["rollout", "--model", "llama3.2-1b"]) == 0
    (shapes,) = asked.pop().values()
    assert [(shape["model"], shape["sequences"]) for shape in shapes] == [
        ("llama3.2-1b", 64),
        ("llama3.2-1b", 256),
    ]
    assert command.main(["train", "--model", "mixtral-8x7b-2l,llama3.2-1b"]) == 0
    assert list(asked.pop()) == ["training_step_named", "training_step_sparse"]


def test_random_shapes_are_compiled_first_and_timed_for_a_short_time(monkeypatch, tmp_path):
    machine, calls = SimpleNamespace(device=torch.device("cpu")), []
    monkeypatch.setattr(command, "_machine", lambda: machine)
    monkeypatch.setattr(command, "compile_schedules", lambda *given: calls.append(given))

    def tune(works, machine, file, rounds):
        calls.append(([work.shape for work in works], file, rounds))
        return {"a": {"refused": []}, "b": {"refused": refused}}

    monkeypatch.setattr(command, "tune", tune)
    file, refused = tmp_path / "tune.json", []
    options = ["tune", "fold", "--random-shapes", "5", "--count", "3", "--json", str(file)]
    assert command.main([*options, "--compile-workers", "2"]) == 0
    assert calls == [("fold", 2), (draw_folds(5, 3), file, QUICK)]
    refused = ["a schedule of other bytes"]
    assert command.main(options) == 1


def test_random_shapes_of_the_same_file_are_not_written_into_the_table(monkeypatch, tmp_path):
    written = []

    def tune(works, machine, file, rounds):
        drawn = [SimpleNamespace(key="matmul drawn")]
        return {work.key: {"refused": []} for work in [*works, *drawn]}

    monkeypatch.setattr(command, "_machine", lambda: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(command, "tune", tune)
    monkeypatch.setattr(command, "write_shipped", lambda rows, where: written.extend(rows))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    assert command.main(["tune", "matmul", "--write"]) == 0
    assert len(written) == len(list(OPS["matmul"](torch.device("cpu"))))
    assert "matmul drawn" not in written


def test_a_run_beside_vllm_takes_models_modes_and_names_unknown_ones(monkeypatch, tmp_path, capsys):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    asked = []

    def measure(suites, machine, results, meta, file, only):
        asked.append({name: len(cases) for name, cases in suites.items()})
        return Results()

    monkeypatch.setattr(command, "_machine", lambda: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(command, "measure", measure)
    beside = ["rollout", "--vllm", str(tmp_path)]
    assert command.main([*beside, "--against", "defaults", "--seconds", "500"]) == 0
    suites = [f"rollout_vllm_{name}" for name in ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-8b")]
    assert asked.pop() == dict.fromkeys(suites, 5)
    assert command.main([*beside, "--model", "qwen3-30b-a3b"]) == 0
    assert asked.pop() == {"rollout_vllm_qwen3-30b-a3b": 5}
    assert command.main([*beside, "--only", "rollout_vllm_qwen3-8b"]) == 0
    assert asked.pop() == {"rollout_vllm_qwen3-8b": 5}
    capsys.readouterr()
    assert command.main([*beside, "--against", "defaults,fast"]) == 2
    assert "--against fast: give some of defaults, invariant." in capsys.readouterr().err
    assert command.main([*beside, "--model", "gpt2"]) == 2
    assert "no model 'gpt2'" in capsys.readouterr().err
