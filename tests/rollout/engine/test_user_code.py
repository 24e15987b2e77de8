"""Whatever a drafter, a tokenizer, a callback or a consumer does with what it is given, completions
stay as they are."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import content, engine_of, is_idle

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8]]
SAMPLING = SamplingParams(n=2, max_tokens=12, seed=4, speculation=3)


class Words:
    """A tokenizer that empties what it reads."""

    def decode(self, token_ids, *, skip_special_tokens=True):
        text = " ".join(map(str, token_ids))
        token_ids.clear()
        return text


@pytest.fixture(scope="module")
def expected(model):
    return content(engine_of(model).generate(PROMPTS, SAMPLING))


class Drafting:
    """A drafter with a way to start and to append; it proposes what it was made with."""

    def __init__(self, proposed, start=list, append=list.extend):
        self.proposed, self.taken, self.appended = proposed, start, append

    def start(self, token_ids):
        self.token_ids = token_ids
        self.taken(token_ids)
        return self

    def append(self, token_ids):
        self.appended(self.token_ids, token_ids)
        token_ids.clear()

    def propose(self, most):
        return self.proposed


@pytest.mark.parametrize(
    "change", [list.reverse, list.sort, list.clear, lambda ids: ids.extend(ids)]
)
def test_a_drafter_may_change_the_lists_it_is_given(model, expected, change):
    engine = engine_of(model, drafter=Drafting([1], start=change))
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected


@pytest.mark.parametrize(
    "proposed", [torch.tensor([3]), np.array([3], dtype=np.uint8), (np.int16(3),), {3: "dict"}, []]
)
def test_ids_of_any_library_are_a_draft(model, expected, proposed):
    assert (
        content(engine_of(model, drafter=Drafting(proposed)).generate(PROMPTS, SAMPLING))
        == expected
    )


@pytest.mark.parametrize(
    ("proposed", "message"),
    [
        (None, "proposed None; a draft must be ids"),
        ([1.0], r"proposed \[1.0\]; a draft must be ids"),
        ([True], r"proposed \[True\]; a draft must be ids"),
        (np.array([True]), "a draft must be ids"),
        (torch.tensor([False]), "a draft must be ids"),
        (torch.tensor([1.0]), "a draft must be ids"),
        (torch.tensor([[1, 2]]), "a draft must be ids"),
        (torch.tensor(3), "a draft must be ids"),
        ("1", "proposed '1'; a draft must be ids"),
        ([60], r"proposed \[60\]; a draft must be ids of the model's vocabulary of 60"),
        ([-1], r"proposed \[-1\]; a draft must be ids"),
        ([2**70], "a draft must be ids"),
        ([1] * 9, "Drafting proposed more than the 3 tokens"),
        (itertools.repeat(1), "Drafting proposed more than the 3 tokens"),
    ],
)
def test_another_draft_is_refused_and_the_engine_goes_on(model, expected, proposed, message):
    drafter = Drafting(proposed)
    engine = engine_of(model, drafter=drafter)
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, SAMPLING)
    assert is_idle(engine)
    drafter.proposed = [1]
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected


def test_a_drafter_without_a_state_is_refused(model, monkeypatch):
    monkeypatch.setattr(Drafting, "start", lambda self, ids: ids)
    with pytest.raises(
        TypeError, match=r"Drafting.start\(\) gave .* has no append\(\) and propose"
    ):
        engine_of(model, drafter=Drafting([1])).generate(PROMPTS, SAMPLING)


class Raising(Drafting):
    def __init__(self):
        super().__init__([])

    def propose(self, most):
        raise KeyError("mine")


def test_an_error_of_a_drafter_is_its_own(model):
    engine = engine_of(model, drafter=Raising())
    with pytest.raises(KeyError, match="mine"):
        engine.generate(PROMPTS, SAMPLING)
    assert is_idle(engine)


def test_a_tokenizer_may_change_the_list_it_reads(model, expected):
    engine = engine_of(model, tokenizer=Words())
    asked = SamplingParams(n=2, max_tokens=12, seed=4, stop=("never",))
    assert content(engine.generate(PROMPTS, asked)) == expected
    text = " ".join(map(str, expected[0, 0][0][:4]))
    stopped = engine.generate(PROMPTS, SamplingParams(max_tokens=12, seed=4, stop=(text,)))
    assert stopped[0].finish_reason == "stop" and stopped[0].token_ids == expected[0, 0][0][:4]


def test_a_tokenizer_without_text_is_refused(model, monkeypatch):
    monkeypatch.setattr(Words, "decode", lambda self, token_ids, **named: b"bytes")
    asked = SamplingParams(max_tokens=12, stop=("never",))
    with pytest.raises(TypeError, match=r"Words.decode\(\) gave b'bytes'"):
        engine_of(model, tokenizer=Words()).generate(PROMPTS, asked)


def test_a_consumer_may_change_completions_and_what_it_asked_with(model):
    """Also where a later sample finds its prompt in the cache, or is preempted."""
    settings = {"num_kv_blocks": 12, "max_num_seqs": 3}
    prompts, asked = [list(range(1, 9))] * 3, SamplingParams(n=2, max_tokens=14, seed=4, top_k=9)
    expected = content(engine_of(model, **settings).generate(prompts, asked))
    mine, params = [list(prompt) for prompt in prompts], [SamplingParams(**vars(asked))] * 3
    engine, found = engine_of(model, **settings), {}
    stream = engine.stream(mine, params)
    for prompt, each in zip(mine, params, strict=True):
        prompt.reverse()
        object.__setattr__(each, "temperature", 0.5)
        object.__setattr__(each, "max_tokens", 2)
    mine.clear()
    for completion in stream:
        found |= content([replace(completion, token_ids=list(completion.token_ids))])
        completion.token_ids.reverse()
        completion.token_logprobs.zero_()
    assert found == expected and engine.stats.preemptions > 0
    assert content(engine.generate(prompts, asked)) == expected


def test_a_callback_may_change_the_callers_lists(model, expected):
    prompts, params = [list(prompt) for prompt in PROMPTS], [SAMPLING] * 2

    def progress(*_):
        prompts.append([1])
        params.append(SAMPLING)

    assert content(engine_of(model).generate(prompts, params, progress=progress)) == expected


@pytest.mark.parametrize("call", ["submit", "cancel", "step"])
def test_the_engine_is_not_called_within_a_step(model, call, monkeypatch):
    engine = engine_of(model, drafter=Drafting([1]))
    arguments = {"submit": ([[1]], SAMPLING), "cancel": ("mine",), "step": ()}[call]
    monkeypatch.setattr(Drafting, "propose", lambda *_: getattr(engine, call)(*arguments))
    with pytest.raises(ValueError, match=f"{call} was called within a step"):
        engine.generate(PROMPTS[:1], SAMPLING, request_ids=["mine"])
    assert is_idle(engine)


def test_progress_that_cannot_be_called_is_refused_before_any_work(engine):
    with pytest.raises(TypeError, match="progress must be callable"):
        engine.generate(PROMPTS, SAMPLING, progress=3)
    assert is_idle(engine)
