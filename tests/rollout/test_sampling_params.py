"""SamplingParams refuses what the sampler cannot mean."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rl_consistency.rollout.sampling_params import MIN_TEMPERATURE, SamplingParams


def test_params_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        SamplingParams(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


def test_stop_tokens_become_a_tuple_so_that_params_stay_hashable():
    params = SamplingParams(stop_token_ids=[3, 5])
    assert params.stop_token_ids == (3, 5)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(3, 5)))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_numbers_of_numpy_are_numbers():
    given = {"n": np.int64(4), "top_k": np.uint8(3), "seed": np.uint64(2**64 - 1)}
    given |= {"temperature": np.float32(0.5), "min_p": np.float64(0.1), "ignore_eos": np.True_}
    params = SamplingParams(**given, stop_token_ids=np.array([3, 5]))
    same = {"n": 4, "top_k": 3, "seed": 2**64 - 1, "temperature": 0.5, "min_p": 0.1}
    plain = SamplingParams(**same, ignore_eos=True, stop_token_ids=(3, 5))
    assert params == plain and repr(params) == repr(plain)


def test_the_bounds_belong_to_the_ranges():
    SamplingParams(temperature=MIN_TEMPERATURE, top_k=2**31 - 1, top_p=2.0**-126, min_p=1)
    SamplingParams(temperature=torch.finfo(torch.float32).max, top_p=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-60),  # would be 0, that is greedy, once rounded to fp32
        ("temperature", 1e39),  # infinite in fp32
        ("temperature", 10**400),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1e-50),  # 0 in fp32
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", "12"),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.5,)),
        ("stop_token_ids", 7),
        ("ignore_eos", 1),
        ("stop", "</s>"),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", 3),
        ("stop", ("a\ufffd",)),  # also written for bytes that are no text
        ("speculation", -1),
        ("greedy_logprobs", "raw"),
        ("greedy_logprobs", "full"),  # at temperature 1
        ("greedy_logprobs", None),
        ("speculation", 8),
        ("speculation", True),
    ],
)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_how_top_k_is_off_is_told():
    with pytest.raises(ValueError, match=r"top_k \(0 is off\) must be an integer in .*, got -1"):
        SamplingParams(top_k=-1)
