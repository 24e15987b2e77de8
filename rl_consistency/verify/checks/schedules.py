"""C1 for a GPU's schedules of products, attention and the vocabulary: every entry of a table gives
the bytes of every other; `row_schedule_checks` has the other ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.attention import backward_triton as attention_backward_triton
from rl_consistency.kernels.attention import forward_triton as attention_triton
from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.layout import AttentionLayout, PackedSequences
from rl_consistency.kernels.core.device import has_tma, takes_descriptors
from rl_consistency.kernels.glu import activation_triton as glu_triton
from rl_consistency.kernels.gradient_fold import outer_triton as gradient_fold_triton
from rl_consistency.kernels.gradient_fold import schedules as gradient_fold_schedules
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.linear import few_rows_triton as linear_triton
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul import product_triton as matmul_triton
from rl_consistency.kernels.matmul import schedules as matmul_schedules
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.sampling import statistics_triton as vocabulary_statistics_triton
from rl_consistency.kernels.token_logprobs import backward_triton as token_gradient_triton
from rl_consistency.kernels.token_logprobs import forward_triton as token_logprobs_triton
from rl_consistency.kernels.token_logprobs import schedules as token_logprobs_schedules
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits
from rl_consistency.verify.checks.attention import attention_probe, cache_of, call_operands, packed
from rl_consistency.verify.checks.op_setup import MAX_ROWS, Heads, OpSetup
from rl_consistency.verify.checks.paged_calls import decoded, paged_calls
from rl_consistency.verify.checks.rows import token_logprob_probe, weight_scale
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.compile_ahead import compile_ahead
from rl_consistency.verify.laws import schedules_alike, within_resources
from rl_consistency.verify.probe import probe
from rl_consistency.verify.substitution import attribute

LENGTHS = (1, 33, 200, 2300)
"""Sequences of attention, from one block of keys to many."""

FEW_ROWS = matmul_schedules.FUSED_ROWS - 3
"""Rows of a fused product: ragged for every tile."""


def check_matmul_schedules(tally: Tally, setup: OpSetup) -> None:
    """Products of both layouts by every schedule, the library's among them, and as they are
    dispatched for few to many rows."""
    rows, before = min(setup.rows, MAX_ROWS), audit.schedule_audit()
    by_the_library = 0
    with attribute(audit, "AUDIT_EVERY", 1):
        for i, (inner, columns) in enumerate(setup.shapes.linear):
            x = setup.drawn((rows, inner), 3 * i)
            weight = setup.drawn((columns, inner), 3 * i + 1, weight_scale(inner))
            bias = setup.drawn((columns,), 3 * i + 2)
            for layout, b, added in (("nt", weight, bias), ("nn", weight.t().contiguous(), None)):
                name = f"{inner} x {columns} {layout}"
                by_the_library += _compare_product(tally, setup, name, x, b, added, layout)
                # A reading strikes all that was sampled since the one before: this product alone.
                audit.schedule_audit()
    report = audit.schedule_audit()
    audited = report.audited - before.audited
    tally.expect(
        "library products audited",
        # Where no certificate was given, as for fp32, the library has no schedule.
        report.differing == 0 and (audited > 0 or not by_the_library),
        f"{report.differing} elements of {audited} audited calls, {by_the_library} products by the "
        f"library; struck: {report.struck}",
    )


def check_fused_product_schedules(tally: Tally, setup: OpSetup) -> None:
    """q, k, v in one launch and gate, up, silu in another, against the ops they stand for."""
    inner, shape, dtype = setup.shapes.hidden_size, setup.shapes.attention[0], setup.dtype
    # Small: the product of gate and up has to stay in the range of fp16.
    x = setup.drawn((min(setup.rows, FEW_ROWS), inner), 0, 0.01)
    sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    sizes += [setup.shapes.glu_width] * 2
    weights = [setup.drawn((n, inner), 1 + i, weight_scale(inner)) for i, n in enumerate(sizes)]
    (wq, wk, wv), (w_gate, w_up) = weights[:3], weights[3:]
    biases = bq, bk, bv = [setup.drawn((n,), 6 + i, 0.01) for i, n in enumerate(sizes[:3])]
    gate, up = (matmul_nt(x, weight, bias=None, out_dtype=dtype) for weight in (w_gate, w_up))
    gated = glu_triton.glu_fwd(gate, up, "silu")
    tma = has_tma(setup.device) and takes_descriptors(x, w_gate, w_up, gated)

    def projected(schedule: matmul_schedules.Schedule) -> Tensor:
        return torch.cat(linear_triton.qkv_fwd(x, wq, wk, wv, bq, bk, bv, schedule), dim=1)

    def activated(schedule: matmul_schedules.Schedule) -> Tensor:
        return linear_triton.gate_up_glu_fwd(x, w_gate, w_up, "silu", schedule)

    if dtype == torch.float32:
        qkv = gate_up = list(matmul_schedules.FEW_ROWS_FP32)
    else:
        qkv = list(matmul_schedules.QKV)
        gate_up = [s for s in matmul_schedules.GATE_UP if tma or s.kind == "pointer"]
    pairs = zip(weights[:3], biases, strict=True)
    apart = [matmul_nt(x, weight, bias=bias, out_dtype=dtype) for weight, bias in pairs]
    apart = torch.cat(apart, dim=1)
    whole = schedules_alike(tally, "q, k, v", qkv, projected)
    tally.equal("q, k, v, against the ops apart", apart, whole)
    whole = schedules_alike(tally, "gate, up, silu", gate_up, activated)
    tally.equal("gate, up, silu, against the ops apart", gated, whole)


def check_gradient_fold_schedules(tally: Tally, setup: OpSetup) -> None:
    """A buffer continued by every schedule of `fold_outer`."""
    rows = min(setup.rows, MAX_ROWS)
    for i, (inner, columns) in enumerate(setup.shapes.linear):
        x, dy = setup.drawn((rows, inner), 2 * i), setup.drawn((rows, columns), 2 * i + 1)
        start = probe((columns, inner), torch.float32, seed=i, device=setup.device)
        start = start.to(accumulator_dtype(x))
        tma = has_tma(setup.device) and takes_descriptors(dy, x)

        def continued(
            schedule: Any, dy: Tensor = dy, x: Tensor = x, start: Tensor = start
        ) -> Tensor:
            buffer = start.clone()
            if schedule is None:
                fold_outer(buffer, dy, x)
            else:
                gradient_fold_triton.launch_outer(buffer, dy, x, False, schedule)
            return buffer

        name = f"{columns} x {inner}"
        entries = gradient_fold_schedules.candidates(setup.dtype, tma=tma)
        # One by one: a buffer is as large as the weight, in fp32.
        compile_ahead(partial(within_resources, continued, entry) for entry in entries)
        whole = continued(None)
        used = 0
        for schedule in entries:
            found = within_resources(continued, schedule)
            used += found is not None
            if found is not None:
                tally.equal(f"{name}, {schedule}", whole, found)
        tally.expect(f"{name}, entries that fit", used >= 2, f"{used} of {len(entries)}")


def check_attention_schedules(tally: Tally, setup: OpSetup) -> None:
    """Prefill, decode from the paged cache, and backward by every schedule."""
    for shape in setup.shapes.attention:
        samples = attention_probe(shape, LENGTHS, setup)
        layout, (q, k, v) = packed(samples)
        prefill, decode = attention_schedules.PREFILL, attention_schedules.DECODE
        _compare_attention(tally, shape, layout, (q, k, v), prefill)
        _compare_backward(tally, shape, layout, (q, k, v))
        parts = [decoded(n)[:2] for n in LENGTHS]
        for call in paged_calls(parts, block_size=16, **cache_of(shape, q)):
            q, k, v = call_operands(samples, call)
            call.paged.write(0, k, v)
            caches = (call.paged.key_cache[0], call.paged.value_cache[0])
            k, v = (cache.view(-1, *cache.shape[2:]) for cache in caches)
            _compare_attention(tally, shape, call.paged, (q, k, v), decode + prefill)


def check_token_logprobs_schedules(tally: Tally, setup: OpSetup) -> None:
    """Statistics of the vocabulary and logit gradients: fused with the product, and from logits."""
    hidden, weight, targets, rows = token_logprob_probe(min(setup.rows, MAX_ROWS), setup)
    temperature = rows.temperature.masked_fill(rows.temperature == 0, 1.0)
    logits = lm_head_logits(hidden, weight)

    def from_logits(schedule: str) -> Tensor:
        return vocabulary_statistics_triton.vocabulary_row_statistics(
            logits, temperature, False, None, schedule
        )

    def with_product(schedule: str) -> Tensor:
        return token_logprobs_triton.token_statistics(hidden, weight, temperature, False, schedule)

    partials = schedules_alike(
        tally, "rows", list(vocabulary_statistics_triton.ROW_SCHEDULES), from_logits
    )
    top, log_normalizer, entropy = vocabulary_statistics_triton.vocabulary_combine(partials)
    dlogprobs, dentropy = (
        probe((len(hidden),), torch.float32, seed=s, device=setup.device) for s in (1, 2)
    )
    table = token_gradient_triton.token_gradient_table(
        temperature, top, log_normalizer, entropy, dlogprobs, dentropy, targets, IGNORED
    )
    expected = torch.empty_like(logits, dtype=setup.dtype)
    token_gradient_triton.token_row_gradient(logits, table, expected, False)

    def gradient(schedule: str) -> Tensor:
        dlogits = torch.empty_like(expected)
        token_gradient_triton.token_gradient(hidden, weight, table, dlogits, False, schedule)
        return dlogits

    if setup.dtype == torch.float32:
        return  # only 16-bit operands have fused schedules
    schedules = token_logprobs_schedules
    tma = has_tma(setup.device) and takes_descriptors(hidden, weight, expected)
    for name, entries, run, whole in (
        ("fused statistics", schedules.STATISTICS_SCHEDULES, with_product, partials),
        ("fused gradient", schedules.GRADIENT_SCHEDULES, gradient, expected),
    ):
        usable = [name for name, s in entries.items() if tma or s.kind == "pointer"]
        tally.equal(f"{name}, against logits", whole, schedules_alike(tally, name, usable, run))


def _compare_product(
    tally: Tally, setup: OpSetup, name: str, a: Tensor, b: Tensor, bias: Tensor | None, layout: str
) -> bool:
    """Whether the library had a schedule among those compared."""

    def by_schedule(schedule: matmul_schedules.Schedule) -> Tensor:
        return matmul_triton.matmul_fwd(a, b, bias, layout, a.dtype, schedule)

    def as_dispatched(rows: Tensor) -> Tensor:
        if layout == "nn":
            return matmul_nn(rows, b, out_dtype=a.dtype)
        return matmul_nt(rows, b, bias=bias, out_dtype=a.dtype)

    fp32, size = setup.dtype == torch.float32, setup.dtype.itemsize
    table = matmul_schedules.POINTER_FP32 if fp32 else matmul_schedules.CANDIDATES
    tma = has_tma(setup.device) and takes_descriptors(a, b, as_dispatched(a))
    entries = [
        schedule.within(matmul_triton.SHARED_BYTES, size, size)
        for schedule in table
        if tma or schedule.kind == "pointer"
    ]
    whole = schedules_alike(tally, name, entries, by_schedule)
    for count in sorted({1, 2, 16, 65, len(a)}):
        case = f"{name}, {count} rows as dispatched"
        tally.equal(case, whole[:count], as_dispatched(a[:count]))
    if fp32:
        return False
    # Where it is certified, not only where it is the fastest.
    with attribute(cublaslt, "prefers_library", lambda *_: True):
        found = cublaslt.product(a, b, bias, layout, a.dtype)
    if found is not None:
        tally.equal(f"{name}, by the library", whole, found)
    return found is not None


def _compare_attention(
    tally: Tally,
    shape: Heads,
    layout: AttentionLayout,
    operands: tuple[Tensor, Tensor, Tensor],
    table: tuple[attention_schedules.Schedule, ...],
) -> None:
    settings = (layout, shape.scale, shape.window)
    few = max(layout.query_lens) * (shape.heads // shape.kv_heads) <= 64

    def attended(choice: tuple[attention_schedules.Schedule, int]) -> Tensor:
        schedule, programs = choice
        out, lse = attention_triton.attention_fwd(
            *operands, *settings, schedule=schedule, programs_per_tile=programs
        )
        rows = torch.cat([out.float().flatten(1), lse], dim=1)
        spans = zip(layout.query_starts, layout.query_lens, strict=True)
        return torch.cat([rows[start : start + count] for start, count in spans])

    # Few rows may have their keys spread over several programs.
    entries = attention_schedules.forward_entries(table, operands[0].dtype)
    admitted = [s for s in entries if attention_schedules.admits(s, layout, *operands)]
    choices = [(s, programs) for programs in ((1, 2, 7) if few else (1,)) for s in admitted]
    queries = "decode" if few else "prefill"
    schedules_alike(tally, f"{shape}, {queries}", choices, attended)


def _compare_backward(
    tally: Tally, shape: Heads, layout: PackedSequences, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    settings = (layout, shape.scale, shape.window)
    out, lse = attention_triton.attention_fwd(*operands, *settings)
    do = operands[0]

    def gradients(choice: tuple[str, attention_schedules.Schedule]) -> Tensor:
        name, schedule = choice
        found = attention_backward_triton.attention_bwd(
            do, *operands, out, lse, *settings, **{name: schedule}
        )
        return torch.cat([x.float().flatten(1) for x in found], dim=1)

    entries, dtype = attention_schedules.backward_entries, do.dtype
    by_query = entries(attention_schedules.BACKWARD_QUERIES, dtype)
    by_key = [
        s
        for s in entries(attention_schedules.BACKWARD_KEYS, dtype)
        if attention_schedules.admits(s, layout, do, *operands)
    ]
    choices = [("query_schedule", s) for s in by_query] + [("key_schedule", s) for s in by_key]
    schedules_alike(tally, f"{shape}, backward", choices, gradients)
