"""Streams, callers that drive the engine, cancellation, stop strings, failures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from rl_consistency.rollout.completion import FailedRequestsError
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import content, engine_of, is_idle

VOCAB = 60
PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 59, 11, 12], list(range(20, 33))]
SAMPLING = [SamplingParams(n=2, max_tokens=n, seed=4) for n in (6, 21, 9, 14)]


@pytest.fixture(scope="module")
def expected(model: Qwen3ForCausalLM) -> dict[tuple[int, int], Any]:
    return content(engine_of(model).generate(PROMPTS, SAMPLING))


# Streams.


def test_a_stream_yields_each_completion_as_it_ends(model: Any, expected: Any) -> None:
    engine = engine_of(model)
    completions, unfinished = [], []
    for completion in engine.stream(PROMPTS, SAMPLING):
        completions.append(completion)
        unfinished.append(sum(len(live) for live in engine._requests.live.values()))
    assert content(completions) == expected
    assert [len(c.token_ids) for c in completions] == sorted(len(c.token_ids) for c in completions)
    assert unfinished[0] >= 6 and unfinished[-1] == 0  # the others were decoding meanwhile
    assert is_idle(engine)


def test_a_closed_stream_cancels_the_rest_and_returns_their_blocks(
    model: Any, expected: Any
) -> None:
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


def test_an_error_of_the_caller_in_a_stream_or_its_progress_leaves_the_engine_idle(
    model: Any, expected: Any
) -> None:
    engine = engine_of(model)

    def fail(*_: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate(PROMPTS, SAMPLING, progress=fail)
    assert is_idle(engine)
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected


def test_prompts_are_checked_before_a_stream_is_read(model: Any) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.stream([[]], SamplingParams())
    assert is_idle(engine)


def test_an_engine_at_work_refuses_another_call(model: Any) -> None:
    engine = engine_of(model)
    stream = engine.stream(PROMPTS, SAMPLING)
    with pytest.raises(ValueError, match="4 unfinished requests; take in their stream or close it"):
        engine.generate(PROMPTS, SAMPLING)
    assert len(list(stream)) == 8


def test_prompts_submitted_to_a_stream_are_served_with_it(model: Any, expected: Any) -> None:
    engine = engine_of(model)
    stream = engine.stream(PROMPTS[:2], SAMPLING[:2])
    completions = [next(stream)]
    engine.submit([PROMPTS[3]], SAMPLING[3], prompt_ids=[3], request_ids=["turn"])
    completions += stream
    added = [c for c in completions if c.request_id == "turn"]
    assert [expected[3, c.sample_index] for c in added] == [*content(added).values()]
    assert len(completions) == 6


# Callers that drive the engine.


def test_a_caller_can_drive_the_engine(model: Any, expected: Any) -> None:
    engine = engine_of(model, max_num_seqs=3)
    assert engine.submit(PROMPTS, SAMPLING, request_ids=list("abcd")) == list("abcd")
    completions = []
    while engine.has_unfinished:
        completions += engine.step()
    assert content(completions) == expected
    assert {(c.request_id, c.prompt_index) for c in completions} == set(zip("abcd", range(4)))
    assert engine.step() == []


@pytest.mark.parametrize(
    ("request_ids", "message"),
    [
        (["a", "a", "b", "c"], "request id 'a' is given twice"),
        (["a", "b", "c", 4], "request ids must be strings, got 4"),
        (["a"], "4 prompts but 1 request_ids"),
        ("abcd", "request_ids must be a list of strings, got 'abcd'"),
    ],
)
def test_bad_request_ids_are_refused(model: Any, request_ids: list[Any], message: str) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, SAMPLING, request_ids=request_ids)
    assert is_idle(engine)


def test_the_id_and_the_stream_of_an_unfinished_request_are_refused(model: Any) -> None:
    engine = engine_of(model)
    engine.submit([[1]], SamplingParams(), request_ids=["a"])
    with pytest.raises(ValueError, match="request id 'a' is given twice, or belongs to a request"):
        engine.submit([[2]], SamplingParams(), request_ids=["a"], prompt_ids=[1])
    with pytest.raises(ValueError, match="prompt id 0 and seed 0 of a request that is not finish"):
        engine.submit([[2]], SamplingParams())
    engine.submit([[2]], SamplingParams(seed=1))
    engine.submit([[2]], SamplingParams(), prompt_ids=[2])
    while engine.has_unfinished:
        engine.step()
    assert engine.submit([[2]], SamplingParams(), request_ids=["a"]) == ["a"]


def test_a_cancelled_request_gives_its_blocks_back_and_the_others_are_the_same(
    model: Any, expected: Any
) -> None:
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


def test_integers_of_any_kind_are_taken(model: Any, expected: Any) -> None:
    prompt_ids: list[Any] = [np.arange(4, dtype=np.uint64), torch.arange(4)]
    for ids in prompt_ids:
        assert content(engine_of(model).generate(PROMPTS, SAMPLING, prompt_ids=ids)) == expected
    last = expected[1, 0][0][1]
    eos_token_ids: list[Any] = [np.int64(last), [np.int64(last)], torch.tensor(last)]
    for eos in eos_token_ids:
        engine = RolloutEngine(model, eos_token_id=eos, kv_block_size=4)
        completion = engine.generate(PROMPTS, SAMPLING)[2]
        assert (completion.finish_reason, completion.token_ids[-1]) == ("stop", last)


@pytest.mark.parametrize("eos", ["2", 2.0, [2.0], [None], True])
def test_an_eos_that_is_no_integer_is_refused(model: Any, eos: Any) -> None:
    with pytest.raises(ValueError, match="each eos_token_id must be an integer in"):
        RolloutEngine(model, eos_token_id=eos)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((iter([[1]]), SamplingParams()), "prompts must be a list .* token ids; got a list_it"),
        (([[1]], None), "sampling must be a SamplingParams or a sequence of them.* got None"),
        (([[1]], {"n": 2}), "sampling must be a SamplingParams or a sequence of them"),
        (([[1]], [None]), r"sampling\[0\] must be a SamplingParams, got None"),
        (([[1], [[1], [2, 3]]], SamplingParams()), "prompt 1 must be a list of integer token ids"),
        (([[1], ["a"]], SamplingParams()), "prompt 1 must be a list of integer token ids"),
        (([1, 2], SamplingParams()), "prompt 0 must be a list of integer token ids"),
        (([[2**70]], SamplingParams()), "prompt 0 must be a list of integer token ids"),
        (
            ([[1], [2]], [SamplingParams(), SamplingParams(stop_token_ids=(4, VOCAB))]),
            "prompt 1 has the stop token id 60, outside the model's vocabulary of 60",
        ),
    ],
)
def test_a_call_of_another_form_is_refused(model: Any, call: Any, message: str) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match=message):
        engine.generate(*call)
    assert is_idle(engine)


def test_prompt_ids_that_are_no_list_are_refused(model: Any) -> None:
    ids: Any = 3
    with pytest.raises(ValueError, match="prompt_ids must be a list of integers, got 3"):
        engine_of(model).generate([[1]], SamplingParams(), prompt_ids=ids)


@pytest.mark.parametrize("options", [{"tokenizer": "gpt2"}, {"drafter": 3}])
def test_parts_of_another_kind_are_refused(model: Any, options: Any) -> None:
    with pytest.raises(TypeError, match=rf"{next(iter(options))} is .*, which has no \w+\(\)"):
        engine_of(model, **options)


def test_a_prefill_of_single_tokens_is_shared_and_moves_nothing(model: Any, expected: Any) -> None:
    engine = engine_of(model, prefill_chunk_size=1)
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected
    assert engine.stats.prefix_hit_tokens == 4 + 4 + 12


def test_fewer_tokens_than_seats_move_nothing(model: Any, expected: Any) -> None:
    params = [dataclasses.replace(p, speculation=7) for p in SAMPLING]
    engine = engine_of(model, max_batch_tokens=3)
    assert content(engine.generate(PROMPTS, params)) == expected


def test_a_drafter_that_proposes_what_is_no_token_is_named(model: Any) -> None:
    class Wild:
        def start(self, token_ids: Sequence[int]) -> Wild:
            return self

        def append(self, token_ids: Sequence[int]) -> None: ...

        def propose(self, most: int) -> Sequence[int]:
            return [VOCAB] * most

    engine = engine_of(model, drafter=Wild())
    with pytest.raises(ValueError, match="Wild proposed .* vocabulary of 60"):
        engine.generate(PROMPTS, SamplingParams(speculation=3, max_tokens=8))
    assert is_idle(engine)


# Stop strings.


class Pairs:
    """Two letters for each token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + t % 5) + chr(97 + t // 5 % 5) for t in token_ids)


@pytest.mark.parametrize("speculation", [0, 7])
def test_a_stop_string_across_tokens_ends_a_sample_at_the_token_that_completes_it(
    model: Any, expected: Any, speculation: int
) -> None:
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


def test_the_space_of_the_first_token_belongs_to_the_text(model: Any, expected: Any) -> None:
    class Words:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            return " ".join(f"w{token_id}" for token_id in token_ids)

    whole = expected[1, 0][0]
    params = SamplingParams(n=2, max_tokens=len(whole), seed=4, stop=(f" w{whole[0]}",))
    engine = engine_of(model, tokenizer=Words())
    completion = engine.generate([PROMPTS[1]], params, prompt_ids=[1])[0]
    assert (completion.token_ids, completion.finish_reason) == (whole[:1], "stop")


def test_a_stop_string_in_the_prompt_ends_nothing(model: Any) -> None:
    stop = Pairs().decode(PROMPTS[0][:2])
    params = SamplingParams(n=2, max_tokens=6, seed=4, stop=(stop,))
    completions = engine_of(model, tokenizer=Pairs()).generate([PROMPTS[0]], params)
    texts = [Pairs().decode(c.token_ids) for c in completions]
    for c, text in zip(completions, texts, strict=True):
        assert (c.finish_reason == "stop") == (stop in text)


def test_stop_strings_need_a_tokenizer(model: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt 0 has stop strings \('x',\).*give the Rollout"):
        engine_of(model).generate([[1]], SamplingParams(stop=("x",)))


# Logprobs that are not finite.


def test_one_failing_request_is_named_and_all_others_are_finished(
    model: Any, expected: Any
) -> None:
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
