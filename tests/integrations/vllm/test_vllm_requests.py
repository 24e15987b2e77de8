"""What vLLM's requests ask for, and that what is not covered is refused by its name."""

import pytest

from tests.integrations.vllm.fake_requests import (
    DEFAULTS,
    SEAMS,
    EngineCore,
    InputProcessor,
    SamplingParams,
    children,
    request_of,
)

REFUSED = {
    "presence_penalty": (0.5, -0.5),
    "frequency_penalty": (0.5,),
    "repetition_penalty": (1.05, 0.9),
    "min_tokens": (1,),
    "prompt_logprobs": (0, 5),
    "logprob_token_ids": ([7],),
    "structured_outputs": (object(),),
    "logit_bias": ({3: 1.0},),
    "allowed_token_ids": ([3],),
    "bad_words": (["no"],),
    "_bad_words_token_ids": ([[5]],),
    "thinking_token_budget": (0, 9),
}
"""The other fields have any value."""

ANY = {
    **{"n": 4, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "seed": 5},
    **{"logprobs": 3, "extra_args": {"prompt_id": 3}, "stop": ["x"], "stop_token_ids": [4]},
    **{"ignore_eos": True, "max_tokens": None, "repetition_detection": object()},
    **{"_eos_token_id": 3, "_all_stop_token_ids": {3}, "output_text_buffer_length": 3},
    **{"output_kind": 2, "detokenize": False, "skip_special_tokens": False},
    **{"spaces_between_special_tokens": False, "flat_logprobs": True, "skip_clone": True},
    **{"include_stop_str_in_output": True, "routed_experts_prompt_start": 1},
    "skip_reading_prefix_cache": True,
}


@pytest.fixture
def requests():
    from rl_consistency.integrations.vllm import requests

    return requests


@pytest.fixture
def stock(monkeypatch):
    """vLLM's seams without the plug-in's refusals."""
    for (owner, name), seam in SEAMS.items():
        monkeypatch.setattr(owner, name, seam)


@pytest.fixture
def installed(requests, stock):
    for _ in range(2):
        requests.install_refusals()


def test_each_field_of_vllms_sampling_params_is_known():
    assert {*REFUSED, *ANY} == {*DEFAULTS} and not {*REFUSED} & {*ANY}


@pytest.mark.parametrize("field, value", [(k, v) for k, values in REFUSED.items() for v in values])
def test_a_field_that_is_not_covered_is_refused_by_name(requests, field, value):
    with pytest.raises(ValueError, match=f"^{field}=.* is not covered by rl_consistency"):
        requests.asked(SamplingParams(**{field: value}))


@pytest.mark.parametrize("field", ANY)
def test_a_field_that_is_covered_may_have_any_value(requests, field):
    requests.asked(SamplingParams(**{field: ANY[field]}))


@pytest.mark.parametrize("empty", [{"logit_bias": {}}, {"bad_words": None}, {"stop": None}])
def test_nothing_in_a_field_asks_for_nothing(requests, empty):
    requests.asked(SamplingParams(**empty))


def test_a_field_of_a_newer_release_is_refused_unless_it_keeps_its_default(requests):
    class Newer(SamplingParams):
        __struct_fields__ = (*DEFAULTS, "temper")

        def __init__(self, temper=1, **given):
            super().__init__(temper=temper, **given)

    requests.asked(Newer())
    with pytest.raises(ValueError, match=r"^temper=2 is not covered.* Leave it at 1\."):
        requests.asked(Newer(temper=2))


