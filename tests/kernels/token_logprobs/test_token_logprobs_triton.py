"""The CUDA schedules of token_logprobs in Triton's interpreter: their logic, not their bits."""

import dataclasses

import pytest
import torch
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.sampling.op import SamplingRows, triton_distribution
from rl_consistency.kernels.token_logprobs import cuda as token_logprobs_cuda
from rl_consistency.kernels.token_logprobs.cuda import choose_plan
from rl_consistency.kernels.token_logprobs.head_triton import (
    token_statistics,
    token_target_gradient,
)
from rl_consistency.kernels.token_logprobs.op import (
    lm_head_logits,
    token_logprobs,
    token_logprobs_reference,
    triton_token_logprobs,
)
from rl_consistency.kernels.token_logprobs.schedules import (
    UNFUSED,
    HeadSchedule,
)
from rl_consistency.parity.bytes import same_bytes
from tests.comparison import assert_within

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU")

ROWS, H, V = 24, 72, 300


def targets():
    return torch.randint(0, V, (ROWS,), generator=torch.Generator().manual_seed(2))


def operands(dtype=torch.float32):
    return probe((ROWS, H), dtype, scale=0.5), probe((V, H), dtype, seed=1, scale=0.5 * H**-0.5)


def exact_operands():
    """Small multiples of 1/8, whose products add up without rounding in any order: the logits have
    one set of bits, so whatever follows has to give one as well."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(-8, 9, shape, generator=generator) / 8).bfloat16()
        for shape in ((ROWS, H), (V, H))
    ]


def plans(rows, *, chunk_tokens=16):
    """The fused plan and the unfused one."""
    hidden, weight = operands(torch.bfloat16)
    fused = choose_plan(hidden, weight, rows, chunk_tokens)
    assert UNFUSED not in (fused.statistics, fused.gradient)
    return [fused, dataclasses.replace(fused, statistics=UNFUSED, gradient=UNFUSED)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_match_fp64(dtype):
    cotangents = [probe((ROWS,), seed=4), probe((ROWS,), seed=5)]
    rows = SamplingRows.uniform(ROWS, temperature=0.9)
    exact = [t.double().requires_grad_() for t in operands(dtype)]
    reference = token_logprobs_reference(*exact, targets(), torch.tensor(0.9).item())
    torch.autograd.backward(reference, [c.double() for c in cotangents])
    for plan in plans(rows):
        leaves = [t.requires_grad_() for t in operands(dtype)]
        scores = triton_token_logprobs(*leaves, targets(), rows, plan=plan)
        torch.autograd.backward(scores, cotangents)
        for ours, wide in zip(leaves, exact, strict=True):
            assert_within(ours.grad, wide.grad, "reduction", dtype, gradient=True)


@pytest.mark.parametrize("kind", ["strided", "expanded"])
def test_gradients_read_a_temperature_of_any_stride(kind):
    whole = SamplingRows.uniform(ROWS)
    every_second = torch.linspace(0.5, 2.0, 2 * ROWS)[::2]
    given = every_second if kind == "strided" else torch.tensor([0.7]).expand(ROWS)
    cotangents = [probe((ROWS,), seed=4), probe((ROWS,), seed=5)]
    results = []
    for temperature in (given, given.clone(memory_format=torch.contiguous_format)):
        leaves = [t.requires_grad_() for t in operands(torch.bfloat16)]
        rows = SamplingRows(
            temperature=temperature, top_k=whole.top_k, top_p=whole.top_p, min_p=whole.min_p
        )
        scores = triton_token_logprobs(*leaves, targets(), rows, plan=plans(rows)[0])
        torch.autograd.backward(scores, cotangents)
        results.append([*scores, *(leaf.grad for leaf in leaves)])
    assert not given.is_contiguous()
    assert all(map(same_bytes, *results))


def test_knowing_that_the_temperature_is_one_changes_no_byte():
    hidden, weight = exact_operands()
    ones = torch.ones(ROWS)
    known, asked = (
        token_statistics(hidden, weight, ones, unit, "pointer") for unit in (True, False)
    )
    assert same_bytes(known, asked)


def test_the_targets_entry_alone_is_rewritten():
    dlogits = torch.full((3, 9), 7.0)
    table = torch.zeros(6, 3)
    table[3], table[5] = -1.0, 1.0
    token_target_gradient(table, torch.full((3,), 0.5).log(), torch.tensor([4, -100, 8]), dlogits)
    expected = torch.full((3, 9), 7.0)
    expected[0, 4] = expected[2, 8] = 0.5
    assert torch.allclose(dlogits, expected)


def test_logits_are_kept_for_one_backward_pass_at_a_time(monkeypatch):
    monkeypatch.setattr(token_logprobs_cuda, "KEPT_WIDTH", 16)
    hidden, weight = exact_operands()
    head, rows = nn.Parameter(weight), SamplingRows.uniform(ROWS)
    buffer = GradientBuffer(head)

    def score():
        return triton_token_logprobs(hidden, head, targets(), rows, 16, buffer)[0]

    with torch.no_grad():
        assert score().grad_fn is None
    first, second = score(), score()
    kept = [score.grad_fn.logits is not None for score in (first, second)]
    assert kept == [True, False]
    first.sum().backward(retain_graph=True)
    assert first.grad_fn.logits is None
    once = head.grad.clone()
    head.grad = None
    # Recomputed now, with the same bits.
    first.sum().backward()
    assert same_bytes(head.grad, once)
    # A gradient is there: its memory is not to come on top of the logits'.
    assert score().grad_fn.logits is None
    head.grad = None
    assert score().grad_fn.logits is not None


def mixed_rows():
    settings = [{"temperature": 0.0}, {"top_k": 5, "temperature": 0.7}, {"top_p": 0.9}, {}]
    return SamplingRows.concatenate(
        [SamplingRows.uniform(1, **settings[i % len(settings)]) for i in range(ROWS)]
    )


def test_truncated_gradients_match_the_cpu_order(monkeypatch):
    hidden, weight = operands()
    best = lm_head_logits(hidden, weight).argmax(1)
    results = []
    for scorer in (token_logprobs, triton_token_logprobs):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        scores = scorer(*leaves, best, mixed_rows())
        torch.autograd.backward(scores, list(probe((2, ROWS), seed=6).unbind(0)))
        results.append([*scores, *(leaf.grad for leaf in leaves)])
        monkeypatch.setattr(token_logprobs_cuda, "distribution", triton_distribution)
    for expected, got in zip(*results, strict=True):
        assert_within(got, expected, "reduction", torch.float32)


def test_a_target_that_is_no_token_has_the_logprob_nan():
    hidden, weight = operands(torch.bfloat16)
    bad = torch.tensor([V, -1, 3])
    rows = SamplingRows.uniform(3)
    logprobs, _ = triton_token_logprobs(hidden[:3], weight, bad, rows)
    assert logprobs.isnan().tolist() == [True, True, False]


def test_no_rows_give_nothing():
    weight = operands(torch.bfloat16)[1].requires_grad_()
    hidden = torch.zeros(0, H, dtype=torch.bfloat16, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    for rows in (SamplingRows.uniform(0), SamplingRows.uniform(0, top_k=3)):
        logprobs, entropy = triton_token_logprobs(hidden, weight, nothing, rows)
        assert logprobs.shape == entropy.shape == (0,)
        (logprobs.sum() + entropy.sum()).backward()
        assert not weight.grad.any()
        assert triton_distribution(torch.zeros(0, V), rows).entropy().shape == (0,)


def test_a_schedule_off_the_vocabulary_blocks_is_refused():
    for kind, block_n in (("tma", 64), ("cute", 128)):
        with pytest.raises(ValueError, match="kind is tma or pointer, block_n 128 or 256"):
            HeadSchedule(kind=kind, block_m=64, block_n=block_n, block_k=64, warps=4, stages=3)
