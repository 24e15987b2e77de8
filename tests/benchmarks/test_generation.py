"""Arithmetic on the ticks of a generation, and events around graph replays, without a GPU."""

import pytest
import torch

from benchmarks.rollout import generation as timed
from benchmarks.rollout.copying import check_equal
from benchmarks.rollout.decoding import steady_attention
from benchmarks.rollout.generation import (
    Generation,
    Tick,
    Window,
    idle_share,
    replay_events,
    timed_generation,
)
from benchmarks.rollout.workload import Workload
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.completion import Completion

EQUAL = Workload.equal(1, 2, 12, 6)


class Machine:
    device = torch.device("cuda")


def completion(index, token_ids, logprobs=None):
    values = torch.tensor(logprobs or [-1.0] * len(token_ids))
    return Completion(index, 0, list(token_ids), values, "length")


def generation(tokens, count=2, replays=None):
    ticks = [Tick(float(i), n, i) for i, n in enumerate(tokens)]
    done = [completion(i, [0]) for i in range(count)]
    return Generation(done, float(len(ticks)), ticks, replays or [], None)


class Event:
    """An event whose time is given."""

    def __init__(self, at):
        self.at = at

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_decoding_begins_behind_the_step_that_gave_the_last_its_first_token():
    # Two sequences; the second is prefilled while the first decodes alone, and the first ends.
    run = generation([0, 1, 2, 4, 6, 8, 9, 10])
    assert run.prefill_end == 2 and run.first_token_seconds == 1.0
    window = run.decoding()
    assert (window.steps, window.tokens, window.seconds, window.tokens_before) == (5, 8, 5.0, 2)
    assert window.tokens_per_second == 1.6 and window.step_seconds == 1.0
    steady = run.steady(1)
    assert (steady.steps, steady.tokens, steady.tokens_before) == (2, 4, 4)


def test_a_step_that_prefills_all_is_no_decode_step():
    assert generation([0, 2, 4, 6, 8]).prefill_end == 1


def test_the_last_step_is_never_steady():
    assert generation([0, 2, 4, 6, 8]).steady(0).steps == 2


def test_sequences_that_never_run_together_are_named():
    with pytest.raises(RuntimeError, match="no step decoded all 2 sequences"):
        generation([0, 1, 2, 3, 4]).decoding()
    with pytest.raises(RuntimeError, match="no steps to measure"):
        generation([0, 2, 4, 6, 8]).steady(10)


def test_idle_is_what_no_replay_covers():
    pairs = [(Event(0.0), Event(8.0)), (Event(10.0), Event(19.0)), (Event(19.0), Event(20.0))]
    assert idle_share(pairs) == pytest.approx(0.1)
    assert idle_share(pairs[1:]) == 0.0
    assert idle_share(pairs[:1]) is None
    run = generation([0, 2, 4, 6], replays=[pairs[0], *pairs])
    assert run.window(1, 3).idle_share == pytest.approx(2 / 19)


@pytest.fixture
def log(monkeypatch):
    """What graphs and events do that stand in for those of a GPU."""
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    class TimingEvent:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", TimingEvent)
    return log


def test_replays_are_timed_by_events_and_the_method_is_put_back(log):
    before = torch.cuda.CUDAGraph.replay
    with replay_events() as pairs:
        torch.cuda.CUDAGraph().replay()
    assert log == ["event", "replay", "event"] and len(pairs) == 1
    assert torch.cuda.CUDAGraph.replay is before


@pytest.mark.parametrize("warm_up", [None, "sampling"])
def test_graphs_captured_ahead_of_a_generation_are_timed_in_it(log, monkeypatch, warm_up):
    class Engine:
        stats = None
        replay = None

        def warm_up(self, sampling):
            assert sampling == "sampling"
            self.replay = torch.cuda.CUDAGraph().replay

        def generate(self, prompts, sampling, progress):
            if self.replay is None:
                self.warm_up("sampling")
            self.replay()
            return []

    monkeypatch.setattr(timed, "finished_seconds", lambda device: 0.0)
    found = timed_generation(Engine(), [], [], Machine(), warm_up=warm_up)
    assert log == ["event", "replay", "event"] and len(found.replays) == 1


def test_attention_of_a_steady_window_counts_every_key():
    window = Window(steps=3, tokens=6, seconds=1.0, tokens_before=4, idle_share=None)
    # Two sequences behind 12 prompt tokens: 14, 15 and 16 keys each.
    assert steady_attention(EQUAL, window) == 2 * (14 + 15 + 16)


def test_other_bytes_with_speculation_are_an_error():
    plain, same = (generation([0, 1], count=1) for _ in range(2))
    check_equal(plain, same)
    for other in (completion(0, [1]), completion(0, [0], [-1.0000001])):
        same.completions[0] = other
        with pytest.raises(ConsistencyError, match="sequence 0"):
            check_equal(plain, same)
