"""Every rollout case runs on a tiny model, on a CPU; what it measures needs a GPU."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import distributed, recipe, trl
from benchmarks.models import build_model, model_config
from benchmarks.recipe import grpo_step
from benchmarks.rollout import decoding, engine_process, processes
from benchmarks.rollout.child import Child, run_child
from benchmarks.rollout.copying import check_equal, copying
from benchmarks.rollout.decoding import evenly_hit, experts_hit, long_context, steady_step
from benchmarks.rollout.generation import Generation, Tick, idle_share
from benchmarks.rollout.hugging_face import GENERATE, generate, hugging_face
from benchmarks.rollout.processes import cold_start, tune_policy
from benchmarks.rollout.vllm import WORKS, engine_answer, vllm_suites
from benchmarks.rollout.workload import DecodeBytes, Workload
from benchmarks.timing import Ceilings
from rl_consistency.models.families import num_experts
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.moe.routing import recorded_routing
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.completion import Completion
from tests.ranks import run_ranks

__all__ = ["run_ranks"]

TINY = "tiny-qwen3"
FASTER = "1 with a faster schedule"
EQUAL = Workload.equal(1, 2, 12, 6)
MACHINE = SimpleNamespace(device=torch.device("cpu"), ceilings=Ceilings(1e10, 1e11))


def test_lengths_are_spread_and_prompts_shared_within_a_group():
    workload = Workload(groups=32, group_size=8, prompt_len=16, longest=1024)
    lengths = workload.lengths()
    assert lengths == workload.lengths() and 380 < sum(lengths) / 256 < 460
    assert min(lengths) >= 32 and max(lengths) == 1024
    prompts = workload.prompts("a", 1000)
    assert prompts[0] == prompts[7] != prompts[8] and len(prompts) == 256
    assert prompts == workload.prompts("a", 1000) != workload.prompts("b", 1000)


def test_a_steady_step_has_a_roofline_only_where_nothing_is_shared():
    found = steady_step(TINY, Workload.equal(2, 1, 20, 16), MACHINE)
    assert 0 < found["ceiling_fraction"] < 1 and 20 < found["figures"]["context"] < 36
    shared = steady_step(TINY, Workload.equal(1, 4, 20, 16), MACHINE)
    assert shared["ours_us"] > 0 and "ceiling_fraction" not in shared


def test_a_step_of_a_mixture_of_experts_is_held_against_the_experts_it_hit():
    name = "tiny-qwen3-moe"
    figures = steady_step(name, Workload.equal(4, 1, 20, 16), MACHINE)["figures"]
    config = model_config(name)
    layers = config.num_hidden_layers - len(config.mlp_only_layers or [])
    chosen, held = config.num_experts_per_tok, num_experts(config)
    assert layers * chosen <= figures["experts_hit"] <= layers * min(held, 4 * chosen)
    even = layers * held * (1 - (1 - chosen / held) ** 4)
    assert figures["experts_hit_if_even"] == pytest.approx(even)
    needed = DecodeBytes.of(build_model(name, MACHINE.device))
    assert needed.read(2, 0, 5.5) == 2 * (needed.weights + 5.5 * needed.per_expert)
    with pytest.raises(ValueError, match="depend on the experts hit"):
        needed.read(2, 0)


def test_the_experts_hit_are_those_of_the_tokens_fed(monkeypatch):
    model = build_model("tiny-olmoe", MACHINE.device)
    draw = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 331, (5, 30), generator=draw).tolist()
    with patch(model):
        ids = []
        for sequence in sequences:
            with torch.no_grad(), recorded_routing() as record:
                packed_hidden_states(model, PackedBatch.from_sequences([sequence]))
            ids.append([layer.expert_ids[:30] for layer in record.layers])
        # Of 9 new tokens 8 are fed: those at positions 21 to 28.
        expected = [
            sum(len({*torch.cat([own[layer][at] for own in ids]).tolist()}) for at in range(21, 29))
            / 8
            for layer in range(2)
        ]
        for chunk in (16384, 60):
            monkeypatch.setattr(decoding, "CHUNK_TOKENS", chunk)
            assert experts_hit(model, sequences, 9) == expected
    assert evenly_hit(model.config, 1) == 2 and evenly_hit(model.config, 1000) == pytest.approx(8)


def test_a_long_context_is_compared_with_a_short_one():
    found = long_context(MACHINE, TINY, 64, 32, 16)
    times = found["ours_us"] / found["figures"]["short_us"]
    assert found["figures"]["times_short"] == pytest.approx(times)


def test_the_model_that_copies_really_copies_and_drafts_are_mostly_right():
    figures = copying(TINY, Workload.equal(2, 1, 65, 64), MACHINE)["figures"]
    assert figures["acceptance_rate"] > 0.5 and figures["steps"] < figures["plain/steps"] / 2


def generation(tokens, count=2, replays=()):
    ticks = [Tick(float(i), n, i) for i, n in enumerate(tokens)]
    done = [Completion(i, 0, [0], torch.tensor([-1.0]), "length") for i in range(count)]
    return Generation(done, float(len(ticks)), ticks, replays, None)


def test_decoding_begins_behind_the_step_that_gave_the_last_its_first_token():
    # Two sequences; the second is prefilled while the first decodes alone, and the first ends.
    run = generation([0, 1, 2, 4, 6, 8, 9, 10])
    window = run.decoding()
    assert (window.steps, window.tokens, window.seconds, window.tokens_before) == (5, 8, 5.0, 2)
    steady = run.steady(1)
    assert (steady.steps, steady.tokens, steady.tokens_before) == (2, 4, 4)
    with pytest.raises(RuntimeError, match="no step decoded all 2 sequences"):
        generation([0, 1, 2, 3, 4]).decoding()
    with pytest.raises(RuntimeError, match="no steps to measure"):
        generation([0, 2, 4, 6, 8]).steady(10)


class Event:
    """An event whose time is given."""

    def __init__(self, at):
        self.at = at

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_idle_is_what_no_replay_covers():
    pairs = [(Event(0.0), Event(8.0)), (Event(10.0), Event(19.0)), (Event(19.0), Event(20.0))]
    assert idle_share(pairs) == pytest.approx(0.1) and idle_share(pairs[:1]) is None
    run = generation([0, 2, 4, 6], replays=[pairs[0], *pairs])
    assert run.window(1, 3).idle_share == pytest.approx(2 / 19)


def test_other_bytes_with_speculation_are_an_error():
    plain, same = (generation([0, 1], count=1) for _ in range(2))
    check_equal(plain, same)
    same.completions[0] = Completion(0, 0, [0], torch.tensor([-1.0000001]), "length")
    with pytest.raises(ConsistencyError, match="sequence 0"):
        check_equal(plain, same)


def test_hugging_face_generates_all_tokens_and_a_way_that_raises_is_named():
    def refuse(model, workload, bench):
        raise AttributeError("no such method\nhere")

    found = hugging_face(TINY, EQUAL, {**GENERATE, "batch": refuse}, MACHINE)
    assert found["unavailable"] == {"batch": "AttributeError: no such method"}
    assert found["peers"].keys() == GENERATE.keys() and found["stock"] in GENERATE
    with pytest.raises(RuntimeError, match="no way of Hugging Face's ran.*no such method"):
        hugging_face(TINY, EQUAL, {"batch": refuse}, MACHINE)
    short = SimpleNamespace(
        config=SimpleNamespace(vocab_size=300), generate=lambda input_ids, **_: input_ids
    )
    with pytest.raises(RuntimeError, match="not all the tokens asked for"):
        generate(short, EQUAL, MACHINE, cache=None)


@pytest.mark.thorough
def test_a_grpo_step_is_timed_by_phase_and_only_stock_drifts(monkeypatch):
    monkeypatch.setattr(recipe, "WARM_UP", 0)
    found = grpo_step(TINY, Workload.equal(2, 4, 10, 6), MACHINE)
    figures = found["figures"]
    assert figures["strict/mismatched_tokens"] == 0 < figures["stock/mismatched_tokens"]
    assert 0 < figures["strict/rollout_seconds"] < figures["strict/step_seconds"]
    assert found["ours_us"] == pytest.approx(1e6 * figures["strict/step_seconds"])


@pytest.mark.thorough
def test_an_attached_trl_step_has_no_drift_and_stock_has(monkeypatch):
    for name, count in (("STEPS", 4), ("WARM_UP", 1), ("FEW", 1), ("CHECK_EVERY", 2)):
        monkeypatch.setattr(trl, name, count)
    sizes = {"sequences": 4, "group": 2, "prompt": 8, "new_tokens": 8, "micro_batch": 2}
    figures = trl.trl_grpo(MACHINE, TINY, **sizes)["figures"]
    assert figures["strict/mismatched_tokens"] == 0 < figures["stock/mismatched_tokens"]
    assert 0 < figures["monitor_share"] < 1 and figures["gradient_check_share"] > 0


@pytest.mark.thorough
def test_steps_of_several_ranks_are_set_against_the_same_with_stock_sums_and_one_rank(
    run_ranks, monkeypatch
):
    def on_ranks(bench, count, function, *given):
        return run_ranks(count, function, *given)[0]

    monkeypatch.setattr(distributed, "on_ranks", on_ranks)
    monkeypatch.setattr(distributed, "ROUNDS", 2)  # which ranks inherit: they are forked
    found = distributed.optimizer_step(MACHINE, 2, TINY, "fsdp2", sequences=2, length=16)
    assert found["figures"]["times_stock"] == pytest.approx(1 / found["ratio"])
    assert found["figures"]["carry_bytes"] > 0
    found = distributed.grpo_scaling(MACHINE, 2, TINY, "fsdp2", groups=1, group=2, new_tokens=4)
    rates = found["tokens_per_second"]
    assert found["figures"]["scaling"] == pytest.approx(rates["on 2"] / rates["on 1"])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="this takes 2 GPUs; here are 1"):
        distributed.sum_round(SimpleNamespace(device=torch.device("cuda")), 2, 1)


@pytest.mark.thorough
def test_a_new_process_has_a_first_token_and_the_second_shares_its_caches(monkeypatch, tmp_path):
    environments = []

    def seen(name, arguments, environment, answer):
        environments.append(environment)
        return run_child(name, arguments, environment, answer)

    monkeypatch.setattr(processes, "run_child", seen)
    # As a script elsewhere calls it, with a safe path.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    figures = cold_start(TINY, Workload.equal(1, 2, 12, 4), MACHINE)["figures"]
    assert 0 < figures["cold/first_token_seconds"] < figures["cold/process_seconds"]
    assert figures["warm/first_token_seconds"] > 0 and environments[0] == environments[1]


def test_a_process_that_fails_or_tells_nothing_says_so(monkeypatch, tmp_path):
    child = run_child("it", ["-m", "no_such_module"], {}, tmp_path / "none")
    with pytest.raises(RuntimeError, match="it ended with status 1: .*No module named"):
        child.require()
    for said, seconds in (("2 of 3 works", 1.0), (f"2 of 3 works, 1 of them known, {FASTER}", 9.0)):
        ended = Child(said, seconds, {}, None)
        monkeypatch.setattr(processes, "run_child", lambda *_, ended=ended: ended)
        if said.endswith("works"):
            with pytest.raises(RuntimeError, match="without its last line:\n2 of 3 works"):
                tune_policy(MACHINE, "llama3.2-1b")
    figures = tune_policy(MACHINE, "llama3.2-1b")["figures"]
    assert figures == {"tune_seconds": 9.0, "works": 2, "of_works": 3, "faster": 1}


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

    def apply_model(self, function):
        pass

    def generate(self, inputs, sampling, use_tqdm):
        if INVARIANT and len(inputs) == 640:
            raise RuntimeError("no kernel of this mode")
        drift, found = 0.0 if INVARIANT else len(inputs) / 64, []
        for each in sampling:
            tokens = [7] * each.max_tokens
            logprobs = [{7: SimpleNamespace(logprob=-1.0 - drift)} for _ in tokens]
            sample = SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs)
            found.append(SimpleNamespace(outputs=[sample]))
        return found
"""
"""What the bench asks of vLLM, without a model."""


def site(folder):
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(VLLM, "utf-8")
    return folder


def test_a_row_holds_all_engines_and_one_that_fails_hides_nothing(monkeypatch, tmp_path):
    ours = {"works": [{"seconds": [2.0, 1.0, 3.0]}] * len(WORKS), "batch_dependent": 0.0}
    monkeypatch.setattr(
        "benchmarks.rollout.vllm.engine_answer",
        lambda name, *given: ours if name == "ours" else engine_answer(name, *given),
    )
    (rows,) = vllm_suites(site(tmp_path), [TINY], ["defaults", "invariant"]).values()
    first, prefill, joining, *_ = (case.run(MACHINE) for case in rows)
    assert first["ours_us"] == 2e6 and first["peers"].keys() == {"vllm", "vllm batch-invariant"}
    assert first["figures"]["vllm/batch_dependent"] == 1.0
    assert first["figures"]["vllm/version"] == "0.0" and first["figures"]["vllm/ratio"] < 1
    assert prefill["tokens_per_second"]["ours"] == 256 * 512 / 2.0
    assert joining["peers"].keys() == {"vllm"}
    (why,) = joining["unavailable"].values()
    assert "ended with status 1: RuntimeError: no kernel of this mode" in why


@pytest.mark.thorough
def test_our_own_process_measures_a_tiny_model_on_a_cpu(monkeypatch):
    monkeypatch.setattr("benchmarks.rollout.vllm.MAX_NUM_SEQS", 16)
    check = {"alone": 2, "others": 4, "new_tokens": 4, "longest_prompt": 32}
    answer = engine_answer("ours", TINY, {}, MACHINE.device, [EQUAL], check)
    (work,) = answer["works"]
    assert min(work["seconds"]) > 0 and work["preemptions"] == 0 and "failure" not in answer
    assert answer["batch_dependent"] == 0


def test_a_sequence_is_compared_up_to_its_first_token_that_differs():
    one = [([1, 2, 3], [-1.0, -2.0, -3.0]), ([4], [-1.0])]
    other = [([1, 5, 3], [-1.0, -2.0, -9.0]), ([4], [-1.0000001])]
    assert engine_process.differing_share(one, one) == 0
    assert engine_process.differing_share(one, other) == 2 / 3
