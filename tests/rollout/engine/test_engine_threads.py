"""Threads that share an engine: each gets its own completions, or a clear error."""

import threading
from contextlib import nullcontext

import pytest

from rl_consistency.rollout.sampling_params import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], list(range(20, 33))]


def params(seed):
    return SamplingParams(n=2, max_tokens=12, seed=seed)


def drawn(engine, seed, **options):
    return [c.token_ids for c in engine.generate(PROMPTS, params(seed), **options)]


def in_thread(call):
    """Starts a call in a thread; the function it returns waits for the result or the error."""
    results = []

    def run():
        try:
            results.append(call())
        except ValueError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait():
        thread.join(timeout=60)
        return results[0]

    return wait


def while_it_runs(engine):
    """What a `generate` gives, and what another gives that a thread calls during it."""
    waits = []

    def call(*_):
        if not waits:
            waits.append(in_thread(lambda: drawn(engine, 1)))

    first = drawn(engine, 0, progress=call)
    return first, waits[0]()


def test_a_generate_called_during_another_gives_what_it_gives_alone(engine):
    assert while_it_runs(engine) == (drawn(engine, 0), drawn(engine, 1))


def test_without_turns_the_second_call_is_not_served(engine):
    """Negative control."""
    engine._turn = nullcontext()
    first, second = while_it_runs(engine)
    assert first == drawn(engine, 0) and isinstance(second, ValueError)


def test_a_stream_that_is_open_is_an_error_for_another_thread(engine):
    stream = engine.stream(PROMPTS, params(0))
    next(stream)
    refused = in_thread(lambda: drawn(engine, 1))()
    assert isinstance(refused, ValueError) and "unfinished requests" in str(refused)
    assert len(list(stream)) == 5
    assert drawn(engine, 1) == in_thread(lambda: drawn(engine, 1))()


def test_another_thread_may_cancel(engine):
    def cancel(*_):
        assert in_thread(lambda: engine.cancel("long"))() in (True, False)

    found = engine.generate(PROMPTS[:1], params(0), request_ids=["long"], progress=cancel)
    assert {c.finish_reason for c in found} == {"cancelled"}
    assert drawn(engine, 1) and not engine.has_unfinished


def test_completions_that_another_step_took_are_told(engine):
    """A callback that steps the engine itself."""
    with pytest.raises(ValueError, match="of 6 completions went to another caller of step"):
        drawn(engine, 3, progress=lambda *_: engine.step())
    assert drawn(engine, 3) == drawn(engine, 3)
