"""Timing on a fake clock: interleaved rounds, medians, settings, ways that do not run."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks import timing as bench_timing
from benchmarks.timing import (
    ROUNDS,
    Ceilings,
    Contestant,
    Race,
    library_defaults,
    row_fields,
)
from rl_consistency.numerics.settings import SETTINGS, numeric_settings


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
    fields = row_fields(
        race(("flash", "cudnn"), ("liger",)), seconds, {"ours": 7, "cudnn": 9}, 2e-6
    )
    assert fields["stock"] == "cudnn"
    assert fields["ratio"] == pytest.approx(1.25)
    assert fields["peers"] == pytest.approx({"flash": 6.0, "cudnn": 5.0, "liger": 8.0})
    assert fields["ceiling_fraction"] == pytest.approx(0.5)
    assert fields["peak_bytes"] == {"ours": 7, "stock": 9}
    assert fields["tokens_per_second"]["stock"] == pytest.approx(2e8)


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
        self.ceilings = Ceilings(1e12, 1e12)
        self.order = []

    def _prepared(self, contestant, clock, settings):
        (call,) = contestant.calls
        seconds, name = call()

        def timer(i):
            self.order.append(name)
            return seconds if i else 100.0  # the first round is an outlier

        return timer

    def _taken(self):
        return 0

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
    rounds = machine.order.count("ours")
    assert rounds == machine.order.count("cudnn") and ROUNDS["least"] <= rounds <= ROUNDS["most"]
    assert machine.order[:4] == ["ours", "cudnn", "cudnn", "ours"]


def test_an_error_of_ours_passes_and_so_does_a_shape_no_stock_way_runs():
    ours, theirs = lasting(1.0, "ours"), lasting(1.0, "theirs")
    with pytest.raises(RuntimeError, match="no kernel"):
        Timed().measure(Race(ours=Contestant.of(refusing), stock={"cublas": theirs}))
    with pytest.raises(RuntimeError, match="no stock way runs this shape"):
        Timed().measure(Race(ours=ours, stock={"cublas": Contestant.of(refusing)}))


def test_ours_is_timed_alone_where_all_others_lack_memory():
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    full, refused = Contestant.of(too_large), Contestant.of(refusing)
    race = Race(ours=lasting(1.0, "ours"), stock={"sdpa": full}, peers={"liger": full})
    fields = Timed().measure(race)
    assert fields["ours_us"] and "ratio" not in fields and not fields["peers"]
    assert fields["unavailable"].keys() == {"sdpa", "liger"}
    with pytest.raises(RuntimeError, match="no stock way runs this shape"):
        Timed().measure(replace(race, peers={"liger": refused}))


def test_a_peer_counts_where_stock_does_not_run():
    fields = Timed().measure(
        Race(
            ours=lasting(1.0, "ours"),
            stock={"sdpa": Contestant.of(refusing)},
            peers={"liger": lasting(2.0, "liger")},
        )
    )
    assert not {"ratio", "stock", "stock_us"} & fields.keys()
    assert fields["peers"] == {"liger": 2e6} and fields["unavailable"].keys() == {"sdpa"}
