"""Every tiny case of `ops` and `train` runs on a CPU and does the same work on all sides."""

import pytest
import torch

from benchmarks import peers
from benchmarks.ops.dense import product
from benchmarks.ops.experts import ROUTINGS, drawn_routing, experts
from benchmarks.ops.suites import op_suites
from benchmarks.suite import Choice
from benchmarks.timing import Machine, row_fields
from benchmarks.train import training_suites
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.experts.cpu import route_rows

CPU = torch.device("cpu")
SUITES = {**op_suites(Choice(tiny=True)), **training_suites(Choice(tiny=True))}
DRAWN = {"sampling"}
"""Suites whose results are drawn, each way by numbers of its own."""
TOLERANCE = {"attention": 0.02, "experts": 0.02}


class Runs(Machine):
    """Runs every contestant once instead of timing it, and keeps what they gave."""

    def __init__(self):
        self.device, self.cuda = CPU, False
        self.results = {}

    def measure(self, *, ours, stock, peers=None, **sizes):
        self.ours, self.stock, self.peers = ours, stock, peers or {}
        for name, contestant in {"ours": ours, **stock, **self.peers}.items():
            with contestant.context():
                try:
                    self.results[name] = [flat(call()) for call in contestant.calls]
                except NotImplementedError:
                    assert name == "cublas fp32 + add", "torch.mm widens its result on CUDA only"
        return row_fields(dict.fromkeys(self.results, 1.0), stock)


def flat(result):
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part.detach().double() for part in parts]


@pytest.mark.parametrize(
    ("suite", "case"),
    [(name, case) for name, cases in SUITES.items() for case in cases],
    ids=lambda given: given if isinstance(given, str) else f"{given.work} {dict(given.shape)}",
)
def test_ours_and_stock_do_the_same_work(suite, case, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    torch.manual_seed(0)
    fields = case.run(machine := Runs())
    assert fields["ours_us"] > 0 and machine.peers.keys() <= {"torch rms_norm"}
    limit = TOLERANCE.get(suite.split("_")[0], 0.01)
    for name in machine.stock.keys() & machine.results.keys() if suite not in DRAWN else ():
        for ours, stock in zip(machine.results["ours"], machine.results[name], strict=True):
            for mine, theirs in zip(ours, stock, strict=True):
                difference = mine - theirs.reshape(mine.shape)
                assert difference.norm() <= limit * theirs.norm(), name


def test_a_wrong_contestant_would_be_noticed():
    product("nt", machine := Runs(), 300, 48, 32)
    ours, stock = machine.results["ours"][0][0], machine.results["cublas"][0][0]
    assert (ours.roll(1, 0) - stock).norm() > 0.01 * stock.norm()


@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_routing_is_one_that_the_router_could_give(kind):
    routing = drawn_routing(kind, 50, 16, 4, CPU)
    ids = routing.expert_ids
    assert ids.shape == (50, 4) and bool((ids.diff(dim=1) > 0).all())
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(50))
    assert not torch.equal(drawn_routing(kind, 50, 16, 4, CPU, seed=1).expert_ids, ids)
    pairs = route_rows(ids, PackedSequences.of([0], [50]), 16)
    assert torch.equal(routing.rows, pairs.rows)
    assert routing.ends.tolist() == torch.tensor(pairs.counts).cumsum(0).tolist()


def test_even_skewed_and_same_are_what_they_say():
    hit = {
        kind: torch.bincount(
            drawn_routing(kind, 4096, 16, 2, CPU).expert_ids.flatten(), minlength=16
        )
        for kind in ROUTINGS
    }
    assert hit["even"].tolist() == [512] * 16
    assert hit["same"].tolist().count(0) == 14 and hit["skewed"].max() > 4 * 512


def test_every_call_of_a_decode_step_meets_other_experts():
    sizes = {"hidden": 64, "intermediate": 48, "experts": 8, "top_k": 3}
    experts(False, machine := Runs(), 2, **sizes, routing="same")
    first, second = machine.ours.calls
    assert not torch.equal(first.args[3].expert_ids, second.args[3].expert_ids)
    assert first.args[1] is not second.args[1], "small weights would stay in the cache"
