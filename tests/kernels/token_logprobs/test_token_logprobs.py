import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.cases.token_logprobs import sampling_in_turn, targets_inside
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.op import (
    IGNORED,
    lm_head_logits,
    token_logprobs,
)
from rl_consistency.parity.bytes import same_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def where():
    """Device, rows, hidden size, vocabulary and the scale of the hidden states."""
    return "cpu", 80, 64, 203, 0.5


def operands(where, dtype=torch.float32):
    device, rows, width, vocabulary, scale = where
    hidden = probe((rows, width), dtype, scale=scale).to(device)
    weight = probe((vocabulary, width), dtype, seed=1, scale=0.5 * width**-0.5).to(device)
    generator = torch.Generator().manual_seed(2)
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=generator).to(device)


def uniform(hidden, **settings):
    return SamplingRows.uniform(len(hidden), device=hidden.device, **settings)


def mixed_rows(hidden, weight, targets):
    """Several settings, each keeping the row's target in its support."""
    settings = ({}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-4})
    rows = sampling_in_turn(settings, len(hidden), hidden.device)
    return rows, targets_inside(hidden, weight, targets, rows)


def results(hidden, weight, targets, rows, **options):
    """Outputs, and the gradient of hidden under cotangents that are functions of the row."""
    hidden = hidden.detach().clone().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, targets, rows, **options)
    seed = hidden.detach().float()
    torch.autograd.backward([logprobs, entropy], [seed[:, 0] + 1.0, seed[:, 1]])
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "dhidden": hidden.grad}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("truncated", [False, True])
def test_rollout_reads_the_same_bytes_from_its_logits(truncated, dtype, where):
    hidden, weight, targets = operands(where, dtype)
    rows = uniform(hidden, temperature=0.7)
    if truncated:
        rows, targets = mixed_rows(hidden, weight, targets)
    logprobs, entropy = token_logprobs(hidden, weight, targets, rows)
    for size in (1, 8, 64, len(hidden)):
        for start in range(0, len(hidden), size):
            span = slice(start, start + size)
            one = distribution(lm_head_logits(hidden[span], weight), rows.select(span))
            assert same_bytes(one.logprobs_of(targets[span]), logprobs[span])
            assert same_bytes(one.entropy(), entropy[span])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unscored_rows_are_zero_and_change_nothing(dtype, where):
    hidden, weight, targets = operands(where, dtype)
    rows = uniform(hidden)
    whole = results(hidden, weight, targets, rows)
    scored = torch.arange(len(hidden), device=hidden.device) % 3 == 0
    some = results(hidden, weight, targets.masked_fill(~scored, IGNORED), rows)
    for name, value in some.items():
        assert same_bytes(value[scored], whole[name][scored])
        assert not value[~scored].any()


def test_targets_outside_the_vocabulary_are_refused(where):
    hidden, weight, targets = operands(where)
    for bad in (len(weight), -1):
        with pytest.raises(
            ValueError, match=rf"targets span .* the LM head has {len(weight)} rows"
        ):
            token_logprobs(hidden, weight, torch.full_like(targets, bad), uniform(hidden))


def test_greedy_rows_have_logprob_zero_and_no_gradient(where):
    hidden, weight, _ = operands(where)
    best = lm_head_logits(hidden, weight).argmax(1)
    out = results(hidden, weight, best, uniform(hidden, temperature=0.0))
    assert not any(value.any() for value in out.values())


def test_a_target_outside_the_support_is_minus_infinity(where):
    hidden, weight, _ = operands(where)
    worst = lm_head_logits(hidden, weight).argmin(1)
    logprobs, entropy = token_logprobs(hidden, weight, worst, uniform(hidden, top_k=2))
    assert (logprobs == -torch.inf).all() and torch.isfinite(entropy).all()


def test_hidden_alone_may_need_a_gradient(where):
    hidden, weight, targets = operands(where)
    hidden.requires_grad_()
    token_logprobs(hidden, weight, targets, uniform(hidden))[0].sum().backward()
    assert weight.grad is None and hidden.grad.any()


def test_bad_operands_are_refused(where):
    hidden, weight, targets = operands(where)
    rows = uniform(hidden)
    with pytest.raises(ValueError, match=r"targets \(79,\) torch.int64 for hidden \(80, 64\)"):
        token_logprobs(hidden, weight, targets[1:], rows)
    with pytest.raises(ValueError, match=r"torch.int32 .*one int64 target per row"):
        token_logprobs(hidden, weight, targets.int(), rows)
    for chunk in (0, 8, 24):
        with pytest.raises(ValueError, match=f"chunk_tokens {chunk}; a multiple of 16"):
            token_logprobs(hidden, weight, targets, rows, chunk_tokens=chunk)
    with pytest.raises(ValueError, match=r"hidden \(80, 63\) does not fit the LM head \(203, 64\)"):
        lm_head_logits(hidden[:, 1:], weight)
    with pytest.raises(ValueError, match=r"hidden \(80, 63\) does not fit the LM head \(203, 64\)"):
        token_logprobs(hidden[:, 1:], weight, targets, rows)
    for count in (79, 81):
        with pytest.raises(ValueError, match=f"{count} sampling parameters for 80 rows"):
            token_logprobs(hidden, weight, targets, SamplingRows.uniform(count), chunk_tokens=16)
    with pytest.raises(TypeError, match="weight is torch.bfloat16 but hidden is torch.float32"):
        token_logprobs(hidden, weight.bfloat16(), targets, rows)
