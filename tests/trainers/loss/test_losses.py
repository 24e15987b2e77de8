"""The batch that losses read, the losses, and what they are the same under."""

import math

import pytest
import torch

from rl_consistency.parity.bytes import same_bytes
from rl_consistency.trainers.losses import (
    TokenBatch,
    mean_metrics,
    merge_outputs,
    per_token,
    policy_loss,
    token_weights,
    value_loss,
    with_balance,
)


def fields_of(lengths, **changes):
    n = sum(lengths)
    values = {
        "logprobs": torch.linspace(-1, -2, n),
        "old_logprobs": torch.linspace(-1, -2, n),
        "advantages": torch.ones(n),
        "lengths": lengths,
    }
    return values | changes


@pytest.mark.parametrize(
    "change",
    [
        {"old_logprobs": torch.zeros(3, dtype=torch.bfloat16)},
        {"advantages": torch.zeros(3, dtype=torch.float64)},
    ],
)
def test_a_wrong_dtype_is_named(change):
    with pytest.raises(TypeError, match=next(iter(change))):
        TokenBatch(**fields_of([2, 1], **change))


@pytest.mark.parametrize("name", ["logprobs", "advantages", "reference_logprobs", "entropy"])
def test_a_wrong_shape_is_named(name):
    with pytest.raises(ValueError, match=name):
        TokenBatch(**fields_of([2, 1], **{name: torch.zeros(2)}))


def test_a_batch_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one scored token"):
        TokenBatch(**fields_of([0, 0]))


def test_per_token_repeats_each_value_and_refuses_another_count():
    assert per_token(torch.tensor([0.5, -0.5]), [2, 1]).tolist() == [0.5, 0.5, -0.5]
    with pytest.raises(ValueError, match="expected 3 values"):
        per_token(torch.zeros(2), [1, 1, 1])


LENGTHS = [3, 1, 17, 8, 33, 2, 5]


def batch_of(lengths, *, drift=0.3):
    generator = torch.Generator().manual_seed(0)
    n = sum(lengths)

    def normal(count=n):
        return torch.randn(count, generator=generator)

    old = -normal().abs() * 2.0
    return TokenBatch(
        logprobs=old + drift * normal(),
        old_logprobs=old,
        reference_logprobs=old + drift * normal(),
        entropy=normal().abs(),
        advantages=per_token(normal(len(lengths)), lengths),
        lengths=lengths,
    )


def one_token(logprob, old, advantage, **changes):
    values = {
        "logprobs": torch.tensor([logprob], requires_grad=True),
        "old_logprobs": torch.tensor([old]),
        "advantages": torch.tensor([advantage]),
        "lengths": [1],
    }
    return TokenBatch(**(values | changes))


