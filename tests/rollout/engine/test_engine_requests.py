"""Streams, callers that drive the engine, cancellation, stop strings, failures."""

import math

import numpy as np
import pytest
import torch

from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.failures import FailedRequestsError
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import content, engine_of, is_idle

VOCAB = 60
PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 59, 11, 12], list(range(20, 33))]
SAMPLING = [SamplingParams(n=2, max_tokens=n, seed=4) for n in (6, 21, 9, 14)]


@pytest.fixture(scope="module")
def expected(model):
    return content(engine_of(model).generate(PROMPTS, SAMPLING))


# Streams.


def test_a_stream_yields_each_completion_as_it_ends(model, expected):
    engine = engine_of(model)
    completions, unfinished = [], []
    for completion in engine.stream(PROMPTS, SAMPLING):
        completions.append(completion)
        unfinished.append(sum(len(live) for live in engine._requests.live.values()))
    assert content(completions) == expected
    assert [len(c.token_ids) for c in completions] == sorted(len(c.token_ids) for c in completions)
    assert unfinished[0] >= 6 and unfinished[-1] == 0  # the others were decoding meanwhile
    assert is_idle(engine)


def test_a_closed_stream_cancels_the_rest_and_returns_their_blocks(model, expected):
    engine = engine_of(model)
    stream = engine.stream(PROMPTS, SAMPLING)
    next(stream)
    assert not is_idle(engine)
    stream.close()
    assert is_idle(engine)
    for _ in engine.stream(PROMPTS, SAMPLING):
        break
    assert is_idle(engine)
    engine.stream(PROMPTS, SAMPLING).close()  # not even begun
    assert is_idle(engine)
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected


