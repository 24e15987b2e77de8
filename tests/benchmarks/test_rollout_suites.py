"""The suites of whole models on a CPU, and the arithmetic of what needs a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import distributed
from benchmarks.models import build_model
from benchmarks.rollout import engines
from benchmarks.rollout.decoding import decode_bytes, steady_ticks
from benchmarks.rollout.processes import run_child
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Choice

CPU = torch.device("cpu")


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["rollout", "distributed", "trl"])
def test_every_suite_runs_on_a_cpu(what, tmp_path, monkeypatch):
    # As a script elsewhere starts it, with a safe path.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert command.main([what, "--device", "cpu", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["suite"] for row in rows} == command.SUITES[what][0](Choice(tiny=True)).keys()
    assert not any("unavailable" in row for row in rows)
    for row in rows:
        figures = row.get("figures", {})
        if row["suite"] in ("rollout_grpo_step", "trl_grpo"):
            assert figures["strict/mismatched_tokens"] == 0 < figures["stock/mismatched_tokens"]
        elif row["suite"] == "rollout_cold_start":
            assert 0 < figures["cold/first_token_seconds"] < figures["cold/process_seconds"]


def test_lengths_are_spread_and_prompts_shared_within_a_group():
    workload = Workload(groups=32, group_size=8, prompt_len=16, longest=1024)
    lengths = workload.lengths()
    assert lengths == workload.lengths() and 380 < sum(lengths) / 256 < 460
    assert min(lengths) >= 32 and max(lengths) == 1024
    prompts = workload.prompts("a", 1000)
    assert prompts[0] == prompts[7] != prompts[8] and len(prompts) == 256
    assert prompts == workload.prompts("a", 1000) != workload.prompts("b", 1000)


def test_a_steady_state_begins_behind_the_step_that_gave_the_last_its_first_token():
    # Two sequences; the second is prefilled while the first decodes alone, and the first ends.
    tokens = [0, 1, 2, 4, 6, 8, 10, 11, 12]
    assert steady_ticks(tokens, 2, 4) == (3, 6) and steady_ticks([*range(0, 9, 2)], 2, 4) == (2, 3)
    with pytest.raises(RuntimeError, match="too few steps decoded all 2 sequences"):
        steady_ticks([0, 1, 2, 3, 4], 2, 4)


def test_a_step_of_a_mixture_reads_the_experts_that_even_routing_would_meet():
    model = build_model("tiny-olmoe", CPU)
    held = sum(p.nbytes for layer in model.model.layers for p in layer.mlp.experts.parameters())
    every, _ = decode_bytes(model, 100_000)
    chosen = model.config.num_experts_per_tok / model.config.num_experts
    assert every - decode_bytes(model, 1)[0] == pytest.approx((1 - chosen) * held)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="this takes 2 GPUs; here are 1"):
        distributed.on_ranks(SimpleNamespace(device=torch.device("cuda")), 2, print)


def test_a_process_that_fails_says_so():
    _, _, failure = run_child("it", ["-m", "no_such_module"], {})
    assert failure.startswith("it ended with status 1: ") and "No module named" in failure


VLLM = """
import os
from types import SimpleNamespace


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **settings):
        assert settings["load_format"] == "dummy" and not settings["enable_prefix_caching"]
        assert os.path.exists(settings["model"] + "/config.json")

    def apply_model(self, function):
        pass

    def generate(self, inputs, sampling, use_tqdm):
        if os.environ["VLLM_BATCH_INVARIANT"] == "1" and len(inputs) == 6:
            raise RuntimeError("no kernel of this mode")
        counts = [each.max_tokens for each in sampling]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * n)]) for n in counts]
"""
"""What the bench asks of vLLM, without a model."""


def test_a_row_holds_all_engines_and_one_that_fails_hides_nothing(monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM, "utf-8")
    real = engines.engine_times
    monkeypatch.setattr(
        engines,
        "engine_times",
        lambda name, *given: ([[2.0, 1.0, 3.0]] * 2, "") if name == "ours" else real(name, *given),
    )
    (rows,) = engines.vllm_suites(Choice(tiny=True, vllm=tmp_path)).values()
    first, joining = (case.run(SimpleNamespace(device=CPU)) for case in rows)
    assert first["ours_us"] == 2e6 and first["peers"].keys() == {"vllm", "vllm batch-invariant"}
    assert first["tokens_per_second"]["ours"] == 2 * 6 / 2.0
    assert joining["peers"].keys() == {"vllm"}
    (why,) = joining["unavailable"].values()
    assert "ended with status 1: RuntimeError: no kernel of this mode" in why