def micro_batch(batch, first, last):
    """The sequences first <= i < last of a batch."""
    start = sum(batch.lengths[:first])
    end = start + sum(batch.lengths[first:last])
    cut = {k: v[start:end] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return TokenBatch(**cut, lengths=batch.lengths[first:last])


def weights_of(lengths, kind):
    counts = {
        "num_sequences_global": len(LENGTHS),
        "max_tokens": 40,
        "total_tokens": sum(LENGTHS),
    }
    return token_weights(lengths, kind, **counts)


def loss_and_gradient(batch, cuts, kind, weights=weights_of):
    """Gradient bytes and merged output, the batch cut into consecutive groups of `cuts`
    sequences."""
    config = {"clip_high": 0.28, "kl_coefficient": 0.05, "entropy_coefficient": 0.01}
    outputs, gradients, first = [], [], 0
    for size in cuts:
        part = micro_batch(batch, first, first + size)
        leaf = part.logprobs.clone().requires_grad_()
        part = TokenBatch(**{**vars(part), "logprobs": leaf})
        output = policy_loss(part, weights(part.lengths, kind), **config)
        output.loss.backward()
        outputs.append(output)
        gradients.append(leaf.grad)
        first += size
    return torch.cat(gradients), merge_outputs(outputs)


def test_weights_are_the_written_fractions():
    counts = {"num_sequences_global": 4, "max_tokens": 8, "total_tokens": 16}
    assert token_weights([2, 1], "grpo", **counts).tolist() == [0.125, 0.125, 0.25]
    assert token_weights([2, 1], "dr_grpo", **counts).tolist() == [1 / 32] * 3
    assert token_weights([2, 1], "dapo", **counts).tolist() == [1 / 16] * 3


def test_a_dropped_sequence_weighs_nothing_and_the_others_are_unmoved():
    keep = torch.tensor([True, False, True])
    counts = {"num_sequences_global": 3, "total_tokens": 6, "max_tokens": 2}
    assert token_weights([2, 2, 2], "grpo", keep=keep, **counts).tolist() == pytest.approx(
        [1 / 6, 1 / 6, 0, 0, 1 / 6, 1 / 6]
    )


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("grpo", [1 / 6, 1 / 6, 0, 0, 0, 1 / 3]), ("dr_grpo", [1 / 12, 1 / 12, 0, 0, 0, 1 / 12])],
)
def test_the_token_mean_alone_leaves_out_dropped_tokens_as_trl_does(kind, weights):
    """TRL's masked losses of three rows: `mask.sum()` of dapo, `.mean()` over all rows of grpo."""
    given = {"keep": torch.tensor([True, False, True]), "num_sequences_global": 3, "max_tokens": 4}
    found = [token_weights([2, 3, 1], k, total_tokens=3, **given) for k in (kind, "dapo")]
    assert found[0].tolist() == pytest.approx(weights)
    assert found[1].tolist() == pytest.approx([1 / 3, 1 / 3, 0, 0, 0, 1 / 3])
    with pytest.raises(ValueError, match="counts of a whole batch"):
        token_weights([2, 3, 1], kind, total_tokens=2, **given)


def test_equal_logprobs_give_a_ratio_of_exactly_one():
    batch = batch_of(LENGTHS, drift=0.0)
    output = policy_loss(batch, weights_of(LENGTHS, "grpo"))
    assert torch.equal(output.ratio, torch.ones(sum(LENGTHS)))
    assert not output.clipped.any()
    metrics = output.metrics()
    assert metrics["policy/ratio/min"] == metrics["policy/ratio/max"] == 1.0
    assert metrics["policy/kl/k3"] == 0.0 and metrics["policy/clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "slope"),
    [
        (1.5, 2.0, 1.28 * 2.0, 0.0),
        (1.25, 2.0, 1.25 * 2.0, 1.25 * 2.0),
        (0.5, 2.0, 0.5 * 2.0, 0.5 * 2.0),
        (0.5, -2.0, 0.8 * -2.0, 0.0),
        (0.9, -2.0, 0.9 * -2.0, 0.9 * -2.0),
        (1.5, -2.0, 1.5 * -2.0, 1.5 * -2.0),
    ],
)
def test_the_surrogate_clips_each_side_at_its_own_bound(ratio, advantage, surrogate, slope):
    batch = one_token(math.log(ratio), 0.0, advantage)
    output = policy_loss(batch, torch.ones(1), clip_low=0.2, clip_high=0.28)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-surrogate, rel=1e-6)
    assert batch.logprobs.grad.item() == pytest.approx(-slope, rel=1e-6)
    assert output.clipped.item() is (slope == 0.0)


