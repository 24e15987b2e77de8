"""C1 for attention: prefill, chunks and decode, packed and paged, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.verify.checks.op_setup import Heads, OpSetup
from rl_consistency.verify.checks.paged_calls import chunked, decoded, paged_calls
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.probe import probe

SCORE_SCALE = 0.06
"""Factor on probes: softmax weights then span several orders of magnitude, gradients stay in the
range of fp16."""


def check_attention(tally: Tally, setup: OpSetup) -> None:
    """Packed sequences: outputs and lse."""
    for shape in setup.shapes.attention:
        samples = attention_probe(shape, setup.sweep.sample_lengths(), setup)
        alone = [packed_attention(shape, [s])[0] for s in samples]
        for name, calls in setup.sweep.arrangements():
            for gap in (0, 2) if name == "permuted batch" else (0,):
                for members in calls:
                    found = packed_attention(shape, [samples[i] for i in members], gap)
                    for i, rows in zip(members, found, strict=True):
                        _compare(tally, f"{shape}, {name}", i, alone[i], rows)


def check_attention_backward(tally: Tally, setup: OpSetup) -> None:
    """dq, dk and dv of packed sequences."""
    for shape in setup.shapes.attention:
        samples = attention_probe(shape, setup.sweep.sample_lengths(), setup)
        alone = [_gradients(shape, [s])[0] for s in samples]
        for name, calls in setup.sweep.arrangements():
            for members in calls if name == "permuted batch" else calls[:4]:
                found = _gradients(shape, [samples[i] for i in members])
                for i, rows in zip(members, found, strict=True):
                    _compare(tally, f"{shape}, {name}", i, alone[i], rows)


def check_paged_attention(tally: Tally, setup: OpSetup) -> None:
    """The paged cache against packed prefill: every chunk size, block size, and decode."""
    sweep, sizes = setup.sweep, setup.sweep.cache_blocks
    plans: list[tuple[str, int, Callable[[int], list[int]]]] = [
        (f"chunk {c}", c, lambda n, c=c: chunked(n, c)) for c in sweep.chunks
    ]
    plans.append(("decode", max(sweep.sample_lengths()), decoded))
    plans += [("prefill", max(sweep.sample_lengths()), lambda n: [n]) for _ in sizes]
    for shape in setup.shapes.attention:
        samples = attention_probe(shape, sweep.sample_lengths(), setup)
        alone = [packed_attention(shape, [s])[0] for s in samples]
        for turn, (name, chunk, cut) in enumerate(plans):
            size = sizes[turn % len(sizes)]
            members = sweep.paged_samples(chunk)
            found = _paged_attention(
                shape,
                [samples[i] for i in members],
                [cut(len(samples[i][0])) for i in members],
                size,
            )
            for i, rows in zip(members, found, strict=True):
                _compare(tally, f"{shape}, {name}, cache blocks of {size}", i, alone[i], rows)


def attention_probe(
    shape: Heads, lengths: Sequence[int], setup: OpSetup
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q [n, H, D], k and v [n, Hkv, D]) per sample."""

    def drawn(length: int, heads: int, seed: int) -> Tensor:
        size = (length, heads, shape.head_dim)
        return probe(size, setup.dtype, seed=seed, scale=SCORE_SCALE, device=setup.device)

    return [
        (
            drawn(n, shape.heads, 3 * i),
            drawn(n, shape.kv_heads, 3 * i + 1),
            drawn(n, shape.kv_heads, 3 * i + 2),
        )
        for i, n in enumerate(lengths)
    ]


def packed_attention(
    shape: Heads, samples: Sequence[tuple[Tensor, Tensor, Tensor]], gap: int = 0
) -> list[Tensor]:
    """[n, H * (D + 1)] fp32 per sample: outputs, then lse."""
    starts, (q, k, v) = _pack(samples, gap)
    lens = [len(s[0]) for s in samples]
    layout = PackedSequences.of(starts, lens)
    out, lse = attention_varlen(q, k, v, layout, scale=shape.scale, window=shape.window)
    rows = torch.cat([out.float().flatten(1), lse], dim=1)
    return [rows[start : start + n] for start, n in zip(starts, lens, strict=True)]


def _gradients(shape: Heads, samples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """[n, (H + 2 Hkv) * D] fp32 per sample."""
    starts, operands = _pack(samples, 0)
    lens = [len(s[0]) for s in samples]
    q, k, v = (x.requires_grad_() for x in operands)
    layout = PackedSequences.of(starts, lens)
    out, _ = attention_varlen(q, k, v, layout, scale=shape.scale, window=shape.window)
    out.backward(q.detach())
    rows = torch.cat([x.grad.float().flatten(1) for x in (q, k, v) if x.grad is not None], dim=1)
    return [rows[start : start + n] for start, n in zip(starts, lens, strict=True)]


def _paged_attention(
    shape: Heads,
    samples: Sequence[tuple[Tensor, Tensor, Tensor]],
    schedules: list[list[int]],
    block_size: int,
) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in samples]
    for call in paged_calls(
        schedules,
        block_size=block_size,
        num_layers=1,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=samples[0][0].dtype,
        device=samples[0][0].device,
    ):
        q, k, v = (
            torch.cat([samples[i][j][start:end] for i, start, end in call.spans]) for j in range(3)
        )
        call.paged.write(0, k, v)
        out, lse = attention_paged(q, call.paged, 0, scale=shape.scale, window=shape.window)
        rows = torch.cat([out.float().flatten(1), lse], dim=1)
        lens = [end - start for _, start, end in call.spans]
        for (i, _, _), part in zip(call.spans, rows.split(lens), strict=True):
            parts[i].append(part)
    return [torch.cat(p) for p in parts]


def _pack(
    samples: Sequence[tuple[Tensor, Tensor, Tensor]], gap: int
) -> tuple[list[int], list[Tensor]]:
    """First rows, and q, k, v with every sample on a multiple of 16 and `gap` steps between."""
    starts, end = [], 0
    for sample in samples:
        starts.append(end + gap * STEP)
        end = starts[-1] + -(-len(sample[0]) // STEP) * STEP
    operands = [x.new_zeros(end, *x.shape[1:]) for x in samples[0]]
    for start, sample in zip(starts, samples, strict=True):
        for operand, part in zip(operands, sample, strict=True):
            operand[start : start + len(part)] = part
    return starts, operands


def _compare(tally: Tally, case: str, sample: int, expected: Tensor, actual: Tensor) -> None:
    tally.equal(case, expected, actual, lambda row: f"sample {sample} position {row}")
