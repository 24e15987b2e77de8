"""Ways to make the program wrong, each put back on exit; `mutants` says who must notice.

Every function returns a context manager. Inside it one function of the package, everywhere it is
bound, is replaced by a version with the named defect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels import (
    attention,
    attention_layout,
    glu,
    gradient_fold,
    gradient_norm,
    masked_reduction,
    matmul,
    rms_norm,
    rotary,
    row_reduction,
)
from rl_consistency.kernels import embedding as embedding_kernel
from rl_consistency.models import forward, packing
from rl_consistency.models.stock_attention import stock_attention
from rl_consistency.numerics import fingerprint as fingerprint_module
from rl_consistency.parity.substitution import attribute, substituted
from rl_consistency.rollout import random_stream, sampler

FEW_ROWS = 40
"""Rows below which a row-dependent schedule switches; a packed sequence has at least 16."""


def split_k_for_few_rows() -> AbstractContextManager[None]:
    original = matmul.row_matmul

    def mutant(a: Tensor, b: Tensor) -> Tensor:
        if len(a) >= FEW_ROWS:
            return original(a, b)
        half = a.shape[1] // 2
        return original(a[:, :half], b[:half]) + original(a[:, half:], b[half:])

    return substituted(original, mutant)


def library_tile_for_few_rows() -> AbstractContextManager[None]:
    original = matmul.row_matmul

    def mutant(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.float(), b.float()) if len(a) < 8 else original(a, b)

    return substituted(original, mutant)


@contextmanager
def key_block_by_length() -> Iterator[None]:
    original = attention._forward

    def mutant(q: Tensor, k: Tensor, v: Tensor, layout: Any, scale: float, window: Any) -> Any:
        if max(layout.context_lens, default=0) <= 128:
            return original(q, k, v, layout, scale, window)
        halved = replace(layout)  # without the tile plans of the other block size
        with attribute(attention, "KEY_BLOCK", 32), attribute(attention_layout, "KEY_BLOCK", 32):
            return original(q, k, v, halved, scale, window)

    with substituted(original, mutant):
        yield


def keys_anchored_at_padding() -> AbstractContextManager[None]:
    def mutant(
        queries: Tensor, k: Tensor, v: Tensor, plan: Any, tiles: Tensor, scale: float, window: Any
    ) -> tuple[Tensor, Tensor]:
        block_size = attention_layout.KEY_BLOCK
        q = queries[plan.query_rows[tiles]].transpose(1, 2).float().contiguous()
        positions, sequence = plan.query_positions[tiles], plan.sequence[tiles]
        # Left padding to the call's longest sequence shifts where a sequence's blocks begin.
        last = torch.zeros(len(plan.key_rows), dtype=torch.int64)
        last.scatter_reduce_(0, plan.sequence, plan.query_positions.amax(1), "amax")
        shift = ((last.max() - last) % block_size)[sequence]
        m = q.new_full(q.shape[:-1], -torch.inf)
        length, acc = torch.zeros_like(m), torch.zeros_like(q)
        for block in range(int(plan.last_block.max()) + 2):
            keys = torch.arange(block_size) + block * block_size - shift[:, None]
            visible = attention._visible(positions, torch.zeros(1), None) & (
                (keys >= 0)[:, None] & (keys[:, None] <= positions[..., None])
            )
            if window is not None:
                visible &= positions[..., None] - keys[:, None] < window
            rows = plan.key_rows[sequence].gather(1, keys.clamp(0, plan.key_rows.shape[1] - 1))
            m, length, acc = attention._fold_block(
                q, k[rows], v[rows], visible, m, length, acc, scale
            )
        out = acc / length.masked_fill(length == 0, 1.0).unsqueeze(-1) + 0.0
        return out, m + torch.log(length)

    return substituted(attention._fold_tiles, mutant)


def stock_decode() -> AbstractContextManager[None]:
    def mutant(
        q: Tensor, paged: Any, layer: int, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        caches = (paged.key_cache[layer], paged.value_cache[layer])
        k, v = (cache.view(-1, *cache.shape[2:]) for cache in caches)
        out = stock_attention(q, k, v, paged, scale=scale, window=window)
        return out, torch.zeros(q.shape[:2])

    return substituted(attention.attention_paged, mutant)


def library_row_sums_in_large_calls() -> AbstractContextManager[None]:
    original = row_reduction.tree_sum
    return attribute(
        attention, "tree_sum", lambda x, dim=-1: x.sum(dim) if len(x) > 40 else original(x, dim)
    )


def library_silu() -> AbstractContextManager[None]:
    original = glu._activate

    def mutant(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        value, derivative = original(x, activation)
        return (F.silu(x) if activation == "silu" else value), derivative

    return substituted(original, mutant)


def norm_reduced_over_the_batch() -> AbstractContextManager[None]:
    original = row_reduction.tree_sum

    def mutant(x: Tensor, dim: int = -1) -> Tensor:
        # One accumulator per chunk of columns; how many chunks depends on the rows of the call.
        chunks = 2 if x.numel() // x.shape[dim] < FEW_ROWS else 3
        return torch.stack([original(part, dim) for part in x.chunk(chunks, dim=dim)]).sum(0)

    return attribute(rms_norm, "tree_sum", mutant)


def rope_scaled_by_length() -> AbstractContextManager[None]:
    original = rotary.rotary_table

    def mutant(inv_freq: Tensor, num_positions: int, scaling: float = 1.0) -> Tensor:
        return original(inv_freq * min(1.0, 256 / num_positions) ** 0.01, num_positions, scaling)

    return substituted(original, mutant)


def embedding_quantized_per_call() -> AbstractContextManager[None]:
    original = embedding_kernel.embedding

    def mutant(*args: Any, **kwargs: Any) -> Tensor:
        rows = original(*args, **kwargs)
        step = rows.detach().abs().amax() / 32767
        return rows + ((rows.detach() / step).round() * step - rows.detach())

    return substituted(original, mutant)


def padding_takes_part_in_reductions() -> AbstractContextManager[None]:
    def mutant(values: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return values.flatten()
        return values.masked_fill(~mask.bool(), 0.0).flatten()

    return substituted(masked_reduction._active, mutant)


def norm_split_over_threads() -> AbstractContextManager[None]:
    def mutant(gradients: Iterable[Tensor]) -> Tensor:
        total = torch.zeros(())
        for gradient in gradients:
            for part in gradient.detach().float().flatten().chunk(torch.get_num_threads()):
                total = total + torch.dot(part, part)
        return total.sqrt()

    return substituted(gradient_norm.gradient_norm, mutant)


@contextmanager
def gradients_added_up_per_call() -> Iterator[None]:
    original = gradient_fold.fold_outer

    def outer(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
        fresh = torch.zeros_like(buffer)
        original(fresh, dy, x)
        buffer.add_(fresh)

    def columns(buffer: Tensor, rows: Tensor, *, rows_per_token: int = 1) -> None:
        del rows_per_token
        buffer.copy_(buffer.float() + rows.float().sum(dim=0))

    with substituted(original, outer), substituted(gradient_fold.fold_columns, columns):
        yield


@contextmanager
def fold_steps_in_any_order() -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    outer, columns = gradient_fold.fold_outer, gradient_fold.fold_columns

    def shuffled(rows: int, step: int) -> Tensor:
        whole = torch.arange(rows // step * step).view(-1, step)
        mixed = whole[torch.randperm(len(whole), generator=generator)].flatten()
        return torch.cat([mixed, torch.arange(len(mixed), rows)])

    def mutant_outer(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
        order = shuffled(len(dy), gradient_fold.STEP)
        outer(buffer, dy[order], x[order])

    def mutant_columns(buffer: Tensor, rows: Tensor, *, rows_per_token: int = 1) -> None:
        order = shuffled(len(rows), gradient_fold.STEP * rows_per_token)
        columns(buffer, rows[order], rows_per_token=rows_per_token)

    with substituted(outer, mutant_outer), substituted(columns, mutant_columns):
        yield


def sequences_not_aligned() -> AbstractContextManager[None]:
    return attribute(packing, "ALIGNMENT", 1)


def embedding_gradient_in_any_order() -> AbstractContextManager[None]:
    original = gradient_fold.fold_rows
    generator = torch.Generator().manual_seed(0)

    def mutant(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
        order = torch.randperm(len(index), generator=generator)
        original(buffer, index[order], rows[order])

    return substituted(original, mutant)


def tied_weights_share_a_buffer() -> AbstractContextManager[None]:
    def mutant(
        cls: type[gradient_fold.GradientBuffer], parameter: Any, count: int
    ) -> list[gradient_fold.GradientBuffer]:
        return [cls(parameter)] * count

    return attribute(gradient_fold.GradientBuffer, "for_uses", classmethod(mutant))


def random_stream_per_row() -> AbstractContextManager[None]:
    original = random_stream.uniforms

    def mutant(seeds: Any, prompt_ids: Any, sample_indices: Any, positions: Any) -> Any:
        del prompt_ids, sample_indices
        rows = np.arange(len(seeds))
        return original(seeds, rows, np.zeros_like(rows), positions)

    return substituted(original, mutant)


def rollout_logits_rounded() -> AbstractContextManager[None]:
    original = forward.lm_head_logits
    return attribute(
        forward, "lm_head_logits", lambda hidden, w: original(hidden, w).bfloat16().float()
    )


def rollout_has_its_own_distribution() -> AbstractContextManager[None]:
    original = sampler.distribution

    def mutant(logits: Tensor, rows: Any) -> Any:
        found = original(logits, rows)
        return replace(found, log_normalizer=found.scaled.logsumexp(dim=1))

    return attribute(sampler, "distribution", mutant)


def fingerprint_without_orders() -> AbstractContextManager[None]:
    original = fingerprint_module.fingerprint

    def mutant(device: torch.device | str = "cpu") -> fingerprint_module.Fingerprint:
        entries = original(device).entries
        return fingerprint_module.Fingerprint(
            {name: value for name, value in entries.items() if not name.startswith("order.")}
        )

    return substituted(original, mutant)


@contextmanager
def sums_in_half_precision() -> Iterator[None]:
    """Every sum passes through bf16 once more than it should."""

    def rounded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: function(*args, **kwargs).bfloat16().float()

    def activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        value, derivative = activated(x, activation)
        return value.bfloat16().float(), derivative.bfloat16().float()

    def fold_rows(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
        folded(buffer, index, rows)
        buffer.copy_(buffer.bfloat16())

    activated, folded = glu._activate, gradient_fold.fold_rows
    sums = (matmul.row_matmul, matmul.tile_matmul, row_reduction.tree_sum, rotary.rotary_table)
    with ExitStack() as stack:
        for function in sums:
            stack.enter_context(substituted(function, rounded(function)))
        stack.enter_context(substituted(activated, activate))
        stack.enter_context(substituted(folded, fold_rows))
        yield
