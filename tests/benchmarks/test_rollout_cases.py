"""Every rollout case runs on a tiny model, on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.models import build_model, model_config
from benchmarks.rollout import experts_hit as counting
from benchmarks.rollout.copying import copying, copying_model, edited_stretch
from benchmarks.rollout.decoding import decode, long_context, steady_step
from benchmarks.rollout.experts_hit import evenly_hit, experts_hit
from benchmarks.rollout.grpo import grpo_step
from benchmarks.rollout.hugging_face import GENERATE, generate_rate, hugging_face
from benchmarks.rollout.workload import Workload
from benchmarks.rows import Row
from benchmarks.timing import Ceilings
from rl_consistency.models.families import num_experts
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.moe.routing import recorded_routing
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.rollout.engine import RolloutEngine

TINY = "tiny-qwen3"
SPREAD = Workload(groups=2, group_size=4, prompt_len=20, longest=24, shortest=8)
EQUAL = Workload.equal(1, 2, 12, 6)
MACHINE = SimpleNamespace(device=torch.device("cpu"), ceilings=Ceilings(1e10, 1e11))


def row(fields):
    """The row that a case's fields make."""
    return Row(suite="rollout", work="-", shape={}, dtype="bfloat16", **fields)


def test_decode_has_a_ratio_a_roofline_and_both_modes():
    found = row(decode(TINY, SPREAD, MACHINE))
    assert found.ratio == pytest.approx(found.stock_us / found.ours_us)
    assert 0 < found.ceiling_fraction < 1
    assert found.figures["strict/preemptions"] == 0
    assert 0 < found.figures["strict/first_token_seconds"] <= found.figures["stock/seconds"] * 100


@pytest.mark.parametrize("group", [1, 4])
def test_graphs_of_groups_are_captured_before_the_steps_that_are_timed(monkeypatch, group):
    """Else the last step but one captures those of fewer rows, 0.1 s among steps of 2 ms."""
    warmed = []
    warm_up = RolloutEngine.warm_up
    monkeypatch.setattr(
        RolloutEngine,
        "warm_up",
        lambda engine, sampling, **more: (
            warmed.append(sampling) or warm_up(engine, sampling, **more)
        ),
    )
    steady_step(TINY, Workload.equal(2, group, 20, 16), MACHINE)
    assert [sampling.n for sampling in warmed] == [group]


def test_a_steady_step_has_a_roofline_only_where_nothing_is_shared():
    found = row(steady_step(TINY, Workload.equal(2, 1, 20, 16), MACHINE))
    assert 0 < found.ceiling_fraction < 1 and 20 < found.figures["context"] < 36
    shared = row(steady_step(TINY, Workload.equal(1, 4, 20, 16), MACHINE))
    assert shared.ours_us > 0 and shared.ceiling_fraction is None


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"])
def test_a_step_of_a_mixture_of_experts_is_held_against_the_experts_it_hit(name):
    figures = row(steady_step(name, Workload.equal(4, 1, 20, 16), MACHINE)).figures
    config = model_config(name)
    layers = config.num_hidden_layers - len(getattr(config, "mlp_only_layers", None) or [])
    chosen, held = config.num_experts_per_tok, num_experts(config)
    assert layers * chosen <= figures["experts_hit"] <= layers * min(held, 4 * chosen)
    assert figures["experts_hit_if_even"] == pytest.approx(
        layers * held * (1 - (1 - chosen / held) ** 4)
    )
    dense = row(steady_step(TINY, Workload.equal(4, 1, 20, 16), MACHINE)).figures
    assert "experts_hit" not in dense


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
        for chunk in (16384, 60, 1):
            monkeypatch.setattr(counting, "CHUNK_TOKENS", chunk)
            assert experts_hit(model, sequences, 9) == expected
    assert evenly_hit(model.config, 1) == 2 and evenly_hit(model.config, 1000) == pytest.approx(8)


def test_a_long_context_is_compared_with_a_short_one():
    found = row(long_context(MACHINE, TINY, 64, 32, 16))
    times = found.ours_us / found.figures["short_us"]
    assert found.figures["times_short"] == pytest.approx(times)


def test_the_model_that_copies_really_copies_and_drafts_are_mostly_right():
    figures = row(copying(TINY, Workload.equal(2, 1, 65, 64), MACHINE)).figures
    assert figures["acceptance_rate"] > 0.5 and figures["steps"] < figures["plain/steps"] / 2


def test_the_successor_is_certain_and_edits_are_as_many_as_said():
    model, cycle = copying_model(TINY, torch.device("cpu"))
    after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    with torch.no_grad():
        logits = model(torch.tensor([cycle])).logits[0].float()
    assert logits.argmax(-1).tolist() == [after[token] for token in cycle]
    assert logits.softmax(-1).max(-1).values.min() > 0.99
    prompt = edited_stretch(cycle, 320, 3)
    text = [after[prompt[-1]]]
    while len(text) < 319:
        text.append(after[text[-1]])
    edits = sum(a != b for a, b in zip(prompt, text, strict=False))
    assert 4 < edits < 32


def test_a_grpo_step_is_timed_by_phase_and_only_stock_drifts():
    found = row(grpo_step(TINY, Workload.equal(1, 4, 10, 6), MACHINE))
    figures = found.figures
    assert figures["strict/mismatched_tokens"] == 0 < figures["stock/mismatched_tokens"]
    assert figures["strict/tokens"] == figures["stock/tokens"] == 2 * 24
    phases = [figures[f"strict/{phase}_seconds"] for phase in ("rollout", "training", "update")]
    assert 1e6 * sum(phases) == pytest.approx(found.ours_us)


def test_hugging_face_generates_the_same_number_of_tokens():
    found = row(hugging_face(TINY, EQUAL, GENERATE, MACHINE))
    assert found.unavailable == {} and found.stock in GENERATE
    assert set(found.tokens_per_second) == {"ours", *GENERATE}
    assert found.ratio == pytest.approx(found.stock_us / found.ours_us)


def test_a_way_that_raises_is_named():
    def refuse(model, workload, bench):
        raise AttributeError("no such method\nhere")

    ways = {"batch": refuse, "other": lambda model, workload, bench: 2.0}
    found = row(hugging_face(TINY, EQUAL, ways, MACHINE))
    assert found.unavailable == {"batch": "AttributeError: no such method"}
    assert found.stock == "other" and found.stock_us == 5e5
    with pytest.raises(RuntimeError, match="no way of Hugging Face's ran.*no such method"):
        hugging_face(TINY, EQUAL, {"batch": refuse}, MACHINE)


def test_a_generation_that_ends_early_is_no_measurement():
    class Short:
        config = SimpleNamespace(vocab_size=300)

        def generate(self, input_ids, attention_mask):
            return input_ids

    with pytest.raises(RuntimeError, match="not all the tokens asked for"):
        generate_rate(Short(), EQUAL, MACHINE, cache=None)
