import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.op import (
    IGNORED,
    lm_head_logits,
    token_logprobs,
)
from rl_consistency.parity.bytes import same_bytes

ROWS, H, V = 80, 64, 203


def operands(dtype=torch.float32):
    hidden = probe((ROWS, H), dtype, scale=0.5)
    weight = probe((V, H), dtype, seed=1, scale=0.5 * H**-0.5)
    targets = torch.randint(0, V, (ROWS,), generator=torch.Generator().manual_seed(2))
    return hidden, weight, targets


def mixed_rows(hidden, weight, targets):
    """Several settings, each keeping the row's target in its support."""
    settings = [{}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-4}]
    rows = SamplingRows.concatenate(
        [SamplingRows.uniform(1, **settings[i % len(settings)]) for i in range(ROWS)]
    )
    support = distribution(lm_head_logits(hidden, weight), rows).scaled
    inside = torch.isfinite(support.gather(1, targets[:, None]))[:, 0]
    return rows, torch.where(inside, targets, support.argmax(1))


def results(hidden, weight, targets, rows, **options):
    """Outputs, and the gradient of hidden under cotangents that are functions of the row."""
    hidden = hidden.clone().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, targets, rows, **options)
    seed = hidden.detach().float()
    torch.autograd.backward([logprobs, entropy], [seed[:, 0] + 1.0, seed[:, 1]])
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "dhidden": hidden.grad}


def test_rollout_reads_the_same_bytes_from_its_logits():
    hidden, weight, targets = operands(torch.bfloat16)
    rows, targets = mixed_rows(hidden, weight, targets)
    one = distribution(lm_head_logits(hidden, weight), rows)
    logprobs, entropy = token_logprobs(hidden, weight, targets, rows)
    assert same_bytes(one.logprobs_of(targets), logprobs)
    assert same_bytes(one.entropy(), entropy)


def test_unscored_rows_are_zero_and_change_nothing():
    hidden, weight, targets = operands()
    rows = SamplingRows.uniform(ROWS)
    whole = results(hidden, weight, targets, rows)
    scored = torch.arange(ROWS) % 3 == 0
    some = results(hidden, weight, targets.masked_fill(~scored, IGNORED), rows)
    for name, value in some.items():
        assert same_bytes(value[scored], whole[name][scored])
        assert not value[~scored].any()


def test_greedy_rows_have_logprob_zero_and_no_gradient():
    hidden, weight, _ = operands()
    best = lm_head_logits(hidden, weight).argmax(1)
    out = results(hidden, weight, best, SamplingRows.uniform(ROWS, temperature=0.0))
    assert not any(value.any() for value in out.values())


def test_a_target_outside_the_support_is_minus_infinity():
    hidden, weight, _ = operands()
    worst = lm_head_logits(hidden, weight).argmin(1)
    logprobs, entropy = token_logprobs(hidden, weight, worst, SamplingRows.uniform(ROWS, top_k=2))
    assert (logprobs == -torch.inf).all() and torch.isfinite(entropy).all()


def test_hidden_alone_may_need_a_gradient():
    hidden, weight, targets = operands()
    hidden.requires_grad_()
    token_logprobs(hidden, weight, targets, SamplingRows.uniform(ROWS))[0].sum().backward()
    assert weight.grad is None and hidden.grad.any()


def test_bad_operands_are_refused():
    hidden, weight, targets = operands()
    rows = SamplingRows.uniform(ROWS)
    with pytest.raises(ValueError, match=r"targets \(79,\) torch.int64 for hidden \(80, 64\)"):
        token_logprobs(hidden, weight, targets[1:], rows)
    with pytest.raises(ValueError, match=r"torch.int32 .*one int64 target per row"):
        token_logprobs(hidden, weight, targets.int(), rows)
    for bad in (V, -1):
        with pytest.raises(ValueError, match=r"targets span .* the LM head has 203 rows"):
            token_logprobs(hidden, weight, torch.full_like(targets, bad), rows)
    for chunk in (0, 8, 24):
        with pytest.raises(ValueError, match=f"chunk_tokens {chunk}; a multiple of 16"):
            token_logprobs(hidden, weight, targets, rows, chunk_tokens=chunk)
    with pytest.raises(ValueError, match=r"hidden \(80, 63\) does not fit the LM head \(203, 64\)"):
        lm_head_logits(hidden[:, 1:], weight)
    with pytest.raises(ValueError, match=r"hidden \(80, 63\) does not fit the LM head \(203, 64\)"):
        token_logprobs(hidden[:, 1:], weight, targets, rows)
    for count in (ROWS - 1, ROWS + 1):
        with pytest.raises(ValueError, match=f"{count} sampling parameters for 80 rows"):
            token_logprobs(hidden, weight, targets, SamplingRows.uniform(count), chunk_tokens=16)
    with pytest.raises(TypeError, match="weight is torch.bfloat16 but hidden is torch.float32"):
        token_logprobs(hidden, weight.bfloat16(), targets, rows)
