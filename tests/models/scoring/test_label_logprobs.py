"""Scores at a trainer's labels are `token_logprobs`, in the places of the labels."""

import pytest
import torch

from rl_consistency.models.packing import pack_padded, packed_inputs
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import label_logprobs, token_logprobs
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset


@pytest.fixture(scope="module")
def model():
    model = build_preset("tiny-qwen3")
    with patch(model):
        yield model


@pytest.fixture
def batch():
    """Ids, mask and labels: two rows padded left and right, of which 3 and 2 tokens are labels."""
    ids = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :5], labels[1, :4] = -100, -100
    return ids, mask, labels


def labelled(model, ids, mask, labels, **options):
    return label_logprobs(model, pack_padded(ids, mask), ids, labels, **options)


def test_they_are_those_of_token_logprobs_where_the_labels_are(model, batch):
    ids, mask, labels = batch
    sampling = SamplingParams(temperature=0.7)
    found = labelled(model, ids, mask, labels, sampling=sampling)
    right = token_logprobs(
        model, ids, attention_mask=mask, loss_mask=labels != -100, sampling=sampling
    )
    assert torch.equal(found.mask, (labels != -100)[:, 1:])
    assert torch.equal(found.logprobs[found.mask], right.logprobs)
    assert torch.equal(found.entropy[found.mask], right.entropy)
    assert not found.logprobs[~found.mask].any() and not found.entropy[~found.mask].any()


def test_the_first_token_of_each_sequence_is_never_scored(model, batch):
    ids, mask, _ = batch
    found = labelled(model, ids, mask, ids.masked_fill(mask == 0, -100))
    assert found.mask.tolist() == [[False, False, *[True] * 5], [*[True] * 5, False, False]]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, 8)
    packed = packed_inputs(ids, None, positions, {})
    assert label_logprobs(model, packed, ids, ids).mask[0].tolist() == [
        *[True, True, False, True, True, True, True]
    ]


def test_the_most_likely_label_is_that_of_the_largest_logit(model, batch):
    ids, _, _ = batch
    row = ids[1:, :5].clone()
    best = int(model(row).logits[0, 3].argmax())
    row[0, 4] = best
    labels = torch.full_like(row, -100)
    labels[0, 2:] = row[0, 2:]
    found = labelled(model, row, None, labels, most_likely=True)
    greedy = model(row).logits[0, 1:4].argmax(1) == row[0, 2:]
    assert found.most_likely[0].tolist() == [False, *greedy.tolist()]
    assert found.most_likely[0, 3] and not found.most_likely[0].all()
    assert labelled(model, row, None, labels).most_likely is None


def test_without_a_label_the_scores_are_a_differentiable_zero(model, batch):
    ids, mask, _ = batch
    found = labelled(model, ids, mask, torch.full_like(ids, -100))
    assert not found.mask.any() and not found.logprobs.any()
    model.zero_grad()
    found.logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad()


def test_labels_that_are_other_tokens_are_refused(model, batch):
    ids, mask, labels = batch
    labels[0, 6] = (ids[0, 6] + 1) % 300
    with pytest.raises(ValueError, match="labels differ from input_ids"):
        labelled(model, ids, mask, labels)


def test_sequences_of_one_token_give_a_differentiable_zero(model):
    ids, mask = torch.tensor([[3, 9], [9, 4]]), torch.tensor([[1, 0], [0, 1]])
    found = labelled(model, ids, mask, ids.masked_fill(mask == 0, -100), most_likely=True)
    assert not found.mask.any() and not found.most_likely.any()
    assert found.logprobs.shape == (2, 1) and not found.logprobs.any()
    found.logprobs.sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
