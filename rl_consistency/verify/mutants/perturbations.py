"""Ways to make the program wrong, each put back on exit; `mutants` says who must notice.

Every function returns a context manager. Inside it one function of the package, everywhere it is
bound, is replaced by a version with the named defect: on a CPU a part of the order itself, on a GPU
the op as a whole, since nothing smaller than a kernel can be replaced there.
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

from rl_consistency.kernels.attention import cpu as attention_cpu
from rl_consistency.kernels.attention import layout as attention_layout
from rl_consistency.kernels.attention import op as attention
from rl_consistency.kernels.attention.captured_layout import CapturedPagedAttention
from rl_consistency.kernels.embedding import op as embedding_kernel
from rl_consistency.kernels.glu import op as glu
from rl_consistency.kernels.gradient_fold import op as gradient_fold
from rl_consistency.kernels.linear import op as linear_kernel
from rl_consistency.kernels.matmul import op as matmul
from rl_consistency.kernels.reduction import gradient_norm, masked_reduction
from rl_consistency.kernels.reduction import tree_sum as row_reduction
from rl_consistency.kernels.rms_norm import op as rms_norm
from rl_consistency.kernels.rotary import op as rotary
from rl_consistency.kernels.token_logprobs import op as token_logprobs_kernel
from rl_consistency.models import forward
from rl_consistency.models.stock_attention import stock_attention, stock_captured_attention
from rl_consistency.numerics import fingerprint as fingerprint_module
from rl_consistency.rollout.device import random_stream, sampler
from rl_consistency.verify.mutants.blockwise_attention import blockwise_attention
from rl_consistency.verify.substitution import attribute, substituted

FEW_ROWS = 40
"""Rows below which a row-dependent schedule switches; a packed sequence has at least 16."""


@contextmanager
def split_k_for_few_rows() -> Iterator[None]:
    original, nt, nn = matmul.row_matmul, matmul.matmul_nt, matmul.matmul_nn

    def mutant(a: Tensor, b: Tensor) -> Tensor:
        if len(a) >= FEW_ROWS:
            return original(a, b)
        half = a.shape[1] // 2
        return original(a[:, :half], b[:half]) + original(a[:, half:], b[half:])

    def halves(a: Tensor, b: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
        half = a.shape[1] // 2
        total = nt(a[:, :half], b[:, :half]) + nt(a[:, half:], b[:, half:])
        total = total if bias is None else total + bias.float()
        return total.to(options.get("out_dtype", torch.float32))

    def few_nt(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        return (halves if len(a) < FEW_ROWS else nt)(a, b, **options)

    def few_nn(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        return halves(a, b.t(), **options) if len(a) < FEW_ROWS else nn(a, b, **options)

    with substituted(original, mutant), _on_gpu(nt, few_nt), _on_gpu(nn, few_nn):
        yield


@contextmanager
def library_tile_for_few_rows() -> Iterator[None]:
    original, nt = matmul.row_matmul, matmul.matmul_nt

    def mutant(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.float(), b.float()) if len(a) < 8 else original(a, b)

    def library(a: Tensor, b: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
        if len(a) >= 8:
            return nt(a, b, bias=bias, **options)
        return F.linear(a, b, bias).to(options.get("out_dtype", torch.float32))

    with substituted(original, mutant), _on_gpu(nt, library):
        yield


@contextmanager
def key_block_by_length() -> Iterator[None]:
    original = attention._forward

    def mutant(q: Tensor, k: Tensor, v: Tensor, layout: Any, scale: float, window: Any) -> Any:
        if max(layout.context_lens, default=0) <= 128:
            return original(q, k, v, layout, scale, window)
        halved = replace(layout)  # without the tile plans of the other block size
        with (
            attribute(attention_cpu, "KEY_BLOCK", 32),
            attribute(attention_layout, "KEY_BLOCK", 32),
        ):
            return original(q, k, v, halved, scale, window)

    def on_gpu(q: Tensor, k: Tensor, v: Tensor, layout: Any, scale: float, window: Any) -> Any:
        if max(layout.context_lens, default=0) <= 128:
            return None
        return blockwise_attention(q, k, v, layout, scale, window, block=32)

    with substituted(original, mutant), _other_attention(on_gpu):
        yield


@contextmanager
def keys_anchored_at_padding() -> Iterator[None]:
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
            visible = attention_cpu.visible(positions, torch.zeros(1), None) & (
                (keys >= 0)[:, None] & (keys[:, None] <= positions[..., None])
            )
            if window is not None:
                visible &= positions[..., None] - keys[:, None] < window
            rows = plan.key_rows[sequence].gather(1, keys.clamp(0, plan.key_rows.shape[1] - 1))
            m, length, acc = attention_cpu._fold_block(
                q, k[rows], v[rows], visible, m, length, acc, scale
            )
        out = acc / length.masked_fill(length == 0, 1.0).unsqueeze(-1) + 0.0
        return out, m + torch.log(length)

    def on_gpu(q: Tensor, k: Tensor, v: Tensor, layout: Any, scale: float, window: Any) -> Any:
        return blockwise_attention(q, k, v, layout, scale, window, at_padding=True)

    with substituted(attention_cpu._fold_tiles, mutant), _other_attention(on_gpu):
        yield


def stock_decode() -> AbstractContextManager[None]:
    def mutant(
        q: Tensor, paged: Any, layer: int, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(paged, CapturedPagedAttention):
            out = stock_captured_attention(q, paged, layer, scale=scale, window=window)
        else:
            caches = (paged.key_cache[layer], paged.value_cache[layer])
            k, v = (cache.view(-1, *cache.shape[2:]) for cache in caches)
            out = stock_attention(q, k, v, paged, scale=scale, window=window)
        return out, torch.zeros(q.shape[:2], device=q.device)

    return substituted(attention.attention_paged, mutant)


@contextmanager
def library_row_sums_in_large_calls() -> Iterator[None]:
    original = row_reduction.tree_sum

    def mutant(x: Tensor, dim: int = -1) -> Tensor:
        return x.sum(dim) if len(x) > 40 else original(x, dim)

    def on_gpu(q: Tensor, k: Tensor, v: Tensor, layout: Any, scale: float, window: Any) -> Any:
        if len(q) <= 40:
            return None
        return blockwise_attention(q, k, v, layout, scale, window, block=max(layout.context_lens))

    with attribute(attention_cpu, "tree_sum", mutant), _other_attention(on_gpu):
        yield


@contextmanager
def library_silu() -> Iterator[None]:
    original, whole = glu._activate, glu.glu

    def mutant(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        value, derivative = original(x, activation)
        return (F.silu(x) if activation == "silu" else value), derivative

    def in_few_rows(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
        if activation != "silu" or len(gate) >= FEW_ROWS:
            return whole(gate, up, activation)
        return F.silu(gate) * up

    with substituted(original, mutant), _on_gpu(whole, in_few_rows):
        yield


@contextmanager
def norm_reduced_over_the_batch() -> Iterator[None]:
    original, whole = row_reduction.tree_sum, rms_norm.rms_norm

    def mutant(x: Tensor, dim: int = -1) -> Tensor:
        # One accumulator per chunk of columns; how many chunks depends on the rows of the call.
        chunks = 2 if x.numel() // x.shape[dim] < FEW_ROWS else 3
        return torch.stack([original(part, dim) for part in x.chunk(chunks, dim=dim)]).sum(0)

    def in_few_rows(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
        if x.numel() // x.shape[-1] >= FEW_ROWS:
            return whole(x, weight, eps, **options)
        wide = x.float()
        halves = [part.square().sum(-1, keepdim=True) for part in wide.chunk(2, dim=-1)]
        rstd = 1.0 / ((halves[0] + halves[1]) / x.shape[-1] + eps).sqrt()
        return (wide * rstd * weight.float()).to(x.dtype)

    with attribute(rms_norm, "tree_sum", mutant), _on_gpu(whole, in_few_rows):
        yield


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
            flat = gradient.detach().float().flatten()
            total = total.to(flat.device)
            if not flat.is_cuda:
                for part in flat.chunk(torch.get_num_threads()):
                    total = total + torch.dot(part, part)
            # A GPU has no such number; there the order follows how the tensor is stored.
            elif gradient.is_contiguous() and gradient.data_ptr() % 64 == 0:
                total = total + torch.dot(flat, flat)
            else:
                squares = flat.square().cpu().numpy()
                total = total + float(np.cumsum(squares, dtype=np.float32)[-1])
        return total.sqrt()

    return substituted(gradient_norm.gradient_norm, mutant)


def random_stream_per_row() -> AbstractContextManager[None]:
    original = random_stream.device_uniforms

    def mutant(keys: Tensor, positions: Tensor) -> Tensor:
        row = torch.arange(len(keys), device=keys.device)[:, None]
        seed, other = keys[:, :2], torch.zeros_like(row)
        return original(torch.cat([seed, other, row, other], dim=1), positions)

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

    def fold_rows(buffer: Tensor, index: Tensor, rows: Tensor, **options: Any) -> None:
        folded(buffer, index, rows, **options)
        buffer.copy_(buffer.bfloat16())

    def as_a_whole(op: Callable[..., Any]) -> Callable[..., Any]:
        def mutant(*args: Any, **kwargs: Any) -> Any:
            found = op(*args, **kwargs)
            parts = (found,) if isinstance(found, Tensor) else found
            coarse = tuple(x.bfloat16().to(x.dtype) for x in parts)
            return coarse[0] if isinstance(found, Tensor) else coarse

        return mutant

    activated, folded = glu._activate, gradient_fold.fold_rows
    sums = (matmul.row_matmul, matmul.tile_matmul, row_reduction.tree_sum, rotary.rotary_table)
    with ExitStack() as stack:
        for function in sums:
            stack.enter_context(substituted(function, rounded(function)))
        stack.enter_context(substituted(activated, activate))
        stack.enter_context(substituted(folded, fold_rows))
        for op in (
            linear_kernel.linear,
            rms_norm.rms_norm,
            rotary.rotary,
            glu.glu,
            attention.attention_varlen,
            token_logprobs_kernel.token_logprobs,
        ):
            stack.enter_context(_on_gpu(op, as_a_whole(op)))
        yield


def _on_gpu(original: Callable[..., Any], mutant: Callable[..., Any]) -> Any:
    """`mutant` in place of `original` where the first operand lies on a GPU."""

    def chosen(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (mutant if first.is_cuda else original)(first, *args, **kwargs)

    return substituted(original, chosen)


@contextmanager
def _other_attention(attend: Callable[..., tuple[Tensor, Tensor] | None]) -> Iterator[None]:
    """On a GPU: packed and paged attention by `attend`, or as ever where it gives None."""
    varlen, paged = attention.attention_varlen, attention.attention_paged

    def packed(
        q: Tensor, k: Tensor, v: Tensor, layout: Any, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        found = attend(q, k, v, layout, scale, window)
        return varlen(q, k, v, layout, scale=scale, window=window) if found is None else found

    def cached(
        q: Tensor, layout: Any, layer: int, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        caches = (layout.key_cache[layer], layout.value_cache[layer])
        k, v = (cache.view(-1, *cache.shape[2:]) for cache in caches)
        found = attend(q, k, v, layout, scale, window)
        return paged(q, layout, layer, scale=scale, window=window) if found is None else found

    with _on_gpu(varlen, packed), _on_gpu(paged, cached):
        yield
