"""Rows of our engine beside vLLM; a stand-in speaks for the engines, and ours for itself."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.bars import BARS
from benchmarks.models import is_sparse
from benchmarks.results import Results
from benchmarks.rollout import engine_child
from benchmarks.rollout import side_by_side as bench
from benchmarks.rollout.batch_dependence import Independence
from benchmarks.rollout.child import Budget, ChildError
from benchmarks.rollout.contestants import (
    DEFAULTS,
    INVARIANT,
    OURS,
    Way,
    kv_cache_size,
    save_config,
    ways,
)
from benchmarks.rollout.engine_child import redraw
from benchmarks.rollout.side_by_side import MODELS, WORKS, SideBySide, vllm_suites, work_name
from benchmarks.rollout.workload import Workload
from benchmarks.rows import Row

STAND_IN = Path(__file__).with_name("stand_in.py")
MACHINE = SimpleNamespace(device=torch.device("cpu"))
TINY = (Workload.equal(4, 1, 12, 3), Workload.equal(4, 1, 12, 1), Workload.equal(1, 1, 12, 4))
MIXED = Workload(6, 1, 12, longest=9, shortest=2)
FEW = Independence(prompts=2, others=4, new_tokens=4, longest_prompt=32)


def stand_in(name, seconds, fault="none"):
    return Way(name, (sys.executable, str(STAND_IN), str(seconds), fault), {})


def side_by_side(folder, *contestants, works=TINY, **options):
    logs = {"logs": lambda name: folder / f"{name}.log"}
    return SideBySide("tiny-qwen3", contestants, works=works, independence=FEW, **logs, **options)


def site(folder, text=""):
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(text, "utf-8")
    return folder


VLLM = """
import os
from types import SimpleNamespace

__version__ = "0.0"
INVARIANT = os.environ["VLLM_BATCH_INVARIANT"] == "1"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **settings):
        assert settings["load_format"] == "dummy" and not settings["enable_prefix_caching"]
        assert os.path.exists(settings["model"] + "/config.json")
        assert settings["max_num_seqs"] == 256
        if INVARIANT and BROKEN:
            raise RuntimeError("no kernel of this mode")

    def apply_model(self, function):
        if not INVARIANT:
            raise RuntimeError("not from outside")

    def generate(self, inputs, sampling, use_tqdm):
        assert all(s.ignore_eos and s.logprobs == 0 for s in sampling) and not use_tqdm
        assert all(item["prompt_token_ids"] for item in inputs)
        drift, found = 0.0 if INVARIANT else len(inputs) / 64, []
        for each in sampling:
            tokens = [7] * each.max_tokens
            logprobs = [{7: SimpleNamespace(logprob=-1.0 - drift)} for _ in tokens]
            sample = SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs)
            found.append(SimpleNamespace(outputs=[sample]))
        return found
