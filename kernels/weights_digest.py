"""SHA-256 of names, dtypes, shapes and exact 128-bit sums over the bytes of tensors.

Shapes: any number of named tensors of any shape, dtype and strides -> 64 hexadecimal digits.
Dtypes and rounding points: integers only; a tensor is read as 32-bit words, the last one filled
    with zeros.
Order: none. Word w at index i counts mix((i << 32) | w), and a second mix of that; both are added
    modulo 2**64, so in any order.
Invariant to: device, strides, order of the tensors, how they are cut up.
Varies with: every bit, where it stands, names, shapes, dtypes.
Backward: none.
Errors: ValueError on a name given twice and on tensors beyond 16 GiB.
Cost: one read of the weights; on CUDA one launch a tensor and one wait for them all.

It tells equal weights from different ones. It is no defence against weights that somebody made to
collide.

Source: the mix is the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", OOPSLA 2014), with the constants of its variant 13.
"""

# Kernels are launched through Triton's indexing, which type stubs describe as plain functions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_consistency.kernels.cuda_device import sm_count
from rl_consistency.kernels.library import kernel_op

WORD_BYTES = 4

MAX_BYTES = WORD_BYTES << 32
"""An index has 32 bits."""

CPU_CHUNK = 1 << 16
"""Words that a CPU mixes together: what it reads and writes stays in its cache."""

TILE = 1024
"""Words of one step of a program."""

PROGRAMS_PER_SM = 8

MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Of the mix's two steps, and of the second mix."""

_MASK = 2**64 - 1
FIRST = tl.constexpr(MULTIPLIERS[0])
SECOND = tl.constexpr(MULTIPLIERS[1])
THIRD = tl.constexpr(MULTIPLIERS[2])


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of named tensors, such as `model.named_parameters()`: 64 hexadecimal digits.

    The same bytes have the same digest wherever they lie. Of tensors on CUDA the host waits once
    per device.
    """
    entries: dict[str, tuple[str, list[int]]] = {}
    pieces: dict[torch.device, list[tuple[str, Tensor, int]]] = {}
    for name, tensor in named:
        if name in entries:
            raise ValueError(f"weights digest: two tensors are named {name!r}; names are unique.")
        entries[name] = (str(tensor.dtype), list(tensor.shape))
        for words, first in _words(name, tensor.detach()):
            pieces.setdefault(words.device, []).append((name, words, first))
    sums = {name: [0, 0] for name in entries}
    for of_device in pieces.values():
        for (name, _, _), found in zip(of_device, _sums(of_device), strict=True):
            sums[name] = [(a + b) & _MASK for a, b in zip(sums[name], found, strict=True)]
    listed = [[name, *entries[name], *sums[name]] for name in sorted(entries)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _words(name: str, tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The tensor's bytes in order as (int32 words, index of the first)."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if len(flat) > MAX_BYTES:
        raise ValueError(
            f"weights digest: {name!r} has {len(flat)} bytes; allowed: up to {MAX_BYTES}."
        )
    whole = len(flat) // WORD_BYTES
    body, rest = flat[: whole * WORD_BYTES], flat[whole * WORD_BYTES :]
    if whole:
        if body.storage_offset() % WORD_BYTES or body.data_ptr() % WORD_BYTES:
            body = body.clone()
        yield body.view(torch.int32), 0
    if len(rest):
        yield torch.cat([rest, rest.new_zeros(WORD_BYTES - len(rest))]).view(torch.int32), whole


def _sums(pieces: list[tuple[str, Tensor, int]]) -> list[list[int]]:
    """Both sums of each piece, modulo 2**64; the pieces lie on one device."""
    if pieces[0][1].is_cuda:
        table = words_table([words for _, words, _ in pieces], [first for _, _, first in pieces])
        return table.sum(dim=1).tolist()
    return [_cpu_sums(words, first) for _, words, first in pieces]


def _cpu_sums(words: Tensor, first: int) -> list[int]:
    steps = torch.arange(CPU_CHUNK) << 32
    totals = torch.zeros(2, dtype=torch.int64)
    for start in range(0, len(words), CPU_CHUNK):
        chunk = words[start : start + CPU_CHUNK].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        # The shifted index wraps at 2**64 as everything here does.
        x = chunk.add_(steps[: len(chunk)]).add_(_signed((first + start) << 32))
        x = _spread(x, 30).mul_(_signed(MULTIPLIERS[0]))
        x = _spread(x, 27).mul_(_signed(MULTIPLIERS[1]))
        x = _spread(x, 31)
        totals[0] += x.sum()
        x = _spread(_spread(x, 32).mul_(_signed(MULTIPLIERS[2])), 29)
        totals[1] += x.sum()
    return totals.tolist()


def _spread(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) of unsigned numbers held in int64, in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


@triton.jit(do_not_specialize=["first", "num_tiles"])
def words_kernel(words, table, num_words, first, num_tiles, programs, TILE: tl.constexpr):
    """Both sums over every `programs`-th tile of the words: table [programs, 2] int64."""
    program = tl.program_id(0)
    lane = tl.arange(0, TILE).to(tl.int64)
    width = tl.full((), TILE, tl.int64)
    once = tl.zeros((TILE,), tl.uint64)
    twice = tl.zeros((TILE,), tl.uint64)
    for tile in range(program, num_tiles, programs):
        index = tile * width + lane
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0).to(tl.uint32, bitcast=True)
        x = ((index + first).to(tl.uint64) << 32) | word.to(tl.uint64)
        x = (x ^ (x >> 30)) * FIRST
        x = (x ^ (x >> 27)) * SECOND
        x = x ^ (x >> 31)
        once += tl.where(inside, x, 0)
        x = (x ^ (x >> 32)) * THIRD
        twice += tl.where(inside, x ^ (x >> 29), 0)
    at = table + program * 2
    tl.store(at, tl.sum(once).to(tl.int64, bitcast=True))
    tl.store(at + 1, tl.sum(twice).to(tl.int64, bitcast=True))


def _table_fake(words: list[Tensor], firsts: list[int]) -> Tensor:
    return torch.empty(
        (len(words), _programs(words[0]), 2), dtype=torch.int64, device=words[0].device
    )


@kernel_op(fake=_table_fake)
def words_table(words: list[Tensor], firsts: list[int]) -> Tensor:
    """Partial sums of pieces of int32 words that begin at indices `firsts`: [pieces, programs, 2]
    int64, to be added up over the programs modulo 2**64."""
    programs = _programs(words[0])
    table = torch.empty((len(words), programs, 2), dtype=torch.int64, device=words[0].device)
    options: dict[str, Any] = {"TILE": TILE, "num_warps": 4}
    for i, (piece, first) in enumerate(zip(words, firsts, strict=True)):
        tiles = triton.cdiv(len(piece), TILE)
        words_kernel[(programs,)](piece, table[i], len(piece), first, tiles, programs, **options)
    return table


def _programs(words: Tensor) -> int:
    return PROGRAMS_PER_SM * sm_count(words.device)