def test_kl_and_entropy_are_the_written_formulas():
    extra = {"reference_logprobs": torch.tensor([-1.5]), "entropy": torch.tensor([0.5])}
    batch = one_token(-1.0, -1.0, 0.0, **extra)
    coefficients = {"kl_coefficient": 2.0, "entropy_coefficient": 0.25}
    output = policy_loss(batch, torch.full((1,), 0.5), **coefficients)
    output.loss.backward()
    k3 = math.exp(-0.5) + 0.5 - 1.0
    assert output.kl_k1.item() == 0.5
    assert output.kl_k3.item() == pytest.approx(k3, rel=1e-5)
    assert output.loss.item() == pytest.approx(0.5 * (2.0 * k3 - 0.25 * 0.5), rel=1e-5)
    assert batch.logprobs.grad.item() == pytest.approx(0.5 * 2.0 * (1.0 - math.exp(-0.5)), rel=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("cuts", [[1] * 7, [2, 2, 2, 1], [1, 5, 1], [6, 1]])
def test_gradient_and_merged_loss_are_the_same_bytes_for_every_cut(kind, cuts):
    batch = batch_of(LENGTHS)
    whole_gradient, whole = loss_and_gradient(batch, [7], kind)
    gradient, merged = loss_and_gradient(batch, cuts, kind)
    assert same_bytes(gradient, whole_gradient)
    assert same_bytes(merged.terms, whole.terms) and same_bytes(merged.loss, whole.loss)
    assert whole.clipped.any() and not whole.clipped.all()


def test_mutant_weights_from_local_counts_are_seen():
    def local(lengths, kind):
        counts = {"max_tokens": 40, "total_tokens": sum(lengths)}
        return token_weights(lengths, kind, num_sequences_global=len(lengths), **counts)

    batch = batch_of(LENGTHS)
    whole, _ = loss_and_gradient(batch, [7], "grpo", weights=local)
    cut, _ = loss_and_gradient(batch, [2, 5], "grpo", weights=local)
    assert not same_bytes(whole, cut)


def test_mutant_adding_the_losses_of_micro_batches_is_seen():
    batch = batch_of([64, 96, 33, 80] * 3)
    counts = {"num_sequences_global": 12, "max_tokens": 96, "total_tokens": sum(batch.lengths)}
    weights = token_weights(batch.lengths, "dapo", **counts)
    whole = policy_loss(batch, weights).loss
    outputs, start = [], 0
    for first, last in [(0, 3), (3, 8), (8, 12)]:
        part = micro_batch(batch, first, last)
        outputs.append(policy_loss(part, weights[start : start + sum(part.lengths)]))
        start += sum(part.lengths)
    added = outputs[0].loss + outputs[1].loss + outputs[2].loss
    assert not same_bytes(added, whole)
    assert same_bytes(merge_outputs(outputs).loss, whole)


def test_a_nan_logprob_reaches_the_loss():
    output = policy_loss(one_token(math.nan, -1.0, 1.0), torch.ones(1))
    assert math.isnan(output.loss.item()) and math.isnan(output.metrics()["policy/ratio/mean"])


def test_a_coefficient_without_its_tensor_is_refused():
    batch = one_token(-1.0, -1.0, 1.0)
    with pytest.raises(ValueError, match="no reference_logprobs"):
        policy_loss(batch, torch.ones(1), kl_coefficient=0.1)
    with pytest.raises(ValueError, match="no entropy"):
        policy_loss(batch, torch.ones(1), entropy_coefficient=0.1)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="weights must be fp32"):
        policy_loss(one_token(-1.0, -1.0, 1.0), torch.ones(2))


@pytest.mark.parametrize(
    ("value", "returned", "clip", "loss", "gradient", "clipped"),
    [
        (0.5, 1.0, 0.25, 0.5 * 0.75**2, 0.0, True),
        (0.5, -1.0, 0.25, 0.5 * 1.5**2, 1.5, False),
        (-0.5, -1.0, 0.25, 0.5 * 0.75**2, 0.0, True),
        (0.125, 1.0, 0.25, 0.5 * 0.875**2, -0.875, False),
        (0.25, 1.0, 0.25, 0.5 * 0.75**2, -0.75, False),
        (0.5, 1.0, None, 0.5 * 0.5**2, -0.5, False),
    ],
    ids=["too far up", "back", "too far down", "inside", "border", "no clip"],
)
def test_the_value_loss_worked_by_hand(value, returned, clip, loss, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    given = values, torch.zeros(1), torch.tensor([returned]), torch.ones(1)
    output = value_loss(*given, clip=clip)
    output.loss.backward()
    assert (output.loss.item(), values.grad.tolist()) == (loss, [gradient])
    assert output.clipped.tolist() == [clipped] and output.clip_fraction == clipped


def test_no_value_inside_the_clip_loses_its_gradient_to_rounding():
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 4096, generator=generator)
    values = (old + 0.15 * torch.rand(4096, generator=generator)).requires_grad_()
    output = value_loss(values, old, returns, torch.ones(4096), clip=0.2)
    output.loss.backward()
    assert not output.clipped.any() and (values.grad != 0).all()


