"""Timing on a fake clock: interleaved rounds, medians, settings, ways that do not run."""

import pytest
import torch

from benchmarks import timing as bench_timing
from benchmarks.timing import (
    ROUNDS,
    Contestant,
    library_defaults,
    row_fields,
)
from rl_consistency.numerics.settings import numeric_settings, read_settings


def test_the_fastest_stock_way_counts_and_every_way_is_reported():
    seconds = {"ours": 4e-6, "flash": 6e-6, "cudnn": 5e-6, "liger": 8e-6}
    fields = row_fields(seconds, ("flash", "cudnn", "absent"), 2e-6, tokens=1000)
    assert fields["stock"] == "cudnn"
    assert fields["ratio"] == pytest.approx(1.25)
    assert fields["peers"] == pytest.approx({"flash": 6.0, "liger": 8.0})
    assert fields["ceiling_fraction"] == pytest.approx(0.5)
    assert fields["tokens_per_second"]["cudnn"] == pytest.approx(2e8)


def test_stock_runs_under_the_settings_of_a_fresh_process():
    with numeric_settings():
        required = read_settings()
        with library_defaults():
            assert read_settings() == bench_timing.LIBRARY_DEFAULTS
        assert read_settings() == required


class Timed(bench_timing.Machine):
    """Has no device: a contestant's round takes as long as its call says."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.cuda, self.copy_bandwidth, self.matmul_rate = False, 1e12, 1e12
        self.order = []

    def _prepared(self, contestant, clock, settings):
        (call,) = contestant.calls
        seconds, name = call()

        def timer(i):
            self.order.append(name)
            return seconds if i else 100.0  # the first round is an outlier

        return timer


def lasting(seconds, name):
    return Contestant([lambda: (seconds, name)])


def refusing():
    raise RuntimeError("no kernel\nfor this shape")


def test_medians_of_interleaved_rounds_and_refusals_reported():
    machine = Timed()
    fields = machine.measure(
        ours=lasting(2e-6, "ours"),
        stock={"flash": Contestant([refusing]), "cudnn": lasting(3e-6, "cudnn")},
        peers={"liger": Contestant([refusing])},
    )
    assert fields["ratio"] == pytest.approx(1.5)
    assert fields["unavailable"] == dict.fromkeys(("flash", "liger"), "RuntimeError: no kernel")
    rounds = machine.order.count("ours")
    assert rounds == machine.order.count("cudnn") and ROUNDS["least"] <= rounds <= ROUNDS["most"]
    assert machine.order[:4] == ["ours", "cudnn", "cudnn", "ours"]


def test_an_error_of_ours_passes_and_a_row_needs_no_other_way():
    ours, refused = lasting(1.0, "ours"), Contestant([refusing])
    with pytest.raises(RuntimeError, match="no kernel"):
        Timed().measure(ours=refused, stock={"cublas": ours})
    peers = {"liger": lasting(2.0, "liger")}
    fields = Timed().measure(ours=ours, stock={"sdpa": refused}, peers=peers)
    assert not {"ratio", "stock", "stock_us"} & fields.keys()
    assert fields["peers"] == {"liger": 2e6} and fields["unavailable"].keys() == {"sdpa"}


def test_a_cpu_times_every_clock_by_the_host():
    machine = bench_timing.Machine(torch.device("cpu"))
    assert min(machine.copy_bandwidth, machine.matmul_rate) > 0
    for clock in ("events", "graph", "wall"):
        nothing = Contestant([lambda: None])
        assert machine.measure(ours=nothing, stock={}, clock=clock, memory=True)["ours_us"] > 0
