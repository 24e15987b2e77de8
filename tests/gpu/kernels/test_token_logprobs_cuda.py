"""token_logprobs and the sampling distribution on a GPU: bytes, accuracy, memory."""

import gc

import pytest
import torch
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.op import matmul_nn
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.sampling.statistics_triton import (
    vocabulary_shifted,
)
from rl_consistency.kernels.token_logprobs import cuda as token_logprobs_cuda
from rl_consistency.kernels.token_logprobs.head_triton import (
    token_gradient,
    token_gradient_table,
)
from rl_consistency.kernels.token_logprobs.op import (
    IGNORED,
    lm_head_logits,
    token_logprobs,
)
from rl_consistency.kernels.token_logprobs.schedules import (
    GRADIENT_SCHEDULES,
)
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import first_difference

pytestmark = pytest.mark.gpu

ROWS, H, V = 304, 512, 5011
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def operands(dtype=torch.bfloat16, vocabulary=V):
    """Logits of a standard deviation of 3: entropies from 0 to nearly log V."""
    hidden = probe((ROWS, H), dtype, scale=2**-5).cuda()
    weight = probe((vocabulary, H), dtype, seed=1, scale=0.5 * H**-0.5).cuda()
    generator = torch.Generator().manual_seed(2)
    return hidden, weight, torch.randint(0, vocabulary, (ROWS,), generator=generator).cuda()


def uniform(count=ROWS, **settings):
    return SamplingRows.uniform(count, device="cuda", **settings)


def temperatures():
    return torch.linspace(0.5, 2.0, ROWS, device="cuda")


def mixed_rows(hidden, weight, targets):
    """Several settings, each keeping the row's target in its support."""
    settings = [{}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-4}]
    rows = SamplingRows.concatenate(
        [uniform(1, **settings[i % len(settings)]) for i in range(ROWS)]
    )
    support = distribution(lm_head_logits(hidden, weight), rows).scaled
    inside = torch.isfinite(support.gather(1, targets[:, None]))[:, 0]
    return rows, torch.where(inside, targets, support.argmax(1))


def results(hidden, weight, targets, rows, **options):
    """Outputs, and the gradient of hidden under cotangents that are functions of the row."""
    hidden = hidden.detach().clone().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, targets, rows, **options)
    seed = hidden.detach().float()
    torch.autograd.backward([logprobs, entropy], [seed[:, 0] + 1.0, seed[:, 1]])
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "dhidden": hidden.grad}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("truncated", [False, True])
def test_rollout_reads_the_same_bytes_from_its_logits(truncated, dtype):
    hidden, weight, targets = operands(dtype)
    rows = uniform(temperature=0.7)
    if truncated:
        rows, targets = mixed_rows(hidden, weight, targets)
    logprobs, entropy = token_logprobs(hidden, weight, targets, rows)
    for size in (1, 8, 64, ROWS):
        for start in range(0, ROWS, size):
            span = slice(start, min(start + size, ROWS))
            one = distribution(lm_head_logits(hidden[span], weight), rows.select(span))
            assert same_bytes(one.logprobs_of(targets[span]), logprobs[span])
            assert same_bytes(one.entropy(), entropy[span])