def test_the_value_loss_of_parts_is_that_of_the_whole_by_bytes():
    generator = torch.Generator().manual_seed(1)
    given = list(torch.randn(4, 69, generator=generator))
    whole = value_loss(*given, clip=0.2)
    parts = [value_loss(*cut, clip=0.2) for cut in zip(*(g.split([3, 1, 50, 15]) for g in given))]
    merged = merge_outputs(parts)
    assert same_bytes(merged.loss, whole.loss) and torch.equal(merged.clipped, whole.clipped)
    assert 0 < whole.clip_fraction < 1


def test_values_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        value_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(2), clip=0.2)


def test_metrics_of_updates_of_uneven_lengths_are_means_over_all_tokens_and_extremes_of_all():
    """One update of 2 tokens, one of 18: a mean of their means would be far off."""
    n, few = 20, slice(0, 2)
    columns = {name: torch.zeros(n) for name in ("logprobs", "old_logprobs", "reference_logprobs")}
    columns |= {"advantages": torch.ones(n), "entropy": torch.ones(n)}
    columns["logprobs"][few], columns["logprobs"][2:4] = 0.5, -0.25
    columns["reference_logprobs"][few], columns["entropy"][few] = -0.4, 3.0

    def update(tokens, lengths, balance):
        batch = TokenBatch(**{name: c[tokens] for name, c in columns.items()}, lengths=lengths)
        output = policy_loss(batch, torch.ones(sum(lengths)) / sum(lengths))
        return with_balance(output, torch.full((len(lengths),), balance), 0.0)

    updates = [update(few, [2], 3.0), update(slice(2, n), [9, 9], 1.0)]
    found, losses = mean_metrics(updates), [u.loss.item() for u in updates]
    log_ratio = columns["logprobs"].double()
    to_reference = columns["reference_logprobs"].double() - log_ratio
    wanted = {
        "policy/entropy": 24 / 20,
        "policy/clip_fraction": 2 / 20,
        "policy/balance": 5 / 3,
        "policy/ratio/mean": log_ratio.exp().mean().item(),
        "policy/kl/rollout": (log_ratio.expm1() - log_ratio).mean().item(),
        "policy/kl/k1": -to_reference.mean().item(),
        "policy/kl/k3": (to_reference.expm1() - to_reference).mean().item(),
        "policy/ratio/min": math.exp(-0.25),
        "policy/ratio/max": math.exp(0.5),
        "loss": sum(losses) / 2,
    }
    assert found == pytest.approx(wanted, abs=1e-7)
    assert mean_metrics(updates[:1]) == updates[0].metrics()


@pytest.mark.parametrize("count", ["num_sequences_global", "total_tokens", "max_tokens"])
def test_a_count_that_is_not_of_the_whole_batch_is_refused(count):
    whole = {"num_sequences_global": 2, "total_tokens": 5, "max_tokens": 3}
    assert token_weights([2, 3], "dapo", **whole).sum() == 1
    for kind in ("grpo", "dr_grpo", "dapo"):
        with pytest.raises(ValueError, match="counts of a whole batch"):
            token_weights([2, 3], kind, **whole | {count: whole[count] - 1})
