"""`vllm serve` at its defaults with the plug-in: what clients get over HTTP is training's.

The needle, the cached prefix and one request against many are the tests of vLLM's batch-invariant
mode, told again with a stronger claim: equal to the trainer, not only to one another.
"""

from random import Random
from types import SimpleNamespace

import pytest

from tests.gpu.vllm.engines import Server
from tests.gpu.vllm.policies import Trainer, checkpoint, differing, random_prompts

pytestmark = pytest.mark.gpu

VOCABULARY = 259
"""That of the tokenizer of bytes."""

NEEDLE = list(b"There is one needle in this haystack: ")
TEXT = list(b"Rows of a matrix do not know each other. ")


def prompts_of(name, lengths):
    return random_prompts(name, lengths, VOCABULARY)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A server with the plug-in, a stock one beside it, and the trainer of both."""
    place = tmp_path_factory.mktemp("served")
    folder = checkpoint(place / "model", vocab_size=VOCABULARY)
    servers = [
        Server(folder, place / "plugin.log", "--max-num-seqs", "64"),
        # Compiling would take the stock one a minute.
        Server(folder, place / "stock.log", "--enforce-eager", plugin=False),
    ]
    try:
        trainer = Trainer.of(folder)
        for server in servers:
            server.wait()
        yield SimpleNamespace(server=servers[0], stock=servers[1], trainer=trainer)
    finally:
        for server in servers:
            server.close()


def test_completions_over_http_are_the_trainers(run):
    prompts = prompts_of("http", [3 + 29 * i for i in range(24)])
    found = run.server.completions(prompts, range(24), at_once=24)
    assert differing(found, run.trainer.scored(prompts, found)) == 0


def test_a_stock_server_differs(run):
    # The control of this file: the same comparison finds what a stock server does.
    prompts = prompts_of("http", [3 + 29 * i for i in range(24)])
    found = run.stock.completions(prompts, range(24), at_once=24)
    count = sum(len(tokens) for tokens, _ in found)
    assert differing(found, run.trainer.scored(prompts, found)) > 0.9 * count


def test_a_needle_is_the_same_in_every_haystack(run):
    draw = Random("haystacks")
    alone = run.server.completion(NEEDLE, seed=7, new=48)
    assert differing(alone, run.trainer.scored([NEEDLE], alone)) == 0
    for trial in range(6):
        count = draw.randint(8, 96)
        place = draw.randrange(count)
        hay = prompts_of(f"hay {trial}", [draw.randint(16, 1024) for _ in range(count)])
        hay[place] = NEEDLE
        seeds = [7 if i == place else 100 + i for i in range(count)]
        found = run.server.completions(hay, seeds, at_once=count, new=48)
        assert differing([found[place]], alone) == 0
        assert differing(found, run.trainer.scored(hay, found)) == 0


def test_a_prefix_is_the_same_computed_and_from_the_cache(run):
    head = TEXT * 24
    prompts = [head + tail for tail in prompts_of("ends", (1, 5, 16, 31, 64, 200))]
    first = run.server.completions(prompts, range(6), at_once=1)
    assert differing(first, run.trainer.scored(prompts, first)) == 0
    for at_once in (1, 6):
        again = run.server.completions(prompts, range(6), at_once=at_once)
        assert differing(again, first) == 0
    # The completion itself as the prompt of what follows it.
    longer = [prompt + tokens for prompt, (tokens, _) in zip(prompts, first)]
    found = run.server.completions(longer, range(6), at_once=6)
    assert differing(found, run.trainer.scored(longer, found)) == 0


def test_one_request_is_as_many_at_once(run):
    prompts = prompts_of("many", [10 + (53 * i) % 700 for i in range(32)])
    one = run.server.completions(prompts, range(32), at_once=1, new=16)
    for at_once in (5, 32):
        many = run.server.completions(prompts, range(32), at_once=at_once, new=16)
        assert differing(many, one) == 0


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7, "top_p": 0.9, "top_k": 50}, {"min_p": 0.1}], ids=str
)
def test_sampling_options_over_http(run, sampling):
    prompts = prompts_of("sampled", [5, 50, 500])
    found = run.server.completions(prompts, range(3), at_once=3, **sampling)
    assert differing(found, run.trainer.scored(prompts, found, **sampling)) == 0


def test_samples_of_one_request(run):
    (prompt,) = prompts_of("several", [100])
    body = {
        "prompt": prompt, "max_tokens": 16, "n": 4, "seed": 5, "logprobs": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    status, found = run.server.post("/v1/completions", body)
    assert status == 200, found
    choices = found["choices"]
    drawn = [(each["token_ids"], each["logprobs"]["token_logprobs"]) for each in choices]
    assert len({tuple(tokens) for tokens, _ in drawn}) == 4
    assert differing(drawn, run.trainer.scored([prompt] * 4, drawn)) == 0


def test_chat_completions(run):
    body = {
        "messages": [{"role": "user", "content": "A rose"}], "max_tokens": 16, "seed": 3,
        "logprobs": True, "ignore_eos": True, "return_token_ids": True, "temperature": 1.0,
    }  # fmt: skip
    status, found = run.server.post("/v1/chat/completions", body)
    assert status == 200, found
    (choice,) = found["choices"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    drawn = [(choice["token_ids"], logprobs)]
    assert differing(drawn, run.trainer.scored([found["prompt_token_ids"]], drawn)) == 0


REFUSED = (
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"7": 2.0}},
    {"bad_words": ["a"]},
    {"allowed_token_ids": [5, 6, 7]},
    {"min_tokens": 4},
    {"prompt_logprobs": 1},
    {"echo": True},
    {"structured_outputs": {"regex": "[ab]+"}},
    {"response_format": {"type": "json_object"}},
)


@pytest.mark.parametrize("option", REFUSED, ids=str)
def test_what_is_not_covered_is_a_bad_request(run, option):
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "logprobs": 0, **option}
    status, found = run.server.post("/v1/completions", body)
    assert status == 400 and "rl_consistency" in str(found), (status, found)
    # The server goes on.
    assert len(run.server.completion([5, 6, 7], seed=1)[0][0]) == 24