def test_scaling_rounds_like_a_division():
    logits = probe((ROWS, V)).cuda()
    scaled = vocabulary_shifted(logits, temperatures(), torch.zeros(ROWS, device="cuda"), False)
    assert same_bytes(scaled, logits / temperatures()[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fresh", [False, True])
def test_nothing_reads_past_the_last_logit_gradient(fresh, dtype):
    hidden, weight, _ = operands(dtype)
    room = torch.full((ROWS, -(-V // 64) * 64), torch.nan, dtype=dtype, device="cuda")
    spaced, packed = room[:, :V], probe((ROWS, V), dtype, seed=3).cuda()
    spaced.copy_(packed)
    products, folds = [], []
    for dlogits in (spaced, packed):
        products.append(matmul_nn(dlogits, weight, out_dtype=dtype))
        folds.append(torch.zeros(V, H, device="cuda"))
        fold_outer(folds[-1], dlogits, hidden, fresh=fresh)
    assert same_bytes(*products) and same_bytes(*folds)
    assert products[0].isfinite().all() and folds[0].isfinite().all()


def test_unscored_rows_are_zero_and_change_nothing():
    hidden, weight, targets = operands()
    whole = results(hidden, weight, targets, uniform())
    scored = torch.arange(ROWS, device="cuda") % 3 == 0
    some = results(hidden, weight, targets.masked_fill(~scored, IGNORED), uniform())
    for name, value in some.items():
        assert same_bytes(value[scored], whole[name][scored])
        assert not value[~scored].any()


def test_bad_targets_are_refused():
    hidden, weight, targets = operands()
    for bad in (V, -1):
        with pytest.raises(ValueError, match=r"targets span .* the LM head has 5011 rows"):
            token_logprobs(hidden, weight, torch.full_like(targets, bad), uniform())


@pytest.mark.large
def test_logits_past_two_to_the_31_elements():
    """16,384 rows of 151,936 logits: offsets beyond 32 bits, and memory that does not grow so."""
    tokens, width, vocabulary = 16384, 64, 151936
    hidden = probe((tokens, width), torch.bfloat16).cuda()
    weight = probe((vocabulary, width), torch.bfloat16, seed=1, scale=0.1).cuda()
    targets = torch.arange(tokens, device="cuda") * 9
    rows = uniform(tokens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs = token_logprobs(hidden, weight, targets, rows)[0]
    assert torch.cuda.max_memory_allocated() - before < tokens * vocabulary // 4
    logits = lm_head_logits(hidden, weight)
    whole = distribution(logits, rows).logprobs_of(targets)
    assert same_bytes(whole, logprobs)
    del logits, whole
    room = torch.empty(tokens, vocabulary, dtype=torch.bfloat16, device="cuda")
    plain = torch.zeros(tokens, device="cuda")
    table = token_gradient_table(rows.temperature, *[plain] * 3, plain + 1, plain, targets, IGNORED)
    last = slice(tokens - 16, tokens)
    for name, schedule in GRADIENT_SCHEDULES.items():
        if schedule.block_m >= 64:
            token_gradient(hidden, weight, table, room, True, name)
            few = torch.empty_like(room[:16])
            token_gradient(hidden[last], weight, table[:, last], few, True, name)
            assert same_bytes(room[last], few), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kept_logits_change_no_byte_and_no_peak(dtype, monkeypatch):
    tokens, width, vocabulary = 2048, 1024, 32003
    hidden = probe((tokens, width), dtype, scale=2**-5).cuda()
    weight = probe((vocabulary, width), dtype, seed=1, scale=0.5 * width**-0.5).cuda()
    targets = torch.arange(tokens, device="cuda")
    found, peaks = [], []
    # The first round certifies products, which takes memory of its own.
    for kept_width in (2 * width, width) * 2:
        monkeypatch.setattr(token_logprobs_cuda, "KEPT_WIDTH", kept_width)
        gc.collect()  # what the round before left in cycles would be freed in the middle of this
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        leaf, head = hidden.clone().requires_grad_(), nn.Parameter(weight)
        head.grad_dtype = torch.float32
        scores = token_logprobs(
            leaf, head, targets, uniform(tokens), weight_grad=GradientBuffer(head)
        )
        assert (scores[0].grad_fn.logits is not None) == (kept_width == width)
        torch.autograd.backward(scores, [torch.ones_like(scores[0])] * 2)
        found.append({"hidden": leaf.grad, "weight": head.grad, "scores": torch.stack(scores)})
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found[-1] = {name: value.detach().cpu() for name, value in found[-1].items()}
        del scores, leaf, head
    assert first_difference(found[0], found[1]) is None
    assert peaks[3] <= 1.05 * peaks[2], peaks