def test_an_error_of_the_caller_in_a_stream_or_its_progress_leaves_the_engine_idle(model, expected):
    engine = engine_of(model)

    def fail(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate(PROMPTS, SAMPLING, progress=fail)
    assert is_idle(engine)
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected


def test_an_engine_at_work_refuses_another_call(model):
    engine = engine_of(model)
    stream = engine.stream(PROMPTS, SAMPLING)
    with pytest.raises(ValueError, match="4 unfinished requests; take in their stream or close it"):
        engine.generate(PROMPTS, SAMPLING)
    assert len(list(stream)) == 8


def test_prompts_submitted_to_a_stream_are_served_with_it(model, expected):
    engine = engine_of(model)
    stream = engine.stream(PROMPTS[:2], SAMPLING[:2])
    completions = [next(stream)]
    engine.submit([PROMPTS[3]], SAMPLING[3], prompt_ids=[3], request_ids=["turn"])
    completions += stream
    added = [c for c in completions if c.request_id == "turn"]
    assert [expected[3, c.sample_index] for c in added] == [*content(added).values()]
    assert len(completions) == 6


# Callers that drive the engine.


def test_a_caller_can_drive_the_engine(model, expected):
    engine = engine_of(model, max_num_seqs=3)
    assert engine.submit(PROMPTS, SAMPLING, request_ids=list("abcd")) == list("abcd")
    completions = []
    while engine.has_unfinished:
        completions += engine.step()
    assert content(completions) == expected
    assert {(c.request_id, c.prompt_index) for c in completions} == set(zip("abcd", range(4)))
    assert engine.step() == []


def test_the_id_and_the_stream_of_an_unfinished_request_are_refused(model):
    engine = engine_of(model)
    engine.submit([[1]], SamplingParams(seed=0), request_ids=["a"])
    with pytest.raises(ValueError, match="request id 'a' is given twice, or belongs to a request"):
        engine.submit([[2]], SamplingParams(seed=0), request_ids=["a"], prompt_ids=[1])
    with pytest.raises(ValueError, match="prompt id 0 and seed 0 of a request that is not finish"):
        engine.submit([[2]], SamplingParams(seed=0))
    engine.submit([[2]], SamplingParams(seed=1))
    engine.submit([[2]], SamplingParams(seed=0), prompt_ids=[2])
    while engine.has_unfinished:
        engine.step()
    assert engine.submit([[2]], SamplingParams(seed=0), request_ids=["a"]) == ["a"]


def test_a_cancelled_request_gives_its_blocks_back_and_the_others_are_the_same(model, expected):
    engine = engine_of(model)
    engine.submit(PROMPTS, SAMPLING, request_ids=list("abcd"))
    completions = [c for _ in range(5) for c in engine.step()]
    free = engine._blocks.num_free_blocks
    assert engine.cancel("b") and engine._blocks.num_free_blocks > free
    assert not engine.cancel("b") and not engine.cancel("unknown")
    while engine.has_unfinished:
        completions += engine.step()
    cancelled = [c for c in completions if c.finish_reason == "cancelled"]
    assert [c.request_id for c in cancelled] == ["b", "b"]
    for c in cancelled:
        tokens, logprobs, _ = expected[1, c.sample_index]
        assert 0 < len(c.token_ids) < len(tokens) and tokens[: len(c.token_ids)] == c.token_ids
        assert logprobs.startswith(c.token_logprobs.numpy().tobytes())
    kept = content([c for c in completions if c.finish_reason != "cancelled"])
    assert kept == {key: value for key, value in expected.items() if key[0] != 1}
    assert is_idle(engine)


# What a call may look like.


def test_integers_of_any_kind_are_taken(model, expected):
    prompt_ids = [np.arange(4, dtype=np.uint64), torch.arange(4)]
    for ids in prompt_ids:
        assert content(engine_of(model).generate(PROMPTS, SAMPLING, prompt_ids=ids)) == expected
    last = expected[1, 0][0][1]
    eos_token_ids = [np.int64(last), [np.int64(last)], torch.tensor(last)]
    for eos in eos_token_ids:
        engine = RolloutEngine(model, eos_token_id=eos, kv_block_size=4)
        completion = engine.generate(PROMPTS, SAMPLING)[2]
        assert (completion.finish_reason, completion.token_ids[-1]) == ("stop", last)


# Stop strings.


class Pairs:
    """Two letters for each token."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(97 + t % 5) + chr(97 + t // 5 % 5) for t in token_ids)


@pytest.mark.parametrize("speculation", [0, 7])
def test_a_stop_string_across_tokens_ends_a_sample_at_the_token_that_completes_it(
    model, expected, speculation
):
    text = Pairs().decode
    for key in ((1, 0), (3, 1)):
        whole = expected[key][0]
        stop = text(whole)[3:6]  # from the middle of one token to that of another
        end = next(i for i in range(len(whole) + 1) if stop in text(whole[:i]))
        params = SamplingParams(
            n=2, max_tokens=len(whole), seed=4, stop=(stop, "zz"), speculation=speculation
        )
        engine = engine_of(model, tokenizer=Pairs())
        completions = engine.generate([PROMPTS[key[0]]], params, prompt_ids=[key[0]])
        completion = completions[key[1]]
        assert completion.token_ids == whole[:end] and completion.finish_reason == "stop"
        assert expected[key][1].startswith(completion.token_logprobs.numpy().tobytes())


def test_the_space_of_the_first_token_belongs_to_the_text(model, expected):
    class Words:
        def decode(self, token_ids, *, skip_special_tokens=False):
            return " ".join(f"w{token_id}" for token_id in token_ids)

    whole = expected[1, 0][0]
    params = SamplingParams(n=2, max_tokens=len(whole), seed=4, stop=(f" w{whole[0]}",))
    engine = engine_of(model, tokenizer=Words())
    completion = engine.generate([PROMPTS[1]], params, prompt_ids=[1])[0]
    assert (completion.token_ids, completion.finish_reason) == (whole[:1], "stop")


def test_a_stop_string_in_the_prompt_ends_nothing(model):
    stop = Pairs().decode(PROMPTS[0][:2])
    params = SamplingParams(n=2, max_tokens=6, seed=4, stop=(stop,))
    completions = engine_of(model, tokenizer=Pairs()).generate([PROMPTS[0]], params)
    texts = [Pairs().decode(c.token_ids) for c in completions]
    for c, text in zip(completions, texts, strict=True):
        assert (c.finish_reason == "stop") == (stop in text)


# Logprobs that are not finite.


def test_one_failing_request_is_named_and_all_others_are_finished(model, expected):
    engine = engine_of(model, num_kv_blocks=14, max_num_seqs=3)
    others = {key: value for key, value in expected.items() if key[0] != 2}
    used = {t for tokens, *_ in others.values() for t in tokens}.union(*PROMPTS)
    mark = min(set(range(VOCAB)) - used)  # a token that only the failing prompt will hold
    prompts = [*PROMPTS[:2], [9, 10, mark, 11, 12], PROMPTS[3]]
    row = model.model.embed_tokens.weight[mark]
    kept = row.detach().clone()
    try:
        with torch.no_grad():
            row.fill_(math.nan)
        with pytest.raises(FailedRequestsError) as caught:
            engine.generate(prompts, SAMPLING, request_ids=list("abcd"))
        streamed = list(engine.stream(prompts, SAMPLING))
    finally:
        with torch.no_grad():
            row.copy_(kept)
    assert [(c.request_id, c.finish_reason) for c in caught.value.failed] == [("c", "error")] * 2
    assert "request 'c', prompt 2, sample 1, position 5: the model gave" in str(caught.value)
    assert content(caught.value.completions) == others
    assert content([c for c in streamed if c.error is None]) == others
    assert len(streamed) == 8 and is_idle(engine)
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected
