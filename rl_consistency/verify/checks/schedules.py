"""C1 for a GPU's schedules of products, attention and the vocabulary: every entry of a table gives
the bytes of every other; `row_schedules` and `routing_schedules` have the other ops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases import launches
from rl_consistency.cases.case import Heads
from rl_consistency.cases.probe import probe
from rl_consistency.cases.token_logprobs import KINDS, head_probe, sampling_in_turn
from rl_consistency.kernels.attention import backward_triton as attention_backward_triton
from rl_consistency.kernels.attention import forward_triton as attention_triton
from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.layout import (
    MOST_SHARERS,
    AttentionLayout,
    PackedSequences,
    PagedAttention,
    SharedRun,
)
from rl_consistency.kernels.attention.paged_cache_triton import write_cache
from rl_consistency.kernels.attention.schedules import Cut
from rl_consistency.kernels.core.device import has_tma, takes_descriptors
from rl_consistency.kernels.linear.schedules import MOST_FUSED_ROWS
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.sampling import statistics_triton as vocabulary_statistics_triton
from rl_consistency.kernels.token_logprobs import head_triton as token_logprobs_triton
from rl_consistency.kernels.token_logprobs import schedules as token_logprobs_schedules
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits
from rl_consistency.verify.checks.attention import (
    attention_probe,
    cache_of,
    call_operands,
    of_sequences,
    packed,
)
from rl_consistency.verify.checks.paged_calls import cached_rows, decoded, paged_calls
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import launch_alike, rows_of, schedules_alike
from rl_consistency.verify.substitution import attribute
from rl_consistency.verify.sweep import MAX_ROWS, OpSetup

LENGTHS = (1, 33, 200, 2300)
"""Sequences of attention, from one block of keys to many."""


def check_matmul_schedules(tally: Tally, setup: OpSetup) -> None:
    """Products of both layouts by every schedule, the library's among them, and as they are
    dispatched for few to many rows."""
    rows, before = min(setup.rows, MAX_ROWS), audit.schedule_audit()
    by_the_library = 0
    with attribute(audit, "AUDIT_EVERY", 1):
        for inner, columns in setup.shapes.linear:
            for layout in ("nt", "nn"):
                by_the_library += _compare_product(tally, setup, layout, rows, columns, inner)
                # A reading withdraws all that was sampled since the one before: this product alone.
                audit.schedule_audit()
    report = audit.schedule_audit()
    audited = report.audited - before.audited
    tally.expect(
        "library products audited",
        # Where no certificate was given, as for fp32, the library has no schedule.
        report.differing == 0 and (audited > 0 or not by_the_library),
        f"{report.differing} elements of {audited} audited calls, {by_the_library} products by the "
        f"library; withdrawn: {report.withdrawn}",
    )


def check_fused_product_schedules(tally: Tally, setup: OpSetup) -> None:
    """q, k, v in one launch and gate, up, silu in another, against the ops they stand for."""
    rows = min(setup.rows, MOST_FUSED_ROWS - 3)  # ragged for every tile
    shape, hidden = setup.shapes.attention[0], setup.shapes.hidden_size
    queries, keys = (n * shape.head_dim for n in (shape.heads, shape.kv_heads))
    launch_alike(tally, launches.qkv(setup, rows, (queries, keys, keys), hidden, bias=True))
    launch_alike(tally, launches.gate_up(setup, rows, setup.shapes.glu_width, hidden))


def check_gradient_fold_schedules(tally: Tally, setup: OpSetup) -> None:
    """A buffer continued by every schedule of `fold_outer`."""
    for inner, columns in setup.shapes.linear:
        rows = min(setup.rows, MAX_ROWS)
        launch_alike(tally, launches.outer(setup, rows, columns, inner, fresh=False))


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
            write_cache(call.paged, 0, k, v)
            k, v = cached_rows(call.paged, 0)
            _compare_attention(tally, shape, call.paged, (q, k, v), decode + prefill)
            _compare_shared(tally, shape, call.paged, (q, k, v))


def check_token_logprobs_schedules(tally: Tally, setup: OpSetup) -> None:
    """Statistics of the vocabulary and logit gradients: fused with the product, and from logits."""
    hidden, weight, targets = head_probe(setup, min(setup.rows, MAX_ROWS))
    rows = sampling_in_turn(KINDS, len(hidden), setup.device)
    temperature = rows.temperature.masked_fill(rows.temperature == 0, 1.0)
    logits = lm_head_logits(hidden, weight)

    statistics = vocabulary_statistics_triton
    from_logits = partial(statistics.vocabulary_row_statistics, logits, temperature, False, None)
    with_product = partial(
        token_logprobs_triton.token_statistics, hidden, weight, temperature, False
    )
    partials = schedules_alike(tally, "rows", statistics.ROW_SCHEDULES, from_logits)
    drawn = partial(probe, (len(hidden),), torch.float32, device=setup.device)
    top, log_normalizer, entropy = statistics.vocabulary_combine(partials)
    table = token_logprobs_triton.token_gradient_table(
        temperature, top, log_normalizer, entropy, drawn(seed=1), drawn(seed=2), targets, IGNORED
    )
    expected = torch.empty_like(logits, dtype=setup.dtype)
    token_logprobs_triton.token_row_gradient(logits, table, expected, False)

    def gradient(schedule: str) -> Tensor:
        dlogits = torch.empty_like(expected)
        token_logprobs_triton.token_gradient(hidden, weight, table, dlogits, False, schedule)
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
    tally: Tally, setup: OpSetup, layout: Any, rows: int, columns: int, inner: int
) -> bool:
    """Whether the library had a schedule among those compared."""
    launch = launches.product(setup, layout, rows, columns, inner, bias=layout == "nt", every=True)
    whole = launch_alike(tally, launch)
    a, b, *added = launch.operands()
    bias = added[0] if added else None

    def as_dispatched(rows: Tensor) -> Tensor:
        if layout == "nn":
            return matmul_nn(rows, b, out_dtype=a.dtype)
        return matmul_nt(rows, b, bias=bias, out_dtype=a.dtype)

    for count in sorted({1, 2, 16, 65, len(a)}):
        case = f"{launch.name}, {count} rows as dispatched"
        tally.equal(case, whole[:count], as_dispatched(a[:count]))
    if setup.dtype == torch.float32:
        return False
    # Where it is certified, not only where it is the fastest.
    with attribute(cublaslt, "prefers_library", lambda *_: True):
        found = cublaslt.product(a, b, bias, layout, a.dtype)
    if found is not None:
        tally.equal(f"{launch.name}, by the library", whole, found)
    return found is not None


def _compare_attention(
    tally: Tally,
    shape: Heads,
    layout: AttentionLayout,
    operands: tuple[Tensor, Tensor, Tensor],
    table: tuple[attention_schedules.AttentionSchedule, ...],
) -> None:
    settings = (layout, shape.scale, shape.window)
    few = max(layout.query_lens) * (shape.heads // shape.kv_heads) <= 64

    def attended(choice: tuple[attention_schedules.AttentionSchedule, int | Cut]) -> Tensor:
        schedule, programs = choice
        dealt: dict[str, Any] = {
            "cut" if isinstance(programs, Cut) else "programs_per_tile": programs
        }
        found = attention_triton.attention_fwd(*operands, *settings, schedule=schedule, **dealt)
        return torch.cat(of_sequences(layout, *found))

    # Few rows may have their keys spread over several programs.
    entries = attention_schedules.forward_entries(table, operands[0].dtype)
    admitted = [s for s in entries if attention_schedules.admits(s, layout, *operands)]
    choices: list[tuple[attention_schedules.AttentionSchedule, int | Cut]]
    choices = [(s, programs) for programs in ((1, 2, 7) if few else (1,)) for s in admitted]
    group = shape.heads // shape.kv_heads
    for s in admitted:
        if few and s.ring:
            tiles = len(layout.tiles(operands[0].device, group, s.rows)) * shape.kv_heads
            # Some tiles with a program more than others, and some whole.
            choices += [(s, Cut(0, 2 * tiles + tiles // 2)), (s, Cut(tiles // 2, 3 * tiles))]
    queries = "decode" if few else "prefill"
    schedules_alike(tally, f"{shape}, {queries}", choices, attended)


def _compare_shared(
    tally: Tally, shape: Heads, paged: PagedAttention, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The call's first rows as queries of its longest sequence: keys read once, or by each."""
    q, k, v = operands
    longest = max(range(len(paged.context_lens)), key=paged.context_lens.__getitem__)
    count, keys = min(len(q), MOST_SHARERS), paged.context_lens[longest]
    alike = replace(
        paged,
        query_starts=range(count),
        query_lens=[1] * count,
        context_lens=[keys] * count,
        block_tables=[paged.block_tables[longest]] * count,
    )
    entries = [
        s for s in attention_schedules.SHARED if attention_schedules.admits(s, alike, *operands)
    ]
    if shape.window is not None or count < 2 or keys < 2 or not entries:
        return
    layouts = [alike, replace(alike, shared_runs=[SharedRun(0, count, keys - 1)])]

    def attended(choice: tuple[int, attention_schedules.AttentionSchedule | None]) -> Tensor:
        which, schedule = choice
        found = attention_triton.attention_fwd(
            q[:count], k, v, layouts[which], shape.scale, None, shared_schedule=schedule
        )
        return rows_of(*found)

    schedules_alike(
        tally, f"{shape}, shared keys", [(0, None), *((1, s) for s in entries)], attended
    )


def _compare_backward(
    tally: Tally, shape: Heads, layout: PackedSequences, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    settings = (layout, shape.scale, shape.window)
    out, lse = attention_triton.attention_fwd(*operands, *settings)
    do = operands[0]

    def gradients(choice: tuple[str, attention_schedules.AttentionSchedule]) -> Tensor:
        name, schedule = choice
        chosen: dict[str, Any] = {name: schedule}
        found = attention_backward_triton.attention_bwd(
            do, *operands, out, lse, *settings, **chosen
        )
        return rows_of(*found)

    entries = attention_schedules.backward_entries
    by_query = entries(attention_schedules.BACKWARD_QUERIES, do.dtype)
    by_key = entries(attention_schedules.BACKWARD_KEYS, do.dtype)
    choices = [("query_schedule", s) for s in by_query]
    choices += [
        ("key_schedule", s) for s in by_key if attention_schedules.admits(s, layout, do, *operands)
    ]
    schedules_alike(tally, f"{shape}, backward", choices, gradients)
