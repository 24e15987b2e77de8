"""Every benchmark case of an op runs, on a CPU and small, and does the same work on all sides."""

from collections import Counter
from functools import partial

import pytest
import torch

from benchmarks import peers as bench_peers
from benchmarks.ops import dense
from benchmarks.ops.dense import (
    attention,
    attention_decode,
    gradient_fold,
    logprobs_and_gradients,
    product,
    tuned_product,
)
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.experts import (
    ROUTINGS,
    drawn_routing,
    experts_few,
    experts_forward,
    experts_gradient,
    moe_block,
    routed_inputs,
)
from benchmarks.suite import cases
from benchmarks.timing import Ceilings, row_fields
from benchmarks.train import _peak_in_fp32, training_step
from benchmarks.tune import shipped
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.cpu import route_rows
from rl_consistency.kernels.experts.route import route_with_logits

CPU = torch.device("cpu")
SIZES = [{"m": m, "n": n, "k": k} for m in (1, 300) for n, k in ((48, 32), (32, 96))]
SPARSE = {"hidden": 64, "intermediate": 48, "experts": 8, "top_k": 3}
TOLERANCE = {"attention": 0.02, "MoE": 0.04}


class Machine:
    """Runs every contestant once instead of timing it, and keeps what they gave."""

    device = CPU

    def __init__(self):
        self.results = {}
        self.race = None

    def copies(self, operand_bytes):
        return 2

    def measure(self, race):
        self.race = race
        for name, contestant in {"ours": race.ours, **race.stock, **race.peers}.items():
            with contestant.context():
                try:
                    self.results[name] = [flat(call()) for call in contestant.calls]
                except (RuntimeError, NotImplementedError):
                    if name == "ours":
                        raise
        seconds = {name: 1.0 for name in self.results}
        if not race.stock.keys() & seconds.keys():
            seconds[next(iter(race.stock))] = 1.0  # no such backend on a CPU
        return row_fields(race, seconds, {}, Ceilings(1.0, 1.0).seconds(race))

    def idle_share(self, contestant):
        return 0.25


def flat(result):
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part.detach().double() for part in parts]


def sparse(**sizes):
    """The sizes under every routing."""
    return [{**sizes, **SPARSE, "routing": routing} for routing in ROUTINGS]


def heads(text, dim, **sizes):
    return [{**sizes, "heads": text, "head_dim": dim}]