"""
"""What the child asks of vLLM, without a model."""


def rows_of(compared, suite="rollout_vllm_tiny"):
    fields = {"suite": suite, "dtype": "bfloat16"}
    return [
        Row(work=work_name(w), shape=w.shape, **fields, **compared.row(w, MACHINE)) for w in TINY
    ]


def test_a_row_holds_all_engines(tmp_path, capsys):
    contestants = stand_in(OURS, 0.5), stand_in(DEFAULTS, 2.0), stand_in(INVARIANT, 1.0)
    first, prefill, one = rows_of(side_by_side(tmp_path, *contestants))
    assert first.ours_us == 5e5 and first.peers == {DEFAULTS: 2e6, INVARIANT: 1e6}
    assert first.tokens_per_second == {OURS: 24.0, DEFAULTS: 6.0, INVARIANT: 12.0}
    figures = first.figures
    assert (figures["vllm/ratio"], figures["vllm batch-invariant/ratio"]) == (4.0, 2.0)
    shares = [figures[f"{name}/batch_dependent"] for name in (OURS, DEFAULTS, INVARIANT)]
    assert shares == [0.0, 1.0, 0.0]
    assert figures["vllm/version"] == "9.9" and figures["ours/prefill_seconds"] == 0.5
    assert not first.unavailable
    assert prefill.tokens_per_second[OURS] == 4 * 12 / 0.5
    assert one.tokens_per_second[OURS] == 4 / 0.5 and "ours/prefill_seconds" not in one.figures
    assert "tiny-qwen3, vllm: 4 x (12 + 3): 6 tokens/s" in capsys.readouterr().out
    assert (tmp_path / "tiny-qwen3.vllm.log").exists()


@pytest.mark.parametrize("fault", ["start", "dies", "garbage", "short"])
def test_a_peer_that_fails_is_unavailable_and_hides_nothing(tmp_path, capsys, fault):
    contestants = stand_in(OURS, 0.5), stand_in(DEFAULTS, 0.6, fault), stand_in(INVARIANT, 0.7)
    first, prefill, one = rows_of(side_by_side(tmp_path, *contestants))
    for row in (first, prefill, one):
        assert row.ours_us == 5e5 and row.peers[INVARIANT] == 7e5
    assert DEFAULTS not in one.peers and "vllm/ratio" not in one.figures
    assert "(log: tiny-qwen3.vllm.log)" in one.unavailable[DEFAULTS]
    # One warm-up and two of three runs come before the fourth request.
    assert (DEFAULTS in first.peers) == (fault == "short")
    if fault in ("start", "dies"):
        assert "Error: " in one.unavailable[DEFAULTS] and "Error: " in capsys.readouterr().err


def test_a_peer_that_hangs_is_stopped_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ANSWER_SECONDS", 0.3)
    contestants = stand_in(OURS, 0.5), stand_in(DEFAULTS, 0.6, "hangs")
    row = rows_of(side_by_side(tmp_path, *contestants))[0]
    assert row.ours_us == 5e5
    assert row.unavailable[DEFAULTS].startswith("no answer in 0 s; its last line: still compiling")


def test_a_program_that_is_absent_is_unavailable(tmp_path):
    absent = Way(DEFAULTS, (str(tmp_path / "absent"),), {})
    row = rows_of(side_by_side(tmp_path, stand_in(OURS, 0.5), absent))[0]
    assert row.ours_us == 5e5 and "FileNotFoundError" in row.unavailable[DEFAULTS]


def test_a_failure_of_ours_is_the_error_of_its_rows_and_no_peer_is_started(tmp_path):
    contestants = stand_in(OURS, 0.5, "dies"), stand_in(DEFAULTS, 0.6)
    compared = side_by_side(tmp_path, *contestants)
    for work in TINY:
        with pytest.raises(ChildError, match=r"status 3: torch.OutOfMemoryError.*\(log: "):
            compared.row(work, MACHINE)
    assert not (tmp_path / "tiny-qwen3.vllm.log").exists()


def test_what_the_time_does_not_allow_is_named(tmp_path):
    compared = side_by_side(tmp_path, stand_in(OURS, 0.5), budget=Budget(1e-6))
    with pytest.raises(ChildError, match="of --seconds are over"):
        compared.row(TINY[0], MACHINE)


def test_runs_of_a_work_end_early_where_they_are_long(tmp_path, capsys):
    rows_of(side_by_side(tmp_path, stand_in(OURS, 15.0)))
    assert "12 + 3): 1 tokens/s, 15.000, 15.000 s\n" in capsys.readouterr().out


def test_bars_need_every_peer_in_every_row(tmp_path):
    def judged(seconds, fault="none"):
        contestants = stand_in(OURS, 1.0), stand_in(DEFAULTS, seconds, fault)
        rows, found = rows_of(side_by_side(tmp_path, *contestants)), Results()
        for suite in (f"rollout_vllm_{model}" for model in MODELS):
            of_model = [replace(row, suite=suite) for row in rows]
            found = found.merged(suite, of_model, {}, {"complete": True})
        return {n: bar for n, bar in found.bars.items() if n.startswith("rollout_vllm")}

    met = judged(1.0625)
    assert met["rollout_vllm"]["figure"] == 1.0625 and met["rollout_vllm"]["met"]
    assert met["rollout_vllm_prefill"]["met"]
    for other in ("rollout_vllm_invariant", "rollout_vllm_sparse"):
        assert met[other]["figure"] is None and not met[other]["met"]
    missed = judged(1.0)
    assert not missed["rollout_vllm"]["met"] and missed["rollout_vllm_prefill"]["met"]
    unavailable = judged(1.5, "short")["rollout_vllm"]
    assert unavailable["figure"] is None and not unavailable["met"]


def test_sequences_of_many_lengths_count_their_own_tokens(tmp_path):
    """Each engine is asked for each sequence's number, and its cache holds those that run."""
    folder = site(tmp_path, VLLM.replace("BROKEN", "False"))
    (theirs,) = ways(folder, ["defaults"])[1:]
    compared = side_by_side(tmp_path, stand_in(OURS, 0.5), theirs, works=(TINY[0], MIXED))
    row, lengths = compared.row(MIXED, MACHINE), MIXED.lengths()
    assert len(set(lengths)) > 2 and work_name(MIXED) == "generate, joining"
    assert row["tokens_per_second"][OURS] == sum(lengths) / 0.5
    assert DEFAULTS in row["tokens_per_second"] and not row["unavailable"]
    settings = compared._settings(tmp_path, torch.device("cpu"))
    many = side_by_side(tmp_path, works=(Workload(900, 1, 12, 9, 2),))
    most = many._settings(tmp_path, torch.device("cpu"))["kv_cache_memory_bytes"]
    assert settings["kv_cache_memory_bytes"] <= most < 256 / 6 * settings["kv_cache_memory_bytes"]


