"""The benches of experts: routings, what is padded, what a call meets, what is refused."""

import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from benchmarks.ops import experts
from benchmarks.ops.experts import (
    Weights,
    by_batched,
    by_grouped,
    experts_few,
    experts_gradient,
    moe_block,
    padded_share,
)
from benchmarks.ops.routing import Routing, drawn_routing, routed_inputs
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.cpu import route_rows
from rl_consistency.kernels.experts.route import route
from tests.benchmarks.ops.test_op_cases import SPARSE, Machine

CPU = torch.device("cpu")


def counts(routing):
    return torch.bincount(routing.expert_ids.flatten(), minlength=routing.num_experts)


@pytest.mark.parametrize("kind", ["even", "skewed", "same"])
def test_a_routing_is_one_that_the_router_could_give(kind):
    routing = drawn_routing(kind, 50, 16, 4, CPU)
    ids = routing.expert_ids
    assert ids.shape == (50, 4) and ids.dtype == torch.int32
    assert bool((ids.diff(dim=1) > 0).all()) and 0 <= int(ids.min()) <= int(ids.max()) < 16
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(50))
    again, other = (drawn_routing(kind, 50, 16, 4, CPU, seed) for seed in (0, 1))
    assert torch.equal(again.expert_ids, ids) and not torch.equal(other.expert_ids, ids)


def test_even_skewed_and_same_are_what_they_say():
    even, skewed, same = (
        counts(drawn_routing(kind, 4096, 16, 2, CPU)) for kind in ("even", "skewed", "same")
    )
    assert even.tolist() == [512] * 16
    assert skewed.max() > 4 * skewed.float().mean() and skewed.min() > 0
    assert Counter(same.tolist()) == {4096: 2, 0: 14}
    assert Counter(counts(drawn_routing("same", 9, 16, 1, CPU)).tolist()) == {9: 1, 0: 15}
    with pytest.raises(ValueError, match="no routing 'odd'; give even, skewed, same"):
        drawn_routing("odd", 4, 4, 1, CPU)
    with pytest.raises(ValueError, match="no routing 'odd'"):
        routed_inputs("odd", 4, 4, 1, 8, CPU)


def test_pairs_stand_in_the_order_of_the_experts():
    routing = drawn_routing("skewed", 30, 8, 3, CPU)
    pairs = route_rows(routing.expert_ids, PackedSequences.of([0], [30]), 8)
    assert torch.equal(routing.rows, pairs.rows)
    assert routing.ends.tolist() == torch.tensor(pairs.counts).cumsum(0).tolist()
    found = routing.rows[routing.places]
    assert torch.equal(found, torch.arange(30).unsqueeze(1).expand(30, 3))
    assert routing.experts_hit == sum(count > 0 for count in pairs.counts)


def test_the_router_sends_rows_as_asked():
    hit = {}
    for kind in ("even", "skewed", "same"):
        gate, x = routed_inputs(kind, 512, 16, 2, 64, CPU)
        ids, _ = route(x, gate, 2, normalize=True)
        hit[kind] = torch.bincount(ids.flatten(), minlength=16)
    assert Counter(hit["same"].tolist()) == {512: 2, 0: 14}
    assert hit["even"].max() < 200 < hit["skewed"].max() < 512


def test_the_padding_is_that_of_the_runs():
    for kind in ("even", "skewed", "same"):
        ids = drawn_routing(kind, 100, 8, 3, CPU).expert_ids
        layout = PackedSequences.of([0, 40, 80], [40, 40, 20])
        routed = route_rows(ids, layout, 8)
        steps = sum(len(routed.steps(pairs)) for _, pairs in routed.by_expert())
        assert padded_share(ids, 40, 8) == pytest.approx(steps / 300 - 1)
    assert padded_share(drawn_routing("same", 64, 8, 3, CPU).expert_ids, 32, 8) == 0


