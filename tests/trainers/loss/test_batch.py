import dataclasses
import math

import pytest
import torch

from rl_consistency.trainers.losses import LossConfig, TokenBatch, per_token


def fields_of(lengths, ids, **changes):
    n = sum(lengths)
    values = {
        "logprobs": torch.linspace(-1, -2, n),
        "old_logprobs": torch.linspace(-1, -2, n),
        "advantages": torch.ones(n),
        "sequence_ids": per_token(torch.tensor(ids), lengths),
        "lengths": lengths,
    }
    return values | changes


def test_a_batch_keeps_what_it_was_given():
    batch = TokenBatch(**fields_of([2, 0, 1], [3, 4, 9]))
    assert batch.sequence_ids.tolist() == [3, 3, 9]
    assert batch.reference_logprobs is None and batch.entropy is None


def test_a_batch_is_frozen():
    batch = TokenBatch(**fields_of([1], [0]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.lengths = [2]  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"old_logprobs": torch.zeros(3, dtype=torch.bfloat16)},
        {"advantages": torch.zeros(3, dtype=torch.float64)},
        {"sequence_ids": torch.zeros(3, dtype=torch.int32)},
    ],
)
def test_a_wrong_dtype_is_named(change):
    with pytest.raises(TypeError, match=next(iter(change))):
        TokenBatch(**fields_of([2, 1], [0, 1], **change))


@pytest.mark.parametrize("name", ["logprobs", "advantages", "reference_logprobs", "entropy"])
def test_a_wrong_shape_is_named(name):
    with pytest.raises(ValueError, match=name):
        TokenBatch(**fields_of([2, 1], [0, 1], **{name: torch.zeros(2)}))


@pytest.mark.parametrize("ids", [[1, 1, 0], [0, 1, 1], [0, 0, 0]])
def test_sequences_out_of_logical_order_are_refused(ids):
    with pytest.raises(ValueError, match="Sort the sequences"):
        TokenBatch(**fields_of([2, 1], [0, 1], sequence_ids=torch.tensor(ids)))


def test_a_batch_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one scored token"):
        TokenBatch(**fields_of([0, 0], [0, 1]))


def test_per_token_repeats_each_value_and_refuses_another_count():
    assert per_token(torch.tensor([0.5, -0.5]), [2, 1]).tolist() == [0.5, 0.5, -0.5]
    with pytest.raises(ValueError, match="expected 3 values"):
        per_token(torch.zeros(2), [1, 1, 1])


@pytest.mark.parametrize(
    "wrong", [{"clip_low": 1.0}, {"clip_high": -0.1}, {"kl_coefficient": math.nan}]
)
def test_a_loss_config_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LossConfig(**wrong)
