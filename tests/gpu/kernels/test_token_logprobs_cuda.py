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
from rl_consistency.kernels.sampling.vocabulary_triton import vocabulary_shifted
from rl_consistency.kernels.token_logprobs import cuda as token_logprobs_cuda
from rl_consistency.kernels.token_logprobs.head_triton import token_gradient, token_gradient_table
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits, token_logprobs
from rl_consistency.kernels.token_logprobs.schedules import GRADIENT_SCHEDULES
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import first_difference
from tests.kernels.token_logprobs.test_token_logprobs import (
    operands,
    test_rollout_reads_the_same_bytes_from_its_logits,  # noqa: F401
    test_targets_outside_the_vocabulary_are_refused,  # noqa: F401
    test_unscored_rows_are_zero_and_change_nothing,  # noqa: F401
)

pytestmark = pytest.mark.gpu

ROWS, H, V = 304, 512, 5011
WHERE = "cuda", ROWS, H, V, 2**-5
"""Logits of a standard deviation of 3: entropies from 0 to nearly log V."""


@pytest.fixture
def where():
    return WHERE


def test_scaling_rounds_like_a_division():
    logits, temperatures = probe((ROWS, V)).cuda(), torch.linspace(0.5, 2.0, ROWS, device="cuda")
    scaled = vocabulary_shifted(logits, temperatures, torch.zeros_like(temperatures), False)
    assert same_bytes(scaled, logits / temperatures[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fresh", [False, True])
def test_nothing_reads_past_the_last_logit_gradient(fresh, dtype):
    hidden, weight, _ = operands(WHERE, dtype)
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


@pytest.mark.large
def test_logits_past_two_to_the_31_elements():
    """16,384 rows of 151,936 logits: offsets beyond 32 bits, and memory that does not grow so."""
    tokens, width, vocabulary = 16384, 64, 151936
    hidden = probe((tokens, width), torch.bfloat16).cuda()
    weight = probe((vocabulary, width), torch.bfloat16, seed=1, scale=0.1).cuda()
    targets = torch.arange(tokens, device="cuda") * 9
    rows = SamplingRows.uniform(tokens, device="cuda")
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
    targets, rows = torch.arange(tokens, device="cuda"), SamplingRows.uniform(tokens, device="cuda")
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
        scores = token_logprobs(leaf, head, targets, rows, weight_grad=GradientBuffer(head))
        assert (scores[0].grad_fn.logits is not None) == (kept_width == width)
        torch.autograd.backward(scores, [torch.ones_like(scores[0])] * 2)
        found.append({"hidden": leaf.grad, "weight": head.grad, "scores": torch.stack(scores)})
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found[-1] = {name: value.detach().cpu() for name, value in found[-1].items()}
        del scores, leaf, head
    assert first_difference(found[0], found[1]) is None
    assert peaks[3] <= 1.05 * peaks[2], peaks
