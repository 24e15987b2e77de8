"""GSPO and CISPO against formulas in plain torch and TRL's code; no cut of a batch moves a bit."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rl_consistency.kernels.reduction.sums import tree_sum
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.trainers import losses
from rl_consistency.trainers.losses import (
    LOSSES,
    TokenBatch,
    per_token,
    policy_loss,
    sequence_means,
    token_weights,
)

LENGTHS = [3, 1, 17, 8, 33, 2, 5]
COUNTS = {"num_sequences_global": len(LENGTHS), "max_tokens": 40, "total_tokens": sum(LENGTHS)}
CLIPS = {"gspo": (0.02, 0.03), "cispo": (1.0, 0.1), "dapo": (0.1, 0.15)}


def numbers(drift=0.2):
    generator = torch.Generator().manual_seed(4)
    old = -torch.randn(sum(LENGTHS), generator=generator).abs()
    new = old + drift * torch.randn(len(old), generator=generator)
    return new, old, torch.randn(len(LENGTHS), generator=generator)


def ours(kind, cuts=((0, 7),), clips=None, drift=0.2):
    """Gradients and losses of consecutive groups of sequences, and what is clipped."""
    new, old, advantages = numbers(drift)
    low, high = clips or CLIPS[kind]
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    gradients, parts = [], []
    for first, last in cuts:
        place, lengths = slice(offsets[first], offsets[last]), LENGTHS[first:last]
        leaf = new[place].clone().requires_grad_()
        batch = TokenBatch(
            logprobs=leaf,
            old_logprobs=old[place],
            advantages=per_token(advantages[first:last], lengths),
            lengths=lengths,
        )
        weights = token_weights(lengths, LOSSES[kind].weights, **COUNTS)
        surrogate = LOSSES[kind].surrogate
        output = policy_loss(batch, weights, surrogate=surrogate, clip_low=low, clip_high=high)
        output.loss.backward()
        gradients.append(leaf.grad)
        parts.append(output)
    return torch.cat(gradients), losses.merge_outputs(parts)


def plain(kind):
    """The papers' formulas in fp64 with loops over sequences and autograd through all of them."""
    new, old, advantages = (t.double() for t in numbers())
    new.requires_grad_()
    low, high = CLIPS[kind]
    total = torch.zeros((), dtype=torch.float64)
    given = zip(new.split(LENGTHS), old.split(LENGTHS), advantages)
    for logprobs, before, advantage in given:
        ratio = (logprobs - before).exp()
        if kind == "gspo":
            ratio = (logprobs - before).mean().exp()
            bounded = ratio.clamp(1 - low, 1 + high)
            total = total - torch.min(ratio * advantage, bounded * advantage) / len(LENGTHS)
        else:
            weight = ratio.clamp(1 - low, 1 + high).detach()
            total = total - (weight * advantage * logprobs).sum() / sum(LENGTHS)
    total.backward()
    return new.grad, total


@pytest.mark.parametrize("kind", ["gspo", "cispo"])
def test_loss_and_gradient_are_those_of_the_papers_formula(kind):
    gradient, output = ours(kind)
    wanted, loss = plain(kind)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(output.loss.double(), loss.detach(), rtol=2e-6, atol=1e-9)
    assert output.clipped.any() and not output.clipped.all()


@pytest.mark.parametrize("kind", ["gspo", "cispo"])
def test_loss_and_gradient_are_those_of_trl(kind):
    trainer = pytest.importorskip("trl").GRPOTrainer
    new, old, advantages = numbers()
    rows = [t.split(LENGTHS) for t in (new, old)]
    new, old = (torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in rows)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in LENGTHS], batch_first=True)
    new.requires_grad_()
    low, high = CLIPS[kind]
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x)
    level = "sequence" if kind == "gspo" else "token"
    metrics = {"train": defaultdict(list)}
    arguments = SimpleNamespace(delta=None, steps_per_generation=1)
    given = SimpleNamespace(
        **{"aux_loss_enabled": False, "top_entropy_quantile": 1.0, "beta": 0.0, "use_vllm": False},
        **{"off_policy_mask_threshold": None, "_entropy_bonus_enabled": False},
        **{"importance_sampling_level": level, "accelerator": accelerator, "args": arguments},
        loss_type="grpo" if kind == "gspo" else "cispo",
        epsilon_low=low,
        epsilon_high=high if kind == "gspo" else 1 + high,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        _metrics=metrics,
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    nothing = torch.zeros(len(LENGTHS), 0, dtype=torch.long)
    inputs = {"prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": mask.long()}
    inputs |= {"completion_mask": mask, "advantages": advantages, "old_per_token_logps": old}
    loss = trainer._compute_loss(given, None, inputs | {"num_items_in_batch": mask.sum()})
    loss.backward()
    gradient, output = ours(kind)
    torch.testing.assert_close(gradient, new.grad[mask.bool()], rtol=2e-6, atol=1e-8)
    torch.testing.assert_close(output.loss, loss.detach(), rtol=2e-6, atol=1e-8)


CUTS = ([(i, i + 1) for i in range(7)], [(0, 2), (2, 6), (6, 7)])


@pytest.mark.parametrize("kind", ["gspo", "cispo"])
@pytest.mark.parametrize("cuts", CUTS, ids=["each alone", "three"])
def test_no_cut_of_the_batch_moves_a_bit(kind, cuts):
    gradient, whole = ours(kind)
    other, merged = ours(kind, cuts)
    assert same_bytes(gradient, other) and same_bytes(whole.loss, merged.loss)
    assert same_bytes(whole.ratio, merged.ratio)


def test_a_sum_over_a_sequence_in_torchs_order_is_seen(monkeypatch):
    """Negative control: rows are as wide as the longest of a micro-batch."""
    monkeypatch.setattr(losses, "tree_sum", lambda rows: rows.sum(-1))
    lengths = list(range(3, 300, 7))
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1))
    alone = [sequence_means(part, [len(part)]) for part in values.split(lengths)]
    assert not same_bytes(torch.cat(alone), sequence_means(values, lengths))


def test_the_mean_of_a_sequence_is_its_own_tree_sum_and_empty_ones_are_zero():
    values = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
    alone = [tree_sum(part) / len(part) for part in values.split(LENGTHS)]
    found = sequence_means(values, [0, *LENGTHS, 0])
    assert same_bytes(found[1:-1], torch.stack(alone)) and found[0] == found[-1] == 0


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_without_drift_all_ratios_are_exactly_one_and_both_gradients_equal(kind):
    gradient, output = ours(kind, clips=(0.0, 0.0), drift=0.0)
    assert torch.equal(output.ratio, torch.ones(sum(LENGTHS))) and not output.clipped.any()
    assert same_bytes(gradient, ours("grpo", clips=(0.0, 0.0), drift=0.0)[0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    gradient, output = ours("cispo")
    assert output.clipped.any() and bool((gradient[output.clipped] != 0).all())
    clipped = ours("dapo", clips=CLIPS["cispo"])
    assert bool((clipped[0][clipped[1].clipped] == 0).all()) and clipped[1].clipped.any()