def test_what_is_asked_for_is_what_our_engine_takes(requests):
    given = SamplingParams(
        temperature=0.5,
        top_k=-1,
        top_p=0.75,
        min_p=0.25,
        seed=2**63 - 1,
        extra_args={"prompt_id": 2**64 - 1, "sample_index": 7, "kv_transfer_params": {}},
    )
    params, prompt_id, index = requests.asked(given, 4)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 0, 0.75, 0.25)
    assert (params.seed, prompt_id, index) == (2**63 - 1, 2**64 - 1, 7)
    drawn, prompt_id, index = requests.asked(SamplingParams(), 2**64 - 1)
    assert (drawn.seed, prompt_id, index) == (2**64 - 1, 0, 0)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"extra_args": {"prompt_id": -1}}, r"extra_args\['prompt_id'\] must be an integer"),
        ({"extra_args": {"prompt_id": 2**64}}, r"extra_args\['prompt_id'\]"),
        ({"extra_args": {"prompt_id": "3"}}, r"extra_args\['prompt_id'\].* got '3'"),
        ({"extra_args": {"prompt_id": True}}, r"extra_args\['prompt_id'\]"),
        ({"extra_args": {"sample_index": 1.0}}, r"extra_args\['sample_index'\]"),
        ({"extra_args": {"sample_index": 2**32}}, r"extra_args\['sample_index'\]"),
        ({"n": 2, "extra_args": {"sample_index": 2**32 - 1}}, r"extra_args\['sample_index'\]"),
        ({"seed": 3, "extra_args": {"first_seed": 4}}, r"extra_args\['first_seed'\]"),
        ({"seed": 2**32, "extra_args": {"first_seed": 0}}, r"extra_args\['first_seed'\]"),
        ({"extra_args": {"promt_id": 3}}, "extra_args hold promt_id; allowed: prompt_id, "),
        ({"extra_args": {"greedy_logprobs": "all"}}, "greedy_logprobs must be"),
        ({"extra_args": {"greedy_logprobs": "full"}}, "greedy_logprobs.* needs temperature 0"),
        ({"seed": -2}, "seed must be an integer in"),
        ({"seed": 2**63}, "seed must be"),
        ({"seed": 2**63 - 1, "n": 2}, "seed must be"),
        ({"top_p": 1e-50}, "top_p must"),
        ({"top_k": 2**31}, "top_k .* must"),
        ({"temperature": 1e-5}, "temperature must"),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(requests, given, named):
    with pytest.raises(ValueError, match=named):
        requests.asked(SamplingParams(**given))


@pytest.mark.parametrize("field", REFUSED)
def test_the_front_end_and_the_engine_refuse(installed, field):
    params = SamplingParams(**{field: REFUSED[field][0]})
    with pytest.raises(ValueError, match=f"^{field}="):
        InputProcessor().process_inputs("a", [1], params)
    with pytest.raises(ValueError, match=f"^{field}="):
        EngineCore().preprocess_add_request(request_of(params))


@pytest.mark.parametrize("field", ["lora_request", "prompt_embeds", "mm_features"])
def test_what_else_a_request_brings_is_refused(installed, field):
    with pytest.raises(ValueError, match=f"^{field} is not covered"):
        EngineCore().preprocess_add_request(request_of(SamplingParams(), **{field: [object()]}))
    if field == "lora_request":
        with pytest.raises(ValueError, match="^lora_request is not covered"):
            InputProcessor().process_inputs("a", [1], SamplingParams(), lora_request=object())


def test_pooling_requests_are_left_to_vllm(installed):
    request = request_of(None)
    assert EngineCore().preprocess_add_request(request) == (request, 0)


def test_registering_the_models_installs_the_refusals(stock):
    from rl_consistency.integrations.vllm import model

    EngineCore().preprocess_add_request(request_of(SamplingParams(min_tokens=1)))
    model.register_models()
    with pytest.raises(ValueError, match="^min_tokens="):
        EngineCore().preprocess_add_request(request_of(SamplingParams(min_tokens=1)))


@pytest.mark.parametrize("skip_clone", [False, True])
def test_n_completions_are_a_group_of_one_seed(installed, requests, skip_clone):
    extra = {"prompt_id": 6, "sample_index": 2}
    given = SamplingParams(n=3, seed=5, extra_args=extra, skip_clone=skip_clone)
    processed = InputProcessor().process_inputs("a", [1], given).sampling_params
    found = [requests.asked(child) for child in children(processed)]
    assert [(p.seed, prompt_id, index) for p, prompt_id, index in found] == [
        (5, 6, 2 + i) for i in range(3)
    ]
    assert extra == {"prompt_id": 6, "sample_index": 2}
    # Without the plug-in in the front end.
    assert [requests.asked(child)[0].seed for child in children(given)] == [5, 6, 7]


@pytest.mark.parametrize("given", [{"seed": 5}, {"n": 3}])
def test_one_completion_and_drawn_seeds_need_no_common_one(installed, given):
    processed = InputProcessor().process_inputs("a", [1], SamplingParams(**given)).sampling_params
    assert processed.extra_args is None
