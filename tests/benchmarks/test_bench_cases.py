"""Every benchmark case runs, on a CPU and small, and times the same work on all sides."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks import peers as bench_peers
from benchmarks import timing as bench_timing
from benchmarks.ops.accuracy import accuracy_cases
from benchmarks.ops.attention import decode_cases, prefill_cases
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.logprobs import token_logprobs_cases
from benchmarks.ops.matmul import (
    forward_cases,
    gradient_fold_cases,
    input_gradient_cases,
)
from benchmarks.shapes import WeightShape
from benchmarks.timing import Ceilings, Contestant, Race, _fields, library_defaults
from benchmarks.train.step import training_step_cases
from rl_consistency.numerics.settings import SETTINGS, numeric_settings

WEIGHTS = (WeightShape(48, 32, "here"), WeightShape(32, 96, "here"))
TOLERANCE = {"attention": 0.02, "training": 0.01, "token_logprobs": 0.01}


class Machine:
    """Runs every contestant once instead of timing it, and keeps what they gave."""

    device = torch.device("cpu")

    def __init__(self):
        self.results = {}
        self.race = None

    def copies(self, operand_bytes):
        return 2

    def measure(self, race):
        self.race = race
        contestants = {"ours": race.ours, **race.stock, **race.peers}
        for name, contestant in contestants.items():
            with contestant.context():
                try:
                    self.results[name] = [flat(call()) for call in contestant.calls]
                except (RuntimeError, NotImplementedError):
                    if name == "ours":
                        raise
        seconds = {name: 1.0 for name in self.results}
        if not race.stock.keys() & seconds.keys():
            seconds[next(iter(race.stock))] = 1.0  # no such backend on a CPU
        return _fields(race, seconds, {}, Ceilings(1.0, 1.0).seconds(race), {})


def flat(result):
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part.detach().double() for part in parts]


CASES = [
    *forward_cases(WEIGHTS, (1, 17, 300)),
    *input_gradient_cases(WEIGHTS, (1, 300)),
    *gradient_fold_cases(WEIGHTS, (32,)),
    *prefill_cases("attention forward", ((4, 2),), (32, 64), 64),
    *prefill_cases("attention backward", ((4, 2),), (32,), 64),
    *decode_cases(((4, 2),), (1, 2), (32,)),
    *elementwise_cases(((32, 256),), vocabulary=40),
    *token_logprobs_cases(32, (16,), 50),
    *training_step_cases(("tiny-qwen3",), ((2, 32),)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.work} {dict(c.shape)}")
def test_ours_and_stock_do_the_same_work(case):
    torch.manual_seed(0)
    machine = Machine()
    fields = case.run(machine)
    assert fields["ours_us"] > 0 and fields["ratio"] > 0
    race = machine.race
    if race.clock == "events" and race.moved_bytes:
        assert fields["ceiling_fraction"] > 0
    compared = [n for n in race.stock if n in machine.results]
    assert compared or case.work == "dW fold", "torch.mm widens its result on CUDA only"
    limit = TOLERANCE.get(case.work.split()[0], 0.01)
    for name in compared:
        for ours, stock in zip(machine.results["ours"], machine.results[name], strict=True):
            for mine, theirs in zip(ours, stock, strict=True):
                if mine.shape != theirs.shape:  # heads before positions
                    theirs = theirs.transpose(1, 2)
                theirs = theirs.reshape(mine.shape)
                if case.work == "rotary backward":
                    continue  # the same cotangent values lie in another layout
                assert (mine - theirs).norm() <= limit * theirs.norm(), name


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.work} {dict(c.shape)}")
def test_a_peer_that_is_not_installed_is_named(case, monkeypatch):
    monkeypatch.setattr(bench_peers, "_present", lambda module: False)
    case.run(machine := Machine())
    missing = [name for name, why in machine.race.unavailable.items() if why == "not installed"]
    expected = {
        "matmul": ["batch_invariant_ops"],
        "training": ["liger_kernel", "batch_invariant_ops"],
        "token_logprobs": ["liger_kernel"],
        "rms_norm": ["liger"],
        "add_rms_norm": ["liger"],
        "rotary": ["liger"],
        "swiglu": ["liger"],
    }
    assert missing == expected.get(case.work.split()[0], [])


def test_the_embedding_gradient_adds_what_eager_adds():
    (case,) = (c for c in elementwise_cases(((64, 16),), 8) if c.work == "embedding gradient")
    machine = Machine()
    case.run(machine)
    ((ours,),), ((eager,),) = machine.results["ours"], machine.results["eager"]
    assert (ours - eager).norm() < 0.01 * eager.norm() and ours.norm() > 0


def test_a_wrong_contestant_would_be_noticed():
    (case,) = forward_cases(WEIGHTS[:1], (300,))
    machine = Machine()
    case.run(machine)
    ours, stock = machine.results["ours"][0][0], machine.results["cublas"][0][0]
    assert (ours.roll(1, 0) - stock).norm() > 0.01 * stock.norm()


def test_accuracy_rows_hold_the_error_ratio():
    cases = accuracy_cases((), (torch.float32, torch.bfloat16))
    assert len(cases) == 9 + 7
    (case,) = (c for c in cases if c.work == "gradient_norm")
    assert 0 < case.run(Machine())["error_ratio"] < 10


def race(stock, peers=()):
    nothing = Contestant.of(lambda: None)
    return Race(
        ours=nothing,
        stock=dict.fromkeys(stock, nothing),
        peers=dict.fromkeys(peers, nothing),
        moved_bytes=8e6,
        operations=1e6,
        tokens=1000,
    )


def test_the_fastest_stock_way_counts_and_every_way_is_reported():
    seconds = {"ours": 4e-6, "flash": 6e-6, "cudnn": 5e-6, "liger": 8e-6}
    fields = _fields(
        race(("flash", "cudnn"), ("liger",)), seconds, {"ours": 7, "cudnn": 9}, 2e-6, {}
    )
    assert fields["stock"] == "cudnn"
    assert fields["ratio"] == pytest.approx(1.25)
    assert fields["peers"] == pytest.approx({"flash": 6.0, "cudnn": 5.0, "liger": 8.0})
    assert fields["ceiling_fraction"] == pytest.approx(0.5)
    assert fields["peak_bytes"] == {"ours": 7, "stock": 9}
    assert fields["tokens_per_second"]["stock"] == pytest.approx(2e8)


def test_the_ceiling_is_the_slower_of_moving_and_computing():
    ceilings = Ceilings(4e12, 1e12)
    assert ceilings.seconds(race(("a",))) == pytest.approx(2e-6)


def test_stock_runs_under_the_settings_of_a_fresh_process():
    with numeric_settings():
        required = [s.read() for s in SETTINGS]
        with library_defaults():
            for setting in SETTINGS:
                setting.read()
        assert [s.read() for s in SETTINGS] == required
    assert nullcontext is Contestant.of(lambda: None).context


class Timed(bench_timing.Machine):
    """Has no device: a contestant's round takes as long as its call says."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.case_seconds = 0.0
        self._total_bytes = 1
        self.ceilings = Ceilings(1e12, 1e12)
        self.order = []

    def _prepared(self, contestant, clock):
        (call,) = contestant.calls
        seconds, name = call()

        def timer(i):
            self.order.append(name)
            return seconds if i else 100.0  # the first round is an outlier

        return timer

    def _trim(self):
        pass


