"""C1 for a GPU's schedules: every entry of a table gives the bytes of every other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases import launches
from rl_consistency.cases.case import Heads
from rl_consistency.cases.experts import EXPERTS, TOP_K, Routing, expert_fold, expert_product
from rl_consistency.cases.launches import Launch, candidates
from rl_consistency.cases.probe import probe, probe_tokens
from rl_consistency.cases.token_logprobs import KINDS, head_probe, sampling_in_turn
from rl_consistency.kernels.attention import backward_triton, forward_triton
from rl_consistency.kernels.attention import layout as layouts
from rl_consistency.kernels.attention import schedules as attention_schedules
from rl_consistency.kernels.attention.paged_cache_triton import write_cache
from rl_consistency.kernels.attention.schedules import Cut, admits
from rl_consistency.kernels.core.device import has_tma, takes_descriptors
from rl_consistency.kernels.experts.pairs_triton import combine_fwd, pair_bwd
from rl_consistency.kernels.experts.route import candidates as router_candidates
from rl_consistency.kernels.experts.route import choose_fwd, logits_bwd
from rl_consistency.kernels.experts.schedules import COMBINE, block_experts, pair_candidates
from rl_consistency.kernels.gradient_fold import rows_triton
from rl_consistency.kernels.gradient_fold.gradient_buffer import accumulator_dtype
from rl_consistency.kernels.linear.schedules import MOST_FUSED_ROWS
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.rms_norm import schedules as rms_norm_schedules
from rl_consistency.kernels.sampling import support_triton, vocabulary_triton
from rl_consistency.kernels.sampling.op import triton_distribution
from rl_consistency.kernels.token_logprobs import head_triton
from rl_consistency.kernels.token_logprobs import schedules as head_schedules
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits
from rl_consistency.verify.checks import attention as packing
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.laws import launch_alike
from rl_consistency.verify.substitution import attribute
from rl_consistency.verify.sweep import MAX_ROWS, OpSetup

LENGTHS = (1, 33, 200, 2300)
"""Sequences of attention, from one block of keys to many."""

ROWS = MAX_ROWS + 3
"""Most rows of ops that treat them one by one: an odd number, ragged for programs of two too."""

SAMPLING_SIZES = (
    (support_triton, "TILE", (512, 1024)),
    (support_triton, "SPLIT_TILE", (128, 256)),
    (support_triton, "SPLIT_BLOCKS", (8, 64)),
    (support_triton, "TOP_BLOCKS", (4, 32)),
    (support_triton, "PIVOTS", (4, 8)),
    (vocabulary_triton, "WEIGHT_BLOCKS", (4, 32)),
    (vocabulary_triton, "PICK_BLOCKS", (256, 512)),
    (vocabulary_triton, "LOGPROB_ROWS", (32, 64)),
)
"""Tiles and splits of sampling: the module and name of each, and other values to compare with."""

HIDDEN, INNER = 640, 448
"""Sizes of the experts, whatever the model. HIDDEN and 2 INNER are multiples of 128, without which
no schedule by descriptor takes weights as [K, N]; both are ragged for the widest tiles."""

SUMMED = 2208
"""Columns of a row's sum: several programs of the narrow schedules, one of the widest."""

ROUTED = 60
"""Experts of the router: ragged, and few enough for every schedule."""

CALLS = {
    1: ([0], [1]),
    4: ([2, 0], [2, 1]),
    17: ([0], [17]),
    300: ([150, 3, 275], [117, 130, 25]),
}
"""Rows of each call, where its sequences begin, and their lengths; the other rows are filler."""


def check_matmul(tally: Tally, setup: OpSetup) -> None:
    """Products of both layouts by every schedule, the library's among them, and as they are
    dispatched for few to many rows."""
    before, by_the_library = audit.schedule_audit(), 0
    with attribute(audit, "AUDIT_EVERY", 1):
        for inner, columns in setup.shapes.linear:
            for layout in ("nt", "nn"):
                by_the_library += _compare_product(tally, setup, layout, columns, inner)
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


def _compare_product(tally: Tally, setup: OpSetup, layout: Any, columns: int, inner: int) -> bool:
    """Whether the library had a schedule among those compared."""
    rows = min(setup.rows, MAX_ROWS)
    launch = launches.product(setup, layout, rows, columns, inner, bias=layout == "nt", every=True)
    (whole,) = launch_alike(tally, launch)
    a, b, *added = launch.operands()
    bias = added[0] if added else None
    dispatched: Any = matmul_nn if layout == "nn" else partial(matmul_nt, bias=bias)
    for count in sorted({1, 2, 16, 65, len(a)}):
        found = dispatched(a[:count], b, out_dtype=a.dtype)
        tally.equal(f"{launch.key}, {count} rows as dispatched", whole[:count], found)
    if setup.dtype == torch.float32:
        return False
    # Where it is certified, not only where it is the fastest.
    with attribute(cublaslt, "prefers_library", lambda *_: True):
        found = cublaslt.product(a, b, bias, layout, a.dtype)
    if found is not None:
        tally.equal(f"{launch.key}, by the library", whole, found)
    return found is not None