def test_every_call_of_a_decode_step_meets_other_experts():
    experts_few(machine := Machine(), 2, **SPARSE, routing="same")
    first, second = machine.race.ours.calls
    assert not torch.equal(first.args[2].expert_ids, second.args[2].expert_ids)
    assert first.args[1] is not second.args[1], "small weights would stay in the cache"
    assert machine.race.clock == "graph"
    per_expert = 3 * 2 * SPARSE["hidden"] * SPARSE["intermediate"]
    rows = 2 * 2 * 2 * SPARSE["hidden"]
    assert machine.race.moved_bytes == SPARSE["top_k"] * per_expert + rows


def test_weights_are_not_copied_out_by_the_gigabyte(monkeypatch):
    routing = drawn_routing("even", 4, 4, 2, CPU)
    weights = Weights(torch.zeros(4, 8, 8), torch.zeros(4, 8, 4))
    monkeypatch.setattr(experts, "BATCHED_BYTES", 8 * weights.bytes_per_expert)
    assert by_batched(torch.ones(4, 8), weights, routing).shape == (4, 8)
    monkeypatch.setattr(experts, "BATCHED_BYTES", 8 * weights.bytes_per_expert - 1)
    with pytest.raises(ValueError, match="copies of weights would take"):
        by_batched(torch.ones(4, 8), weights, routing)


def test_rows_at_other_experts_would_be_noticed():
    routing = drawn_routing("even", 32, 8, 3, CPU)
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(8, 96, 64, generator=generator)
    down = torch.randn(8, 64, 48, generator=generator)
    x = torch.randn(32, 64, generator=generator)
    weights = Weights(gate_up, down)
    right = by_grouped(x, weights, routing)
    torch.testing.assert_close(by_batched(x, weights, routing), right, rtol=1e-4, atol=1e-3)
    moved = Routing((routing.expert_ids + 1) % 8, routing.weights, 8)
    assert (by_grouped(x, weights, moved) - right).norm() > 0.5 * right.norm()


def test_gradients_continue_what_is_there():
    sizes = {**SPARSE, "tokens": 32, "length": 16, "routing": "skewed"}
    experts_gradient(machine := Machine(), **sizes)
    once = [part.clone() for part in machine.results["ours"][0]]
    twice = machine.race.ours.calls[0]()
    for one, two in zip(once, twice, strict=True):
        assert (two.double() - 2 * one).norm() <= 1e-3 * one.norm() and one.norm() > 0


def test_a_block_ends_without_gradients():
    sizes = {**SPARSE, "tokens": 32, "routing": "even"}
    moe_block(machine := Machine(), "olmoe", **sizes)
    assert machine.race.memory and machine.race.tokens == 32
    first, second = (machine.race.ours.calls[0]() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def sonicmoe_by_torch(
    x, router, gate_up, bias, down, other_bias, top_k, stream, activation,
    *, is_softmax_over_topk, concat_layout,
):  # fmt: skip
    """What SonicMoE's layer says it computes, of weights [2I, H, E] and [H, I, E]."""
    assert (bias, other_bias, stream, activation, concat_layout) == (None, None, 0, "swiglu", True)
    shares = (x @ router.t()).float().softmax(-1)
    shares, ids = shares.topk(top_k)
    if is_softmax_over_topk:
        shares = shares / shares.sum(-1, keepdim=True)
    gate, up = torch.einsum("rh,ihe->rei", x, gate_up).chunk(2, dim=-1)
    outputs = torch.einsum("rei,hie->reh", torch.nn.functional.silu(gate) * up, down)
    chosen = outputs.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[1]))
    return (shares.unsqueeze(-1) * chosen).sum(1).to(x.dtype), None, None


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
def test_sonicmoe_is_given_the_same_block(family, monkeypatch):
    module = ModuleType("sonicmoe")
    module.__spec__ = ModuleSpec("sonicmoe", None)
    monkeypatch.setattr(module, "moe_TC_softmax_topk_layer", sonicmoe_by_torch, raising=False)
    monkeypatch.setitem(sys.modules, "sonicmoe", module)
    moe_block(machine := Machine(), family, **{**SPARSE, "tokens": 32, "routing": "even"})
    found, right = (machine.results[name][0] for name in ("sonicmoe", "transformers"))
    for one, other in zip(found, right, strict=True):
        assert (one - other.view_as(one)).norm() <= 0.02 * other.norm() and other.norm() > 0
