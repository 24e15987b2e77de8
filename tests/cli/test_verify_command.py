"""`rl-consistency verify`: options, tables, JSON, statuses."""

import argparse
import json
import os
import re
from contextlib import nullcontext

import pytest
import torch

from rl_consistency.cli import verify as command
from rl_consistency.cli.main import main
from rl_consistency.kernels.core import operand
from rl_consistency.verify import run as verify
from rl_consistency.verify.claims import Result
from rl_consistency.verify.mutants import perturbations
from rl_consistency.verify.mutants import run as mutants
from rl_consistency.verify.mutants.mutant import Mutant
from rl_consistency.verify.presets import PRESETS, build_preset, known_presets
from rl_consistency.verify.sweep import QUICK


def result(**changes):
    named = {"claim": "C1", "subject": "linear", "scope": "fp32", "what": "rows", "detail": ""}
    found = {"cases": 1200, "mismatches": 0, "passed": True, "figure": None, "seconds": 0.1}
    return Result(**named | found | changes)


WITHOUT_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
RED = result(scope="bf16", mismatches=7, passed=False, detail="batch 8: row [3]: 1.0 against 2.0")


@pytest.fixture
def runs(monkeypatch):
    """Stands in for the checks: records the targets, gives back the prepared results."""

    class Runs:
        targets = processes = only = None
        results = (result(),)

    def run_checks(targets, **callbacks):
        Runs.targets, Runs.processes = targets, callbacks["processes"]
        Runs.only = callbacks["only"]
        return list(Runs.results)

    monkeypatch.setattr(verify, "run_checks", run_checks)
    return Runs