CASES = [
    *cases("matmul forward", partial(product, "nt"), SIZES),
    *cases("matmul dX", partial(product, "nn"), SIZES),
    *cases("dW fold", gradient_fold, [{"tokens": 32, "n": 48, "k": 32}]),
    *cases("attention", partial(attention, False), heads("4/2", 128, length=32, batch=2)),
    *cases("attention", partial(attention, False), heads("6/2", 80, length=24, batch=2)),
    *cases("attention", partial(attention, True), heads("3/1", 48, length=24, batch=2)),
    *cases("attention", attention_decode, heads("4/2", 128, batch=1, context=32)),
    *cases("attention", attention_decode, heads("3/1", 80, batch=2, context=21)),
    *elementwise_cases(32, 256, vocabulary=40),
    *cases(
        "token_logprobs", logprobs_and_gradients, [{"tokens": 32, "width": 16, "vocabulary": 50}]
    ),
    *cases("experts", experts_forward, sparse(tokens=100)),
    *cases("experts", experts_few, sparse(tokens=5)),
    *cases("dW of experts", experts_gradient, sparse(tokens=96, length=24)),
    *cases("MoE block", moe_block, sparse(family="qwen3_moe", tokens=64)),
    *cases("MoE block", moe_block, sparse(family="olmoe", tokens=64)[:1]),
    *cases("MoE block", moe_block, sparse(family="mixtral", tokens=64)[:1]),
    *cases(
        "training step",
        training_step,
        [
            {"model": model, "sequences": 2, "length": 32}
            for model in ("tiny-qwen3", "qwen2-2x80-5/1x16-96-331-tied", "tiny-olmoe")
        ],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.work} {dict(c.shape)}")
def test_ours_and_stock_do_the_same_work(case, monkeypatch):
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    torch.manual_seed(0)
    fields = case.run(machine := Machine())
    race = machine.race
    assert fields["ours_us"] > 0 and fields["ratio"] > 0
    assert race.peers.keys() <= {"torch rms_norm", "index_add_"}
    compared = [n for n in race.stock if n in machine.results]
    assert compared or case.work == "dW fold", "torch.mm widens its result on CUDA only"
    limit = TOLERANCE.get(case.work.split()[0], 0.01)
    for name in compared:
        for ours, stock in zip(machine.results["ours"], machine.results[name], strict=True):
            for mine, theirs in zip(ours, stock, strict=True):
                if case.work.startswith("attention") and mine.shape != theirs.shape:
                    theirs = theirs.transpose(1, 2)  # heads before positions
                assert (mine - theirs.reshape(mine.shape)).norm() <= limit * theirs.norm(), name


def test_a_wrong_contestant_would_be_noticed():
    product("nt", machine := Machine(), 300, 48, 32)
    ours, stock = machine.results["ours"][0][0], machine.results["cublas"][0][0]
    assert (ours.roll(1, 0) - stock).norm() > 0.01 * stock.norm()


def test_products_of_few_rows_and_random_ones_run_in_graphs_and_large_ones_do_not():
    for rows, limit, clock in ((300, 256, "events"), (300, 16384, "graph"), (17, 256, "graph")):
        product("nt", machine := Machine(), rows, 48, 32, graph_rows=limit)
        assert machine.race.clock == clock
        certified = machine.race.ours.context is dense.certified_to_the_row
        assert certified == (clock == "graph")


@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_routing_is_one_that_the_router_could_give(kind):
    routing = drawn_routing(kind, 50, 16, 4, CPU)
    ids = routing.expert_ids
    assert ids.shape == (50, 4) and bool((ids.diff(dim=1) > 0).all())
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(50))
    other = drawn_routing(kind, 50, 16, 4, CPU, seed=1)
    assert not torch.equal(other.expert_ids, ids)
    pairs = route_rows(ids, PackedSequences.of([0], [50]), 16)
    assert torch.equal(routing.rows, pairs.rows)
    assert routing.ends.tolist() == torch.tensor(pairs.counts).cumsum(0).tolist()
    assert routing.experts_hit == sum(count > 0 for count in pairs.counts)


def test_even_skewed_and_same_are_what_they_say_in_routings_and_in_routers():
    hit = {}
    for kind in ROUTINGS:
        ids = drawn_routing(kind, 4096, 16, 2, CPU).expert_ids
        gate, x = routed_inputs(kind, 512, 16, 2, 64, CPU)
        routed, *_ = route_with_logits(x, gate, 2, normalize=True)
        hit[kind] = [torch.bincount(each.flatten(), minlength=16) for each in (ids, routed)]
    assert hit["even"][0].tolist() == [512] * 16
    assert [Counter(each.tolist())[0] for each in hit["same"]] == [14, 14]
    assert hit["skewed"][0].max() > 4 * 512
    assert hit["even"][1].max() < 200 < hit["skewed"][1].max() < 512
    with pytest.raises(KeyError, match="odd"):
        drawn_routing("odd", 4, 4, 1, CPU)


def test_every_call_of_a_decode_step_meets_other_experts():
    experts_few(machine := Machine(), 2, **SPARSE, routing="same")
    first, second = machine.race.ours.calls
    assert not torch.equal(first.args[2].expert_ids, second.args[2].expert_ids)
    assert first.args[1] is not second.args[1], "small weights would stay in the cache"


def test_gradients_in_fp32_are_summed_and_leave_none_behind():
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    grads = []

    class Peak:
        def peak_bytes(self, contestant):
            model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            grads.append(model.weight.grad)

    _peak_in_fp32(Peak(), None, model)
    assert grads == [None]
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None


def test_a_product_is_timed_once_its_bucket_of_rows_is_tuned(monkeypatch):
    seen = []

    def tuned(works, bench, store, *, clock):
        seen.extend(work.shape["m"] for work in works)
        return type("Report", (), {"withdrawn": {}})

    monkeypatch.setattr(shipped, "tune_works", tuned)
    assert tuned_product("nt", Machine(), 17, 48, 32)["ours_us"] > 0 and seen == [32]
