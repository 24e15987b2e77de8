"""token_logprobs and the sampling distribution on a GPU: bytes, accuracy, memory."""

import gc
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.op import matmul_nn
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.sampling.statistics_triton import (
    ROW_SCHEDULES,
    vocabulary_combine,
    vocabulary_row_statistics,
    vocabulary_shifted,
)
from rl_consistency.kernels.token_logprobs import plan as token_logprobs_plan
from rl_consistency.kernels.token_logprobs.backward_triton import (
    token_gradient,
    token_gradient_table,
    token_row_gradient,
)
from rl_consistency.kernels.token_logprobs.forward_triton import (
    token_statistics,
    token_target_logits,
)
from rl_consistency.kernels.token_logprobs.op import (
    IGNORED,
    lm_head_logits,
    token_logprobs,
    token_logprobs_reference,
    triton_token_logprobs,
)
from rl_consistency.kernels.token_logprobs.plan import choose_plan
from rl_consistency.kernels.token_logprobs.schedules import (
    GRADIENT_SCHEDULES,
    STATISTICS_SCHEDULES,
    UNFUSED,
)
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.digest import first_difference
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import judged, rows_alike, rows_of

pytestmark = pytest.mark.gpu

ROWS, H, V = 304, 512, 5011
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CUTS = ([16], [160], [32, 208], list(range(16, ROWS, 16)))


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