def test_green_is_status_0_and_red_is_status_1_with_the_place(runs, capsys):
    assert main(["verify"]) == 0
    assert "1 of 1 checks passed, 1,200 comparisons" in " ".join(capsys.readouterr().out.split())
    runs.results = (result(), RED)
    assert main(["verify"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "C1 linear (bf16): batch 8: row [3]: 1.0 against 2.0" in shown
    assert "1 of 2 checks passed" in shown


def test_the_number_of_processes_is_one_on_a_cpu_unless_it_is_given(runs, capsys):
    main(["verify"])
    assert runs.processes == 1
    main(["verify", "--processes", "3"])
    assert runs.processes == 3
    assert main(["verify", "--processes", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "free", "expected"), [(4, 141, 4), (64, 141, 12), (64, 20, 3), (64, 2, 1)]
)
def test_processes_on_a_gpu_have_a_core_and_memory_each(monkeypatch, cores, free, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 141 << 30))
    args = argparse.Namespace(processes=None)
    assert command._processes(args, torch.device("cuda", 0)) == expected


def test_json_holds_every_result_and_the_fingerprint(runs, tmp_path):
    runs.results = (result(), RED)
    file = tmp_path / "verify.json"
    assert main(["verify", "--json", str(file)]) == 1
    content = json.loads(file.read_text())
    assert content["passed"] is False and content["only"] == []
    assert [r["mismatches"] for r in content["results"]] == [0, 7]
    assert len(content["fingerprint"]["digest"]) == 64
    assert content["fingerprint"]["entries"]["torch"] == torch.__version__
    assert content["machine"]["torch"] == torch.__version__
    assert content["machine"]["device"] and content["machine"]["cuda"] is None


def test_options_choose_the_targets(runs, tmp_path, capsys):
    main(["verify", "--preset", "tiny-llama", "--dtype", "float16", "--quick"])
    (target,) = runs.targets
    assert (target.name, target.dtype, target.sweep) == ("tiny-llama", torch.float16, QUICK)
    main(["verify", "--quick"])
    assert len(runs.targets) == 2 * len(PRESETS)
    main(["verify", "--preset", "all", "tiny-llama", "--dtype", "float16", "bfloat16"])
    assert len(runs.targets) == 2 * len(PRESETS)
    assert {t.dtype for t in runs.targets} == {torch.float16, torch.bfloat16}
    build_preset("tiny-qwen2").save_pretrained(tmp_path / "policy")
    main(["verify", "--model", str(tmp_path / "policy")])
    assert [t.name for t in runs.targets] == ["policy"]
    assert runs.only == ()
    main(["verify", "--only", "router", "experts", "--only", "tiny-olmoe"])
    assert runs.only == ["router", "experts", "tiny-olmoe"]
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.endswith("only router, experts, tiny-olmoe")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "tiny-gpt"], "unknown preset 'tiny-gpt'"),
        (["--preset", "tiny-llama", "qwen3-8b"], "take hours on a CPU"),
        (["--model", "/absent"], "/absent is not a directory"),
        (["--dtype", "float8_e4m3fn"], "fp8 has none"),
        (["--device", "tpu"], "no device"),
        (["--device", "meta"], "no schedule for meta"),
        pytest.param(["--device", "cuda"], "no CUDA device is available", marks=WITHOUT_A_GPU),
        (["--json", "/absent/x.json"], "not a file in an existing directory"),
        (["--json", "/"], "not a file in an existing directory"),
        (["--json", "/proc/x.json"], "--json /proc/x.json: cannot be written"),
        (["--mutants", "--json", "/proc/x.json"], "--json /proc/x.json: cannot be written"),
        (["--mutants", "--preset", "tiny-llama", "--quick"], "leave out --preset --quick"),
        (["--mutants", "--only", "router"], "leave out --only"),
        (["--mutants", "--processes", "0"], "leave out --processes"),
        (["--mutants", "--processes", "-1"], "leave out --processes"),
    ],
)
def test_bad_input_is_one_message_and_status_2(runs, capsys, options, message):
    assert main(["verify", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert runs.targets is None


def test_several_processes_of_a_launcher_are_refused(runs, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["verify", "--quick"]) == 2
    assert "WORLD_SIZE=2: this is for one process" in capsys.readouterr().err
    assert runs.targets is None


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("index", [2, 9, 127, 128, 256, 300])
def test_a_gpu_beyond_those_there_are_is_named(runs, monkeypatch, capsys, count, index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"set to {device}"))
    assert main(["verify", "--device", f"cuda:{index}"]) == 2
    error = capsys.readouterr().err
    assert f"--device cuda:{index}: CUDA devices here: {count}; use an index below" in error
    assert runs.targets is None


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_that_is_there_becomes_the_current_one(monkeypatch, name, index):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "empty", lambda *size, device: device)
    monkeypatch.setattr(operand, "require_device", lambda op, tensor: None)
    assert command.chosen_device(name) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


def test_results_replace_those_of_an_earlier_run_only_when_there_are_some(
    runs, monkeypatch, tmp_path
):
    file = tmp_path / "verify.json"
    file.write_text("earlier")

    def interrupt(targets, **callbacks):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run_checks", interrupt)
    assert main(["verify", "--json", str(file), "--force"]) == 130
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"verify.json": "earlier"}


def test_a_surviving_mutant_is_shown_and_fails(monkeypatch, capsys, tmp_path):
    caught = Mutant(
        name="caught",
        what="embeddings depend on the call",
        perturb=perturbations.embedding_quantized_per_call.perturb,
        caught_by=("C1 embedding",),
    )
    harmless = Mutant(name="harmless", what="-", perturb=nullcontext, caught_by=("C1 embedding",))
    monkeypatch.setattr(mutants, "MUTANTS", (caught,))
    assert main(["verify", "--mutants"]) == 0
    assert "1 of 1 mutants caught" in capsys.readouterr().out
    monkeypatch.setattr(mutants, "MUTANTS", (caught, harmless))
    file = tmp_path / "mutants.json"
    assert main(["verify", "--mutants", "--json", str(file)]) == 1
    assert "SURVIVED" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert [m["killed"] for m in content["mutants"]] == [True, False]
    assert content["passed"] is False


def test_the_help_names_every_preset(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    named = re.findall(r"[a-z0-9.-]+", capsys.readouterr().out)
    assert set(known_presets()) <= set(named)
