"""Rollouts that are left, broken or disturbed: the next one gives the bytes of a fresh engine."""

import gc

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.step_watch import StepWatch
from tests.rollout.engine.engines import content, engine_of, is_idle

PROMPT = list(range(1, 30))
PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], PROMPT]
PARAMS = SamplingParams(max_tokens=9, seed=4)
LONG = SamplingParams(max_tokens=90, seed=4)


@pytest.fixture
def weight(model):
    """A weight to write to; it has its values back after the test."""
    parameter = model.model.layers[0].self_attn.k_proj.weight
    kept = parameter.detach().clone()
    yield parameter
    with torch.no_grad():
        parameter.copy_(kept)


def steps_to_the_end(engine):
    completions = []
    while engine.has_unfinished:
        completions += engine.step()
    return completions


def is_as_fresh(engine):
    """Whether the engine gives what one gives that never did anything else."""
    fresh = engine_of(engine._runner._model).generate(PROMPTS, PARAMS)
    return content(engine.generate(PROMPTS, PARAMS)) == content(fresh)


# An iterator outlives its rollout.


@pytest.mark.parametrize("dies", [False, True])
def test_an_old_stream_leaves_the_next_rollout_alone(engine, dies):
    expected = content(engine.generate(PROMPTS, PARAMS))
    old = engine.stream([PROMPT], PARAMS, request_ids=["old"])
    engine.cancel("old")
    steps_to_the_end(engine)
    new = engine.stream(PROMPTS, PARAMS)
    if dies:
        del old
        gc.collect()
    else:
        assert list(old) == []
    assert content(list(new)) == expected


@pytest.mark.parametrize("ends_by_stop", [False, True])
def test_who_takes_all_completions_of_a_stream_may_go_on_at_once(model, ends_by_stop):
    (whole,) = engine_of(model).generate([PROMPT], PARAMS)
    eos = whole.token_ids[4] if ends_by_stop else None
    engine = engine_of(model, eos_token_id=eos)
    stream = engine.stream([PROMPT], PARAMS)
    assert next(stream).finish_reason == ("stop" if ends_by_stop else "length")
    assert is_idle(engine)
    assert len(engine.generate(PROMPTS, PARAMS)) == 3
    assert list(stream) == []


# An exception in the middle of a step.


class Interrupt(BaseException):
    pass


def interrupted(after, call):
    """`call`, but the call number `after` raises once it has done its work."""
    count = 0

    def wrapped(*args, **given):
        nonlocal count
        count += 1
        result = call(*args, **given)
        if count == after:
            raise Interrupt
        return result

    return wrapped


@pytest.mark.parametrize("after", [1, 2, 4, 7])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("_runner", "admit"),
        ("_runner", "_mark"),
        ("_blocks", "grow"),
        ("_blocks", "publish"),
        ("_blocks", "release"),
    ],
)
def test_an_exception_in_a_step_leaves_an_idle_engine_that_kept_nothing(
    engine, monkeypatch, part, name, after
):
    owner = getattr(engine, part)
    prompts, params = [*PROMPTS, *PROMPTS], SamplingParams(n=2, max_tokens=9, seed=4)
    engine.submit(prompts, params)
    with monkeypatch.context() as broken, pytest.raises(Interrupt):
        broken.setattr(owner, name, interrupted(after, getattr(owner, name)))
        steps_to_the_end(engine)
    assert is_idle(engine) and engine.step() == []
    assert is_as_fresh(engine)


def test_a_half_advanced_engine_is_caught(engine, monkeypatch):
    """Negative control: going on after an exception gives other tokens."""
    monkeypatch.setattr(engine, "_abandon", lambda: None)
    expected = content(engine_of(engine._runner._model).generate(PROMPTS, PARAMS))
    engine.submit(PROMPTS, PARAMS)
    with monkeypatch.context() as broken, pytest.raises(Interrupt):
        broken.setattr(engine._runner, "_mark", interrupted(4, engine._runner._mark))
        steps_to_the_end(engine)
    assert content(steps_to_the_end(engine)) != expected


# Something changes while samples are under way.


def test_one_step_under_other_ops_is_enough(engine):
    engine.submit([PROMPT], LONG)
    engine.step()
    with strict(except_={"linear"}), pytest.raises(ConsistencyError, match="linear"):
        engine.step()
    assert is_idle(engine) and is_as_fresh(engine)


def close(engine, stream):
    stream.close()


def cancel(engine, stream):
    engine.cancel("mine")


@pytest.mark.parametrize("leave", [close, cancel])
def test_weights_swapped_in_and_out_of_a_rollout_that_is_left_leave_no_keys(
    engine, weight, leave, monkeypatch
):
    monkeypatch.setattr(StepWatch, "look", lambda *_: None)
    kept = weight.detach().clone()
    stream = engine.stream([PROMPT], LONG, request_ids=["mine"])
    weight.data.mul_(1.5)  # leaves no version
    for _ in range(3):
        engine.step()
    leave(engine, stream)
    weight.data.copy_(kept)
    steps_to_the_end(engine)
    assert is_as_fresh(engine)
    assert list(stream) == []


def test_a_rollout_left_before_its_first_step_keeps_the_cache(engine):
    engine.generate([PROMPT], PARAMS)
    engine.stream([PROMPT], PARAMS).close()
    engine.generate([PROMPT], PARAMS)
    assert engine.stats.prefix_hit_tokens == 28


def test_weights_written_and_written_back_within_a_rollout_are_an_error(engine, weight):
    kept = weight.detach().clone()
    engine.submit([PROMPT], SamplingParams(max_tokens=2, seed=4))
    with torch.no_grad():
        weight.mul_(1.5)
        weight.copy_(kept)
    with pytest.raises(ConsistencyError, match="weight was written in place"):
        steps_to_the_end(engine)
    assert is_idle(engine) and is_as_fresh(engine)


# What runs in the forward pass beside the weights.


def triple(module, arguments, output):
    return output * 3


def triple_input(module, arguments):
    return (arguments[0] * 3, *arguments[1:])


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_hook_added_or_removed_between_rollouts_drops_the_cache(engine, model, kind):
    before = content(engine.generate(PROMPTS, PARAMS))
    mlp = model.model.layers[0].mlp
    add = {
        "forward": lambda: mlp.register_forward_hook(triple),
        "pre": lambda: mlp.register_forward_pre_hook(triple_input),
    }[kind]
    hook = add()
    try:
        assert is_as_fresh(engine)
        assert content(engine.generate(PROMPTS, PARAMS)) != before
    finally:
        hook.remove()
    assert is_as_fresh(engine)
    assert content(engine.generate(PROMPTS, PARAMS)) == before


def test_a_hook_added_during_a_rollout_is_an_error(engine, model):
    engine.submit([PROMPT], PARAMS)
    engine.step()
    hook = model.model.layers[0].mlp.register_forward_hook(triple)
    with hook, pytest.raises(ConsistencyError, match="hook"):
        steps_to_the_end(engine)
    assert is_idle(engine) and is_as_fresh(engine)


def test_another_patch_of_the_same_model_drops_the_cache(tiny_qwen3):
    model = tiny_qwen3()
    first = patch(model)
    engine = engine_of(model)
    engine.generate([PROMPT], PARAMS)
    first.restore()
    with patch(model):
        engine.generate([PROMPT], PARAMS)
        assert engine.stats.prefix_hit_tokens == 0
        engine.generate([PROMPT], PARAMS)
        assert engine.stats.prefix_hit_tokens == 28