def test_the_sparse_bar_is_over_one_work():
    def row(work, ours):
        kind, figures = work_name(work), {f"{DEFAULTS}/ratio": 100.0 / ours}
        return Row(suite="-", work=kind, shape=work.shape, dtype="-", ours_us=ours, figures=figures)

    rows = [row(work, 100.0 if work.longest == 128 else 900.0) for work in WORKS]
    assert BARS["rollout_vllm_sparse"].figure(rows) == 1.0
    assert BARS["rollout_vllm_sparse"].figure(rows[1:]) is None
    assert BARS["rollout_vllm"].figure(rows) == pytest.approx(1 / 9)
    # The other mode may be of another run, in which ours took another time.
    both = [replace(r, peers={INVARIANT: 1.0}, ours_us=1.0) for r in rows]
    assert BARS["rollout_vllm"].figure(both) == pytest.approx(1 / 9)
    (name,) = (suite.removeprefix("rollout_vllm_") for suite in BARS["rollout_vllm_sparse"].suites)
    assert is_sparse(name)


def test_suites_name_each_model_once_and_logs_lie_beside_the_file(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(bench, "SideBySide", _recorder(made))
    folder, models = site(tmp_path), ["qwen3-2x64-2/1x32-64-512", "qwen3-30b-a3b"]
    suites = vllm_suites(folder, models * 2, json_file=tmp_path / "h200.json")
    assert list(suites) == [f"rollout_vllm_{model}" for model in models]
    assert [case.work for case in suites[f"rollout_vllm_{models[1]}"]] == [
        work_name(w) for w in WORKS
    ]
    log = made[0]["logs"](f"{models[0]}.vllm batch-invariant")
    assert log == tmp_path / "h200.qwen3-2x64-2_1x32-64-512.vllm_batch-invariant.log"
    vllm_suites(folder, models)
    assert made[-1]["logs"]("a").name == "rollout_vllm.a.log"


def _recorder(made):
    def side_by_side(model, contestants, **more):
        made.append(more)
        return SimpleNamespace(row=print)

    return side_by_side


def test_each_vllm_has_its_own_environment_and_none_of_our_modules(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    ours, defaults, invariant = ways(site(tmp_path), ["defaults", "invariant"])
    assert [way.name for way in (ours, defaults, invariant)] == [OURS, DEFAULTS, INVARIANT]
    assert ours.environment["PYTHONPATH"].endswith(":/elsewhere")
    assert defaults.environment["PYTHONPATH"] == str(tmp_path)
    flags = [way.environment["VLLM_BATCH_INVARIANT"] for way in (defaults, invariant)]
    assert flags == ["0", "1"]
    assert "-P" in defaults.command
    assert [way.name for way in ways(tmp_path, ["invariant"])] == [OURS, INVARIANT]


@pytest.mark.parametrize("broken", [False, True])
def test_the_child_of_vllm_asks_it_for_what_the_rows_need(tmp_path, broken):
    folder = site(tmp_path, VLLM.replace("BROKEN", str(broken)))
    theirs = ways(folder, ["defaults", "invariant"])[1:]
    row = rows_of(side_by_side(tmp_path, stand_in(OURS, 0.5), *theirs))[0]
    figures = row.figures
    assert figures["vllm/version"] == "0.0" and figures["vllm/batch_dependent"] == 1.0
    assert figures["vllm/weights"] == "vLLM's dummies"
    assert 0 < row.peers[DEFAULTS] < 5e5
    if broken:
        assert INVARIANT not in row.peers
        assert "RuntimeError: no kernel of this mode (log:" in row.unavailable[INVARIANT]
    else:
        assert figures["vllm batch-invariant/batch_dependent"] == 0.0
        assert figures["vllm batch-invariant/weights"] == "normal"
        assert not row.unavailable


def test_matrices_are_normal_and_norms_one():
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).bfloat16()
    redraw(layer)
    weight = layer[0].weight.detach().float()
    assert 0.018 < weight.std() < 0.022 and abs(weight.mean()) < 0.002
    assert layer[0].bias.eq(0).all() and layer[1].weight.eq(1).all() and layer[1].bias.eq(0).all()
    before = layer[0].weight.clone()
    redraw(layer)
    assert torch.equal(layer[0].weight, before)


def test_both_sides_read_the_configuration_of_the_benches(tmp_path):
    config = save_config("qwen2.5-1.5b", tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert saved["architectures"] == ["Qwen2ForCausalLM"] and saved["dtype"] == "bfloat16"
    assert saved["num_hidden_layers"] == 28 and saved["rope_parameters"]["rope_theta"] == 1e6
    tokens = 256 * (1536 + 32)
    size, blocks = kv_cache_size(config, 256, 1536), int(1.02 * tokens) // 16
    assert size["num_kv_blocks"] == blocks
    assert size["kv_cache_memory_bytes"] == blocks * 16 * 28 * 2 * 128 * 2 * 2


def test_our_child_measures_a_tiny_model_on_a_cpu(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    compared = side_by_side(tmp_path, ways(site(folder), [])[0], works=TINY[:2])
    first = compared.row(TINY[0], MACHINE)
    assert first["tokens_per_second"][OURS] > 0 and first["figures"]["ours/batch_dependent"] == 0.0
    assert first["figures"]["ours/preemptions"] == 0
    assert compared.row(TINY[1], MACHINE)["ours_us"] > 0


def test_our_engine_gets_the_cache_that_vllm_gets(tmp_path, monkeypatch):
    given = {}

    def engine(model, **options):
        given.update(options)
        raise ChildError("seen")

    monkeypatch.setattr("rl_consistency.rollout.engine.RolloutEngine", engine)
    settings = side_by_side(tmp_path)._settings(tmp_path, torch.device("cpu"))
    with pytest.raises(ChildError, match="seen"):
        engine_child.Ours(settings)
    assert given["num_kv_blocks"] == settings["num_kv_blocks"] > 0