def fused_products(setup: OpSetup) -> Iterator[Launch]:
    """q, k, v in one launch and gate, up, silu in another, against the ops they stand for."""
    rows = min(setup.rows, MOST_FUSED_ROWS - 3)  # ragged for every tile
    shape, hidden = setup.shapes.attention[0], setup.shapes.hidden_size
    queries, keys = (n * shape.head_dim for n in (shape.heads, shape.kv_heads))
    yield launches.qkv(setup, rows, (queries, keys, keys), hidden, bias=True)
    yield launches.gate_up(setup, rows, setup.shapes.glu_width, hidden)


def gradient_folds(setup: OpSetup) -> Iterator[Launch]:
    rows = min(setup.rows, MAX_ROWS)
    for inner, columns in setup.shapes.linear:
        yield launches.outer(setup, rows, columns, inner, fresh=False)


def gated(setup: OpSetup) -> Iterator[Launch]:
    for direction in ("forward", "backward"):
        size = min(setup.rows, ROWS), setup.shapes.glu_width
        yield launches.gated(setup, direction, *size, "silu")


def rotation(setup: OpSetup) -> Iterator[Launch]:
    s = setup.shapes.attention[0]
    yield launches.rotation(setup, min(setup.rows, ROWS), s.heads, s.kv_heads, s.head_dim)


def norms(setup: OpSetup) -> Iterator[Launch]:
    """y, dx and the step sums of dweight, with the residual addition; and of several heads a
    token, whose gradients have a kernel of their own."""
    rows, shape = min(setup.rows, ROWS), setup.shapes.attention[0]
    for width, heads in ((setup.shapes.norm_widths[0], 1), (shape.head_dim, shape.heads)):
        adds, table = heads == 1, norm_backward_entries(width, heads)
        yield launches.norm_forward(setup, rows * heads, width, adds=adds)
        yield launches.norm_backward(setup, rows, width, heads, adds=adds, table=table)


def norm_backward_entries(width: int, heads: int) -> list[rms_norm_schedules.NormSchedule | None]:
    """What is compared of the norm's backward pass: None, the kernel for narrow rows, where there
    are several heads; and the chosen schedule and one for each way to go through the rows. There
    are two dozen candidates, which take long to compile."""
    chosen = rms_norm_schedules.pick_backward(width, heads)
    every = (*rms_norm_schedules.candidates(width, heads), chosen)
    entries = {(schedule.split, schedule.stages): schedule for schedule in every}
    return [None, *entries.values()] if heads > 1 else [*entries.values()]


