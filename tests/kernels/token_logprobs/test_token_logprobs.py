import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.op import (
    IGNORED,
    lm_head_logits,
    token_logprobs,
    token_logprobs_reference,
)
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.digest import first_difference
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import judged, rows_alike, rows_of

ROWS, H, V = 80, 64, 203
CUTS = ([16], [32, 48], list(range(16, ROWS, 16)))


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


def weight_gradient(cuts, dtype, chunk_tokens=1024, filler=0, buffered=True):
    hidden, weight, targets = operands(dtype)
    dlogprobs = probe((ROWS,), seed=4)
    weight = nn.Parameter(weight)
    weight.grad_dtype = torch.float32
    buffer = GradientBuffer(weight) if buffered else None
    edges = [0, *cuts, ROWS]
    for start, stop in itertools.pairwise(edges):
        logprobs, entropy = token_logprobs(
            torch.cat([hidden[start:stop], hidden[:filler]]),
            weight,
            F.pad(targets[start:stop], (0, filler), value=IGNORED),
            SamplingRows.uniform(stop - start + filler, temperature=0.9),
            chunk_tokens=chunk_tokens,
            weight_grad=buffer,
        )
        cotangent = F.pad(dlogprobs[start:stop], (0, filler), value=7.0)
        torch.autograd.backward([logprobs, entropy], [cotangent, cotangent * 0.1])
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_matches_fp64(temperature, dtype):
    hidden, weight, targets = operands(dtype)
    rows = SamplingRows.uniform(ROWS, temperature=temperature)
    ours = token_logprobs(hidden, weight, targets, rows)
    exact = token_logprobs_reference(hidden, weight, targets, temperature)
    for got, expected in zip(ours, exact, strict=True):
        assert got.dtype == torch.float32
        assert_within(got, expected, "reduction", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_match_fp64(dtype):
    hidden, weight, targets = operands(dtype)
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    cotangents = [probe((ROWS,), seed=4), probe((ROWS,), seed=5)]
    rows = SamplingRows.uniform(ROWS, temperature=0.9)
    torch.autograd.backward(token_logprobs(*leaves, targets, rows), cotangents)
    reference = token_logprobs_reference(*exact, targets, torch.tensor(0.9).item())
    torch.autograd.backward(reference, [c.double() for c in cotangents])
    for ours, wide in zip(leaves, exact, strict=True):
        assert ours.grad.dtype == dtype
        assert_within(ours.grad, wide.grad, "reduction", dtype, gradient=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_the_batch(dtype):
    hidden, weight, targets = operands(dtype)
    rows, targets = mixed_rows(hidden, weight, targets)

    def op(hidden, targets, index):
        return rows_of(*results(hidden, weight, targets, rows.select(index)).values())

    assert judged(rows_alike, "scores and dhidden", op, hidden, targets, torch.arange(ROWS)).passed


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


@pytest.mark.parametrize("chunk_tokens", [16, 32, 64])
def test_the_chunk_does_not_matter(chunk_tokens):
    hidden, weight, targets = operands()
    rows, targets = mixed_rows(hidden, weight, targets)
    part = results(hidden, weight, targets, rows, chunk_tokens=chunk_tokens)
    assert first_difference(part, results(hidden, weight, targets, rows)) is None
    whole = weight_gradient([], torch.float32)
    assert same_bytes(weight_gradient([], torch.float32, chunk_tokens), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_does_not_depend_on_the_cut(dtype):
    whole = weight_gradient([], dtype)
    for cuts in CUTS:
        assert same_bytes(weight_gradient(cuts, dtype), whole), cuts
    assert same_bytes(weight_gradient([48], dtype, filler=16), whole)


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


def test_non_contiguous_operands_give_the_same_bytes():
    hidden, weight, targets = operands()
    rows = SamplingRows.uniform(ROWS)
    strided = [t.t().contiguous().t() for t in (hidden, weight)]
    expected = results(hidden, weight, targets, rows)
    assert first_difference(results(*strided, targets, rows), expected) is None


def test_no_rows_give_nothing_and_zero_gradient():
    weight = operands()[1].requires_grad_()
    nothing = torch.zeros(0, H, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = token_logprobs(nothing, weight, targets, SamplingRows.uniform(0))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert same_bytes(weight.grad, torch.zeros(V, H))


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


def test_stock_logprobs_fail_the_same_check():
    """A logprob read from one row's logits against the batch's, as decode and training do."""
    hidden, weight, targets = operands()

    def stock(index):
        logprobs = F.linear(hidden[index], weight).log_softmax(-1)
        return logprobs.gather(1, targets[index][:, None])[:, 0]

    whole = stock(torch.arange(ROWS))
    alone = torch.cat([stock(torch.tensor([i])) for i in range(ROWS)])
    assert not same_bytes(alone, whole)


def test_logits_rounded_to_the_model_dtype_fail_the_same_check():
    hidden, weight, targets = operands(torch.bfloat16)
    rows = SamplingRows.uniform(ROWS)
    rounded = distribution(lm_head_logits(hidden, weight).bfloat16().float(), rows)
    assert not same_bytes(
        rounded.logprobs_of(targets), token_logprobs(hidden, weight, targets, rows)[0]
    )


def test_gradients_without_the_fold_fail_the_same_check():
    whole, cut = (weight_gradient(cuts, torch.float32, buffered=False) for cuts in ([], [32, 48]))
    assert not same_bytes(whole, cut)