def lasting(seconds, name):
    return Contestant.of(lambda: (seconds, name))


def refusing():
    raise RuntimeError("no kernel\nfor this shape")


def test_medians_of_interleaved_rounds_and_refusals_reported():
    machine = Timed()
    fields = machine.measure(
        Race(
            ours=lasting(2e-6, "ours"),
            stock={"flash": Contestant.of(refusing), "cudnn": lasting(3e-6, "cudnn")},
            peers={"liger": Contestant.of(refusing)},
        )
    )
    assert fields["ratio"] == pytest.approx(1.5)
    assert fields["unavailable"] == dict.fromkeys(("flash", "liger"), "RuntimeError: no kernel")
    assert machine.order.count("ours") == machine.order.count("cudnn") == bench_timing.MIN_ROUNDS
    assert machine.order[:4] == ["ours", "cudnn", "cudnn", "ours"]


def test_an_error_of_ours_passes_and_so_does_a_shape_no_stock_way_runs():
    ours, theirs = lasting(1.0, "ours"), lasting(1.0, "theirs")
    with pytest.raises(RuntimeError, match="no kernel"):
        Timed().measure(Race(ours=Contestant.of(refusing), stock={"cublas": theirs}))
    with pytest.raises(RuntimeError, match="no stock way runs this shape"):
        Timed().measure(Race(ours=ours, stock={"cublas": Contestant.of(refusing)}))