def weight_gradient(cuts, dtype=torch.bfloat16, *, filler=0, buffered=True, plan=None, chunk=None):
    hidden, weight, targets = operands(dtype)
    dlogprobs = probe((ROWS,), seed=4).cuda()
    weight = nn.Parameter(weight)
    weight.grad_dtype = torch.float32
    buffer = GradientBuffer(weight) if buffered else None
    for start, stop in itertools.pairwise([0, *cuts, ROWS]):
        logprobs, entropy = triton_token_logprobs(
            torch.cat([hidden[start:stop], hidden[:filler]]),
            weight,
            F.pad(targets[start:stop], (0, filler), value=IGNORED),
            uniform(stop - start + filler, temperature=0.9),
            chunk,
            buffer,
            plan,
        )
        cotangent = F.pad(dlogprobs[start:stop], (0, filler), value=7.0)
        torch.autograd.backward([logprobs, entropy], [cotangent, cotangent * 0.1])
    return weight.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_matches_fp64(temperature, dtype):
    hidden, weight, targets = operands(dtype)
    rows = uniform(temperature=temperature)
    exact = token_logprobs_reference(hidden, weight, targets, torch.tensor(temperature).item())
    for got, expected in zip(token_logprobs(hidden, weight, targets, rows), exact, strict=True):
        assert_within(got, expected, "reduction", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_as_accurate_as_autograd(dtype):
    """Relative Frobenius error of each gradient against fp64."""
    hidden, weight, targets = operands(dtype)
    cotangents = [probe((ROWS,), seed=seed).cuda() for seed in (4, 5)]
    temperature = torch.tensor(0.9).item()

    def stock(hidden, weight):
        logprobs = (F.linear(hidden, weight).float() / temperature).log_softmax(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    def gradients(op, dtype=dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
        values = op(*leaves)
        torch.autograd.backward(values, [c.to(v.dtype) for c, v in zip(cotangents, values)])
        return [leaf.grad.double() for leaf in leaves]

    rows = uniform(temperature=temperature)
    exact = gradients(
        lambda h, w: token_logprobs_reference(h, w, targets, temperature), torch.double
    )
    ours = gradients(lambda h, w: token_logprobs(h, w, targets, rows))
    # A library may cut a sum of n terms in parts; one after another they lose up to sqrt(n)
    # roundings of fp32 more, which 16-bit operands do not notice.
    for terms, *found in zip((V, ROWS), ours, gradients(stock), exact, strict=True):
        error, bar = ((x - found[-1]).norm() / found[-1].norm() for x in found[:-1])
        assert error <= 1.05 * bar + 2**-24 * terms**0.5, (error, bar)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_is_as_accurate_as_log_softmax(dtype):
    hidden, weight, targets = operands(dtype)
    exact = token_logprobs_reference(hidden, weight, targets)[0]
    stock = F.linear(hidden, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ours = token_logprobs(hidden, weight, targets, uniform())[0]
    error, bar = ((x.double() - exact).square().mean().sqrt().item() for x in (ours, stock))
    assert error <= 1.05 * bar, (error, bar)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("truncated", [False, True])
def test_rows_do_not_depend_on_the_batch(truncated, dtype):
    hidden, weight, targets = operands(dtype)
    rows = uniform(temperature=0.7)
    if truncated:
        rows, targets = mixed_rows(hidden, weight, targets)

    def op(hidden, targets, index):
        return rows_of(*results(hidden, weight, targets, rows.select(index)).values())

    index = torch.arange(ROWS, device="cuda")
    assert judged(rows_alike, "scores and dhidden", op, hidden, targets, index).passed


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("vocabulary", [V, 5120, 130])
def test_every_statistics_schedule_gives_the_same_bytes(vocabulary, unit, dtype):
    hidden, weight, targets = operands(dtype, vocabulary)
    temperature = torch.ones_like(temperatures()) if unit else temperatures()
    logits = lm_head_logits(hidden, weight)
    expected = vocabulary_row_statistics(logits, temperature, unit)
    found = [vocabulary_row_statistics(logits, temperature, unit, None, n) for n in ROW_SCHEDULES]
    found += [token_statistics(hidden, weight, temperature, unit, n) for n in STATISTICS_SCHEDULES]
    assert all(same_bytes(partials, expected) for partials in found)
    scaled = vocabulary_shifted(logits, temperature, torch.zeros_like(temperature), unit)
    picked = scaled.gather(1, targets[:, None])[:, 0]
    assert same_bytes(token_target_logits(hidden, weight, targets, temperature, unit), picked)


def test_scaling_rounds_like_a_division():
    logits = probe((ROWS, V)).cuda()
    scaled = vocabulary_shifted(logits, temperatures(), torch.zeros(ROWS, device="cuda"), False)
    assert same_bytes(scaled, logits / temperatures()[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [V, 5120])
def test_every_gradient_schedule_gives_the_same_bytes(vocabulary, dtype):
    hidden, weight, targets = operands(dtype, vocabulary)
    temperature = temperatures()
    logits = lm_head_logits(hidden, weight)
    scores = vocabulary_combine(vocabulary_row_statistics(logits, temperature, False))
    cotangents = probe((2, ROWS), seed=6).cuda().unbind(0)
    table = token_gradient_table(temperature, *scores, *cotangents, targets, IGNORED)
    expected = torch.empty(ROWS, vocabulary, dtype=dtype, device="cuda")
    token_row_gradient(logits, table, expected, False)
    room = -(-vocabulary // 64) * 64
    for name in GRADIENT_SCHEDULES:
        got = torch.full((ROWS, room), torch.nan, dtype=dtype, device="cuda")
        token_gradient(hidden, weight, table, got[:, :vocabulary], False, name)
        assert same_bytes(got[:, :vocabulary], expected), name
        # A descriptor stores whole lines of 16 bytes: the rest of a row's last line is nobody's.
        assert got[:, -(-vocabulary // 8) * 8 :].isnan().all(), name


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient_does_not_depend_on_the_cut_nor_on_the_plan(dtype):
    whole = weight_gradient([], dtype)
    for cuts in CUTS:
        assert same_bytes(weight_gradient(cuts, dtype), whole), cuts
    assert same_bytes(weight_gradient([48], dtype, filler=16), whole)
    for chunk in (16, 48, 128):
        assert same_bytes(weight_gradient([], dtype, chunk=chunk), whole), chunk
    hidden, weight, _ = operands(dtype)
    fused = choose_plan(hidden, weight, uniform(temperature=0.9), 128)
    unfused = replace(fused, statistics=UNFUSED, gradient=UNFUSED)
    for plan in (unfused, replace(fused, keeps_logits=True)):
        assert same_bytes(weight_gradient([], dtype, plan=plan), whole), plan


def test_gradients_without_the_fold_fail_the_same_check():
    assert not same_bytes(*(weight_gradient(c, buffered=False) for c in ([], [32, 208])))


def test_run_to_run():
    hidden, weight, targets = operands()
    rows, targets = mixed_rows(hidden, weight, targets)
    first = results(hidden, weight, targets, rows)
    for _ in range(5):
        assert first_difference(results(hidden, weight, targets, rows), first) is None


def test_compiled_and_captured_give_the_eager_bytes():
    hidden, weight, targets = operands()
    rows = uniform(temperature=0.7)
    eager = torch.stack(token_logprobs(hidden, weight, targets, rows))
    # No full graph: the host looks at the targets first.
    compiled = torch.compile(lambda h: torch.stack(token_logprobs(h, weight, targets, rows)))
    assert same_bytes(compiled(hidden), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = torch.stack(token_logprobs(hidden, weight, targets, rows))
    graph.replay()
    assert same_bytes(captured, eager)


def test_non_contiguous_operands_give_the_same_bytes():
    hidden, weight, targets = operands()
    expected = results(hidden, weight, targets, uniform())
    strided = [t.t().contiguous().t() for t in (hidden, weight)]
    wide = [F.pad(t, (0, 9))[:, :H] for t in (hidden, weight)]
    for pair in (strided, wide):
        assert first_difference(results(*pair, targets, uniform()), expected) is None


def test_no_rows_give_nothing_and_zero_gradient():
    weight = operands()[1].requires_grad_()
    nothing = torch.zeros(0, H, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64, device="cuda")
    for rows in (uniform(0), uniform(0, top_k=3)):
        logprobs, entropy = token_logprobs(nothing, weight, targets, rows)
        assert logprobs.shape == entropy.shape == (0,)
        (logprobs.sum() + entropy.sum()).backward()
        assert not weight.grad.any()


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
        monkeypatch.setattr(token_logprobs_plan, "KEPT_WIDTH", kept_width)
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


def test_another_vocabulary_order_fails_the_same_check():
    """Log-sum-exp by torch from the same logits: what two separate kernels would give."""
    hidden, weight, targets = operands()
    stock = lm_head_logits(hidden, weight).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    ours = token_logprobs(hidden, weight, targets, uniform())[0]
    assert torch.allclose(stock, ours) and not same_bytes(stock, ours)


def test_logits_rounded_to_the_model_dtype_fail_the_same_check():
    hidden, weight, targets = operands()
    rounded = distribution(lm_head_logits(hidden, weight).bfloat16().float(), uniform())
    ours = token_logprobs(hidden, weight, targets, uniform())[0]
    assert not same_bytes(rounded.logprobs_of(targets), ours)
