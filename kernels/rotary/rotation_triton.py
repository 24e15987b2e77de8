"""The rotary embedding on CUDA: queries and keys in one launch.

Shapes, dtypes, order, invariance: those of `rotary`. Errors: none.
Cost: memory-bound; q and k are read and written once, cosines and sines read once per token.
"""

# Pyright does not know Triton's launches and constexpr arguments.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, contiguous_format, empty_like

from rl_consistency.kernels.core.findings import choose, picked_once, work_name
from rl_consistency.kernels.core.grid import cdiv, next_power_of_2
from rl_consistency.kernels.core.operand import dense_rows
from rl_consistency.kernels.core.remembered_launch import remembered
from rl_consistency.kernels.core.torch_op import kernel_op


@dataclass(frozen=True)
class Schedule:
    """How programs share the tokens; it changes no bit."""

    tokens: int
    """Tokens of one program."""
    warps: int
    heads: int = 16
    """Heads that a program holds at once."""


SCHEDULE = Schedule(1, 4)
"""The schedule of every shape, but of those that `tune` found another one for."""

CANDIDATES = tuple(
    Schedule(tokens, warps, heads) for tokens in (1, 2, 4) for warps in (4, 8) for heads in (8, 16)
)
"""Schedules to time and to compare."""


def rotary_work(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int) -> str:
    """The work of `pick`, as `tune` names it."""
    return work_name("rotary", dtype, f"h{heads}+{kv_heads}", f"d{dim}", rows=tokens)


@picked_once
def pick(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> Schedule:
    """The schedule for q [tokens, heads, dim] and k [tokens, kv_heads, dim]."""
    work = rotary_work(dtype, tokens, heads, kv_heads, dim)
    return choose(device, work, CANDIDATES) or SCHEDULE


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, token, num_tokens, cos, sin, stride_token, stride_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """All heads of a program's tokens, HEADS at a time."""
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    for first in tl.static_range(0, NUM_HEADS, HEADS):
        head = first + tl.arange(0, HEADS)[None, :, None]
        inside = (token < num_tokens) & (head < NUM_HEADS) & (column < HALF)
        read = x_ptr + token * stride_token + head * stride_head + column
        x1 = tl.load(read, mask=inside, other=0.0).to(tl.float32)  # [TOKENS, HEADS, BLOCK_HALF]
        x2 = tl.load(read + HALF, mask=inside, other=0.0).to(tl.float32)
        written = out_ptr + (token * NUM_HEADS + head) * (2 * HALF) + column
        dtype = out_ptr.dtype.element_ty
        tl.store(written, (x1 * cos - x2 * sin).to(dtype), mask=inside)
        tl.store(written + HALF, (x2 * cos + x1 * sin).to(dtype), mask=inside)


@remembered
@triton.jit(do_not_specialize=["num_tokens"])
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, num_tokens, q_token, q_head, k_token,
    k_head, cos_token, sin_token,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS_OF_Q: tl.constexpr, HEADS_OF_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    inside = (token < num_tokens) & (column < HALF)  # [TOKENS, 1, BLOCK_HALF]
    cos = tl.load(cos_ptr + token * cos_token + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * sin_token + column, mask=inside, other=0.0)
    if INVERSE:
        sin = -sin
    _rotate_heads(q_ptr, q_out_ptr, token, num_tokens, cos, sin, q_token, q_head, Q_HEADS, HALF,
                  TOKENS, HEADS_OF_Q, BLOCK_HALF)  # fmt: skip
    _rotate_heads(k_ptr, k_out_ptr, token, num_tokens, cos, sin, k_token, k_head, K_HEADS, HALF,
                  TOKENS, HEADS_OF_K, BLOCK_HALF)  # fmt: skip


def rotary_fwd(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    inverse: bool,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, Hkv, D] by cos, sin [T, D/2]; backwards for `inverse`."""
    q_out, k_out = _rotary_fake(q, k, cos, sin, inverse)
    if cos.numel() == 0 or q.numel() + k.numel() == 0:
        return q_out, k_out
    q, k, cos, sin = dense_rows(q), dense_rows(k), dense_rows(cos), dense_rows(sin)
    num_tokens, half = cos.shape
    q_heads, k_heads = q.shape[1], k.shape[1]
    if schedule is None:
        schedule = pick(q.dtype, num_tokens, q_heads, k_heads, 2 * half, q.device)
    at_once = schedule.heads
    _rotary_kernel[(cdiv(num_tokens, schedule.tokens),)](
        q, k, cos, sin, q_out, k_out, num_tokens, *q.stride()[:2], *k.stride()[:2], cos.stride(0),
        sin.stride(0),
        Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half, INVERSE=inverse, TOKENS=schedule.tokens,
        HEADS_OF_Q=min(at_once, next_power_of_2(q_heads)),
        HEADS_OF_K=min(at_once, next_power_of_2(k_heads)), BLOCK_HALF=next_power_of_2(half),
        num_warps=schedule.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out


def _rotary_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    rotated = empty_like(q, memory_format=contiguous_format)
    return rotated, empty_like(k, memory_format=contiguous_format)


@kernel_op(fake=_rotary_fake)
def rotary_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool
) -> tuple[Tensor, Tensor]:
    """`rotary_fwd` as a compiler sees it: one opaque call."""
    return rotary_fwd(q, k, cos, sin, inverse)