def gradient_rows(setup: OpSetup) -> Iterator[Launch]:
    """A buffer of embedding rows continued over tokens that repeat, ranked and sorted."""
    # What lies between the rows used does not matter.
    height, count = min(setup.shapes.vocab_size, 1000), max(setup.rows, 128)
    width = setup.shapes.hidden_size
    index = torch.tensor(probe_tokens([count], height, seed=2)[0], device=setup.device)
    # One run longer than any that shares a program, and tokens that are left out.
    index[::3], index[::50] = 5, -1
    rows, start = setup.drawn((count, width), 3), setup.wide((height, width), 4)

    def run(choice: tuple[Any, bool], buffer: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        rows_triton.launch_rows(buffer, index, rows, choice[0], ranked=choice[1])
        return buffer

    table = [(s, ranked) for s in rows_triton.CANDIDATES for ranked in (True, False)]
    yield _launch("gradient rows", run, table, start.to(accumulator_dtype(rows)), index, rows)


def token_logprobs(setup: OpSetup) -> Iterator[Launch]:
    """Statistics of the vocabulary and logit gradients: from logits, and fused with the product."""
    hidden, weight, targets = head_probe(setup, min(setup.rows, MAX_ROWS))
    rows = sampling_in_turn(KINDS, len(hidden), setup.device)
    divisor = rows.temperature.masked_fill(rows.temperature == 0, 1.0)
    logits, of_rows = lm_head_logits(hidden, weight), vocabulary_triton

    def from_logits(schedule: str, logits: Tensor, divisor: Tensor) -> Tensor:
        return of_rows.vocabulary_row_statistics(logits, divisor, False, None, schedule)

    yield _launch("row statistics", from_logits, of_rows.ROW_SCHEDULES, logits, divisor)
    if setup.dtype == torch.float32:
        return  # only 16-bit operands have fused schedules
    partials = from_logits(next(iter(of_rows.ROW_SCHEDULES)), logits, divisor)
    top, normalizer, entropy = of_rows.vocabulary_combine(partials)
    given = divisor, top, normalizer, entropy, *(setup.wide((len(hidden),), s) for s in (1, 2))
    make_table: Any = head_triton.token_gradient_table
    table = make_table(*given, targets, IGNORED)
    room = torch.empty_like(logits, dtype=setup.dtype)

    def statistics(schedule: str, hidden: Tensor, weight: Tensor, divisor: Tensor, *_: Tensor):
        return head_triton.token_statistics(hidden, weight, divisor, False, schedule)

    def gradient(schedule: str, hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor):
        head_triton.token_gradient(hidden, weight, table, room, False, schedule)
        return room

    def gradient_of_logits(hidden: Tensor, weight: Tensor, table: Tensor, room: Tensor) -> Tensor:
        head_triton.token_row_gradient(logits, table, room, False)
        return room

    tma, tables = has_tma(setup.device) and takes_descriptors(hidden, weight, room), head_schedules
    for name, entries, run, given, right in (
        ("statistics", tables.STATISTICS_SCHEDULES, statistics, (divisor,), lambda *_: partials),
        ("gradient", tables.GRADIENT_SCHEDULES, gradient, (table, room), gradient_of_logits),
    ):
        usable = [name for name, s in entries.items() if tma or s.kind == "pointer"]
        launch = _launch(f"fused {name}", run, usable, hidden, weight, *given)
        yield replace(launch, ways={"from logits": right})


def check_sampling(tally: Tally, setup: OpSetup) -> None:
    """Supports, drawn tokens and their logprobs for other tiles and splits of the vocabulary."""
    count, vocab_size = min(setup.rows, MAX_ROWS), setup.shapes.vocab_size
    logits = probe((count, vocab_size), torch.float32, seed=1, scale=0.1, device=setup.device)
    logits[::2] = (logits[::2] * 8).round() / 8  # many are equal
    kinds = ({"temperature": 0.7, "top_k": 20}, {"temperature": 1.3, "top_p": 0.9})
    kinds += ({"top_k": 50, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.0}, {})
    rows = sampling_in_turn(kinds, count, setup.device)
    uniforms = torch.arange(count, device=setup.device).double() / count

    def sampled() -> Tensor:
        found = triton_distribution(logits, rows)
        token_ids = found.draw(uniforms)
        logprobs = found.logprobs_of(token_ids).view(torch.int32)
        # Of a support what is in it: a search may end at any key between two logits.
        inside = (found.scaled > -torch.inf).int()
        return torch.cat([token_ids.int()[:, None], logprobs[:, None], inside], dim=1)

    whole = sampled()
    # A size is a constant of its module, so threads cannot compile for several side by side.
    for i in range(2):
        with ExitStack() as stack:
            for module, name, sizes in SAMPLING_SIZES:
                stack.enter_context(attribute(module, name, sizes[i]))
            case = ", ".join(f"{name} {sizes[i]}" for _, name, sizes in SAMPLING_SIZES)
            tally.equal(case, whole, sampled())


def attention(setup: OpSetup) -> Iterator[Launch]:
    """Prefill, decode from the paged cache, and backward by every schedule."""
    tables = attention_schedules
    for shape in setup.shapes.attention:
        samples = packing.attention_probe(shape, LENGTHS, setup)
        layout, qkv = packing.packed(samples)
        yield _attention_forward(shape, layout, qkv, tables.PREFILL)
        yield _attention_backward(shape, layout, qkv)
        parts = [packing.decoded(n)[:2] for n in LENGTHS]
        for call in packing.paged_calls(parts, block_size=16, **packing.cache_of(shape, qkv[0])):
            q, k, v = packing.call_operands(samples, call)
            write_cache(call.paged, 0, k, v)
            given = [q, *packing.cached_rows(call.paged, 0)]
            yield _attention_forward(shape, call.paged, given, tables.DECODE + tables.PREFILL)
            yield from _shared_keys(shape, call.paged, given)


def _attention_forward(
    shape: Heads, layout: layouts.AttentionLayout, operands: Sequence[Tensor], table: Any
) -> Launch:
    group = shape.heads // shape.kv_heads
    few = max(layout.query_lens) * group <= 64

    def attended(choice: tuple[Any, int | Cut], q: Tensor, k: Tensor, v: Tensor) -> Any:
        schedule, programs = choice
        dealt: Any = {"cut" if isinstance(programs, Cut) else "programs_per_tile": programs}
        settings = layout, shape.scale, shape.window
        found = forward_triton.attention_fwd(q, k, v, *settings, schedule=schedule, **dealt)
        return tuple(packing.of_sequences(layout, *found))

    # Few rows may have their keys spread over several programs.
    entries = attention_schedules.forward_entries(table, operands[0].dtype)
    admitted = [s for s in entries if admits(s, layout, *operands)]
    choices: list[Any] = [(s, n) for n in ((1, 2, 7) if few else (1,)) for s in admitted]
    for s in admitted:
        if few and s.ring:
            tiles = len(layout.tiles(operands[0].device, group, s.rows)) * shape.kv_heads
            # Some tiles with a program more than others, and some whole.
            choices += [(s, Cut(0, 2 * tiles + tiles // 2)), (s, Cut(tiles // 2, 3 * tiles))]
    return _launch(f"{shape}, {'decode' if few else 'prefill'}", attended, choices, *operands)


def _attention_backward(
    shape: Heads, layout: layouts.PackedSequences, operands: Sequence[Tensor]
) -> Launch:
    settings, tables = (layout, shape.scale, shape.window), attention_schedules
    do, k, v = operands
    out, lse = forward_triton.attention_fwd(do, k, v, *settings)

    def gradients(choice: tuple[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Any:
        chosen: dict[str, Any] = dict([choice])
        return backward_triton.attention_bwd(q, q, k, v, out, lse, *settings, **chosen)

    by_query = tables.backward_entries(tables.BACKWARD_QUERIES, do.dtype)
    by_key = tables.backward_entries(tables.BACKWARD_KEYS, do.dtype)
    choices = [("query_schedule", s) for s in by_query]
    choices += [("key_schedule", s) for s in by_key if admits(s, layout, do, *operands)]
    return _launch(f"{shape}, backward", gradients, choices, *operands)


def _shared_keys(
    shape: Heads, paged: layouts.PagedAttention, operands: Sequence[Tensor]
) -> Iterator[Launch]:
    """The call's first rows as queries of its longest sequence: keys read once, or by each."""
    q, k, v = operands
    longest = max(range(len(paged.context_lens)), key=paged.context_lens.__getitem__)
    count, keys = min(len(q), layouts.MOST_SHARERS), paged.context_lens[longest]
    spans: Any = {"query_starts": range(count), "query_lens": [1] * count}
    tables = [paged.block_tables[longest]] * count
    alike = replace(paged, **spans, context_lens=[keys] * count, block_tables=tables)
    entries = [s for s in attention_schedules.SHARED if admits(s, alike, *operands)]
    if shape.window is not None or count < 2 or keys < 2 or not entries:
        return
    calls = [alike, replace(alike, shared_runs=[layouts.SharedRun(0, count, keys - 1)])]

    def attended(choice: tuple[int, Any], q: Tensor, k: Tensor, v: Tensor) -> Any:
        layout, options = calls[choice[0]], {"shared_schedule": choice[1]}
        return forward_triton.attention_fwd(q, k, v, layout, shape.scale, None, **options)

    choices = [(0, None), *((1, s) for s in entries)]
    yield _launch(f"{shape}, shared keys", attended, choices, q[:count], k, v)


def router(setup: OpSetup) -> Iterator[Launch]:
    """Ids, weights, probabilities and logit gradients: of logits that differ, that are often equal,
    and of which one is far above the others."""

    def routed(schedule: Any, logits: Tensor, dweights: Tensor, *, normalize: bool) -> Any:
        ids, weights, p = choose_fwd(logits, TOP_K, normalize, schedule)
        kept = None if normalize else p
        dlogits = logits_bwd(dweights, ids, weights, kept, ROUTED, setup.dtype, schedule)
        return ids, weights, dlogits, *(() if kept is None else (kept,))

    for rows in CALLS:
        drawn, dweights = setup.wide((rows, ROUTED), 1, 0.25), setup.wide((rows, TOP_K), 2, 0.02)
        above = drawn.clone()
        above[:, ROUTED // 2] = 60 + above.amax(dim=1)
        kinds = {"distinct": drawn, "often equal": (drawn / 4).round(), "one expert": above}
        for kind, logits in kinds.items():
            for normalize in (True, False):
                name = f"{kind}, {rows} rows{', normalized' if normalize else ''}"
                run = partial(routed, normalize=normalize)
                yield _picked(name, run, router_candidates(block_experts(ROUTED)), logits, dweights)


def experts(setup: OpSetup) -> Iterator[Launch]:
    """Gate, up and their activation; the second product; and a row's sum."""
    for name, routing in _routings(setup.device):
        product = partial(expert_product, setup, **_sizes(routing))
        for recorded in (True, False):
            yield _of(name, product(product="gate_up", n=INNER, k=HIDDEN, recorded=recorded))
        yield _of(name, product(product="nt", n=HIDDEN, k=INNER))
        pairs, places, _ = routing.pairs()
        outputs = setup.drawn((len(pairs), SUMMED), 5)
        for kind, weights in (("sum", None), ("weighted sum", _weights(routing))):
            run = lambda schedule, y, at, w=weights: combine_fwd(y, at, w, schedule)  # noqa: E731
            yield _picked(f"{kind}, {name}", run, COMBINE, outputs, places)


def experts_backward(setup: OpSetup) -> Iterator[Launch]:
    """Both products, what lies between them, and the gradients of both weights."""
    for name, routing in _routings(setup.device):
        product = partial(expert_product, setup, "nn", **_sizes(routing))
        yield _of(f"u, {name}", product(n=INNER, k=HIDDEN, by_row=True))
        yield _pair_gradients(setup, name, routing)
        yield _of(f"dx, {name}", product(n=HIDDEN, k=2 * INNER))
        for fresh in (False, True):
            fold = partial(expert_fold, setup, fresh=fresh, **_sizes(routing))
            case = f"{name}{', from zero' if fresh else ''}"
            yield _of(case, fold(n=2 * INNER, k=HIDDEN))
            yield _of(case, fold(n=HIDDEN, k=INNER, dy_by_row=True))


def _routings(device: torch.device) -> Iterator[tuple[str, Routing]]:
    """Each number of rows: at all experts alike, most rows at few experts, and all at the same."""
    generator, each = torch.Generator().manual_seed(0), torch.arange(TOP_K)
    popular = torch.arange(1, EXPERTS + 1) ** 2
    for rows, spans in CALLS.items():
        drawn = torch.rand(rows, EXPERTS, generator=generator).log() * popular
        for routing, chosen in (
            ("even", (torch.arange(rows)[:, None] + each) % EXPERTS),
            ("skewed", drawn.topk(TOP_K).indices),
            ("one group", each.expand(rows, TOP_K)),
        ):
            ids = chosen.sort(dim=1).values.to(device, torch.int32)
            yield f"{routing}, {rows} rows", Routing(ids, *spans, EXPERTS)


def _sizes(routing: Routing) -> dict[str, Any]:
    return {"rows": len(routing.ids), "top_k": TOP_K, "experts": EXPERTS, "routing": routing}


def _pair_gradients(setup: OpSetup, name: str, routing: Routing) -> Launch:
    pairs, _, first = routing.pairs()
    own = pairs[: routing.count].long()

    def gradients(schedule: Any, packed: Tensor, u: Tensor, weights: Tensor) -> Any:
        dpacked, weighted, dweights = pair_bwd(packed, u, weights, first, pairs, "silu", schedule)
        return dpacked[: len(own)], weighted[: len(own)], dweights.flatten()[own]

    # Where outliers meet, their product must fit fp16.
    packed = setup.drawn((len(pairs), 2 * INNER), 6, 0.05)
    u = setup.drawn((len(pairs), INNER), 7, 1 / 64)
    table = pair_candidates(INNER)
    return _picked(f"pair gradients, {name}", gradients, table, packed, u, _weights(routing))


def _weights(routing: Routing) -> Tensor:
    """[R, k] fp32 with all their digits."""
    generator = torch.Generator().manual_seed(len(routing.ids))
    return torch.rand(routing.ids.shape, generator=generator).to(routing.ids.device)


def _launch(name: str, run: Any, table: Any, *operands: Tensor) -> Launch:
    """A launch that nothing tunes."""
    return Launch(op=name, shape={}, operands=lambda: operands, candidates=candidates(run, table))


def _picked(name: str, run: Any, table: Any, *operands: Tensor) -> Launch:
    """The same of a launcher that picks a schedule where it is given None."""
    ways = {"as picked": partial(run, None)}
    return replace(_launch(name, run, table, *operands), ways=ways)


def _of(name: str, launch: Launch) -> Launch:
    return replace(launch, op=f"{launch.op}, {name}")


def check_launches(tally: Tally, setup: OpSetup, of: Any) -> None:
    for launch in of(setup):
        launch_alike(tally, launch)
