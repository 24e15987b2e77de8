"""Bad input is refused before any work, naming the prompt and the remedy."""

import pytest

from rl_consistency.models.patch import patch
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.engine.engines import engine_of, is_idle

VOCAB = 60
PLAIN = SamplingParams()
TWO = [[1], [2]]
STOP_IDS = [PLAIN, SamplingParams(stop_token_ids=(4, VOCAB))]
NO_LIST = "prompt 1 must be a text or a list of integer token ids"
REQUEST = "request_ids"


@pytest.mark.parametrize(
    ("prompts", "params", "options", "message"),
    [
        ([[1, 2], []], PLAIN, {}, "prompt 1 is empty; give it"),
        ([[1, 2], [1, VOCAB]], PLAIN, {}, "prompt 1 has token id 60.*vocabulary of 60"),
        ([[1, 2], [1, -1]], PLAIN, {}, "prompt 1 has token id -1"),
        ([[1, 2], [1.5, 2.0]], PLAIN, {}, NO_LIST),
        ([[1], [[1], [2, 3]]], PLAIN, {}, NO_LIST),
        ([[1], ["a"]], PLAIN, {}, NO_LIST),
        ([[1], 2], PLAIN, {}, NO_LIST),
        ([[1], [2**70]], PLAIN, {}, NO_LIST),
        ([[1], {"prompt": "a"}], PLAIN, {}, f"{NO_LIST}; got a dict"),
        ({"prompt": "a"}, PLAIN, {}, "prompts must be a list of texts or of token ids; got a dict"),
        (iter([[1]]), PLAIN, {}, "prompts must be a list .* token ids; got a list_it"),
        ([[1], [1] * 100], SamplingParams(max_tokens=29), {}, "prompt 1.*context of 128.*shorten"),
        ([[1], [1] * 40], SamplingParams(max_tokens=30), {}, "prompt 1.*18 KV blocks.*num_kv_blo"),
        (TWO, STOP_IDS, {}, "prompt 1 has the stop token id 60, outside .*vocabulary of 60"),
        (TWO, SamplingParams(stop=("x",)), {}, r"prompt 0 has stop strings \('x',\).*give the Rol"),
        (TWO, [PLAIN], {}, "2 prompts but 1 sampling"),
        (TWO, None, {}, "sampling must be a SamplingParams or a sequence of them.* got None"),
        (TWO, {"n": 2}, {}, "sampling must be a SamplingParams or a sequence of them"),
        (TWO, [PLAIN, None], {}, r"sampling\[1\] must be a SamplingParams, got None"),
        (TWO, PLAIN, {"prompt_ids": 3}, "prompt_ids must be a list of integers, got 3"),
        (TWO, PLAIN, {"prompt_ids": [1]}, "2 prompts but 1 prompt_ids"),
        *(
            (TWO, PLAIN, {"prompt_ids": [0, bad]}, r"prompt_ids\[1\] must be an integer in \[0,")
            for bad in (-1, 2**64, "a", 1.0, True)
        ),
        (
            TWO,
            PLAIN,
            {"prompt_ids": [4, 4]},
            "prompt 1 has the prompt id 4 and seed .* of prompt 0",
        ),
        (TWO, PLAIN, {REQUEST: ["a", "a"]}, "request id 'a' is given twice"),
        (TWO, PLAIN, {REQUEST: ["a", 4]}, "request ids must be strings, got 4"),
        (TWO, PLAIN, {REQUEST: ["a"]}, "2 prompts but 1 request_ids"),
        (TWO, PLAIN, {REQUEST: "ab"}, "request_ids must be a list of strings, got 'ab'"),
    ],
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_what_cannot_be_served_is_named_before_any_work(
    model, monkeypatch, call, prompts, params, options, message
):
    engine = engine_of(model, num_kv_blocks=17)
    monkeypatch.setattr(engine, "step", lambda: pytest.fail("work was done before the check"))
    with pytest.raises(ValueError, match=message):
        getattr(engine, call)(prompts, params, **options)
    assert is_idle(engine)


def test_an_option_that_requests_do_not_have_is_refused(model):
    with pytest.raises(TypeError, match="requests have no colour; they have prompt_ids, request_i"):
        engine_of(model).submit([[1]], PLAIN, colour="red")


def test_the_largest_sequence_the_cache_can_hold_is_served(model):
    engine = engine_of(model, num_kv_blocks=17)
    params = SamplingParams(max_tokens=29, ignore_eos=True)  # 40 + 29 - 1 = 17 * 4
    assert len(engine.generate([[1] * 40], params)[0].token_ids) == 29


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        *(
            (name, value, ValueError, f"{name} must be an integer at least 1, got")
            for name, value in (
                *(("kv_block_size", 0), ("num_kv_blocks", 0), ("max_batch_tokens", 0)),
                *(("max_num_seqs", -1), ("prefill_chunk_size", 0), ("kv_block_size", 4.0)),
                *(("max_num_seqs", "4"), ("max_batch_tokens", 0.5)),
            )
        ),
        *(
            ("eos_token_id", eos, ValueError, r"each eos_token_id must be an integer in \[0, 59\]")
            for eos in ([1, 60], "2", 2.0, [2.0], [None], True)
        ),
        ("tokenizer", "gpt2", TypeError, r"tokenizer is 'gpt2', which has no decode\(\)"),
        ("drafter", 3, TypeError, r"drafter is 3, which has no start\(\)"),
    ],
)
def test_a_setting_out_of_range_or_of_another_kind_is_refused(model, name, value, error, message):
    with pytest.raises(error, match=message):
        engine_of(model, **{name: value})


def test_an_unpatched_model_is_refused(tiny_qwen3):
    stock = tiny_qwen3()
    with pytest.raises(ValueError, match="patch"):
        engine_of(stock)
    with patch(stock):
        engine = engine_of(stock)
    with pytest.raises(ValueError, match="patch"):
        engine.generate([[1]], PLAIN)
