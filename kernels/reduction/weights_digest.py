"""SHA-256 of names, dtypes, shapes and exact 128-bit sums over the bytes of tensors.

Shapes: any number of named tensors of any shape, dtype and strides -> 64 hexadecimal digits.
Dtypes and rounding points: integers only. A tensor is read as 32-bit words; zeros fill the last.
Order: any. Word w at index i adds mix((i << 32) | w) to one sum and a second mix of that to
    another, both modulo 2**64.
Invariant to: device, strides, order of the tensors, how they are cut up.
Varies with: every bit and its place, names, shapes, dtypes.
Backward: none.
Errors: ValueError on a name given twice and on tensors beyond 16 GiB.
Cost: one read of the weights; on CUDA one launch and one wait per device.

The digest tells equal weights from different ones. It is no protection against weights that were
made to collide.

Source: the mix is SplitMix64's finalizer, variant 13 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 4

MAX_BYTES = WORD_BYTES << 32
"""Most bytes of a tensor: an index has 32 bits."""

CPU_CHUNK = 1 << 16
"""Words that a CPU mixes at a time; they fit its cache."""

TILE = 1024
"""Words that a program adds per step."""

SPAN = 1 << 16
"""Words that one program adds."""

LINE_BYTES = 16
"""A thread reads this many bytes at a time if the words start on a multiple of it."""

MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Two for the first mix, one for the second."""

_MASK = 2**64 - 1
FIRST = tl.constexpr(MULTIPLIERS[0])
SECOND = tl.constexpr(MULTIPLIERS[1])
THIRD = tl.constexpr(MULTIPLIERS[2])


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of named tensors, such as `model.named_parameters()`: 64 hexadecimal digits.

    The same bytes have the same digest on every device. The host waits once per CUDA device.
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
    return _digest_of([[name, *entries[name], *sums[name]] for name in sorted(entries)])


def _digest_of(listed: list[list[Any]]) -> str:
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _words(name: str, tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The tensor's bytes in order, in pieces (int32 words, index of the first word)."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if len(flat) > MAX_BYTES:
        raise ValueError(
            f"weights digest: {name!r} has {len(flat)} bytes; allowed: up to {MAX_BYTES}."
        )
    whole, rest = divmod(len(flat), WORD_BYTES)
    if whole:
        body = flat[:-rest] if rest else flat
        if body.storage_offset() % WORD_BYTES or body.data_ptr() % WORD_BYTES:
            body = body.clone()
        yield body.view(torch.int32), 0
    if rest:
        filler = flat.new_zeros(WORD_BYTES - rest)
        yield torch.cat([flat[-rest:], filler]).view(torch.int32), whole


def _sums(pieces: list[tuple[str, Tensor, int]]) -> list[list[int]]:
    """Both sums of each piece, modulo 2**64; the pieces lie on one device."""
    if pieces[0][1].is_cuda:
        return words_sums([words for _, words, _ in pieces], [first for _, _, first in pieces])
    return [_cpu_sums(words, first) for _, words, first in pieces]


def _cpu_sums(words: Tensor, first: int) -> list[int]:
    # The caller may have set a default device.
    steps = torch.arange(CPU_CHUNK, device="cpu") << 32
    totals = torch.zeros(2, dtype=torch.int64, device="cpu")
    for start in range(0, len(words), CPU_CHUNK):
        chunk = words[start : start + CPU_CHUNK].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        # The shifted index wraps at 2**64, like all sums here.
        x = chunk.add_(steps[: len(chunk)]).add_(_signed((first + start) << 32))
        x = _spread(x, 30).mul_(_signed(MULTIPLIERS[0]))
        x = _spread(x, 27).mul_(_signed(MULTIPLIERS[1]))
        x = _spread(x, 31)
        totals[0] += x.sum()
        x = _spread(_spread(x, 32).mul_(_signed(MULTIPLIERS[2])), 29)
        totals[1] += x.sum()
    return totals.tolist()


def _spread(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) in place; int64 x holds unsigned numbers."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


@triton.jit
def mixed(words, index, first):
    """Both mixes (uint64) of int32 words and of their indices in the tensor."""
    x = ((first + index).to(tl.uint64) << 32) | words.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    x = x ^ (x >> 31)
    y = (x ^ (x >> 32)) * THIRD
    return x, y ^ (y >> 29)


@triton.jit
def words_kernel(spans, sums, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Both sums over each span. spans [S, 3] int64 holds the address, the number of words and the
    index of the first; sums is [S, 2] int64."""
    span = tl.program_id(0)
    words = tl.load(spans + span * 3).to(tl.pointer_type(tl.int32))
    if ALIGNED:
        words = tl.multiple_of(words, 16)
    num_words = tl.load(spans + span * 3 + 1).to(tl.int32)
    first = tl.load(spans + span * 3 + 2)
    lane = tl.arange(0, TILE)
    once = tl.zeros((TILE,), tl.uint64)
    twice = tl.zeros((TILE,), tl.uint64)
    whole = num_words // TILE * TILE
    # With a mask, each load would read only one word.
    for start in range(0, whole, TILE):
        x, y = mixed(tl.load(words + start + lane), start + lane, first)
        once += x
        twice += y
    inside = whole + lane < num_words
    x, y = mixed(tl.load(words + whole + lane, mask=inside, other=0), whole + lane, first)
    once += tl.where(inside, x, 0)
    twice += tl.where(inside, y, 0)
    tl.store(sums + span * 2, tl.sum(once).to(tl.int64, bitcast=True))
    tl.store(sums + span * 2 + 1, tl.sum(twice).to(tl.int64, bitcast=True))


def words_sums(words: list[Tensor], firsts: list[int]) -> list[list[int]]:
    """Both sums, modulo 2**64, of pieces of int32 words; piece i begins at index `firsts[i]`.

    No piece is empty. All lie on one device, and the host waits for it once.
    """
    addresses, lengths = [piece.data_ptr() for piece in words], [len(piece) for piece in words]
    return PlacedWords(addresses, lengths, firsts, words[0].device).launch().read().tolist()


def fit(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors may be read by their addresses: whole words on one GPU, without gaps."""
    if not tensors or not tensors[0].is_cuda:
        return False
    device = tensors[0].device
    return all(
        x.device == device
        and x.is_contiguous()
        and 0 < x.nbytes <= MAX_BYTES
        and not (x.nbytes % WORD_BYTES or x.data_ptr() % WORD_BYTES)
        for x in tensors
    )


class PlacedWords:
    """Pieces of int32 words [P] at addresses on one device, which it does not keep alive: `launch`
    reads what lies there then. Lengths are in words, and none is 0."""

    def __init__(
        self,
        addresses: Sequence[int],
        lengths: Sequence[int],
        firsts: Sequence[int],
        device: torch.device,
    ) -> None:
        # The caller may have set a default device.
        host = torch.device("cpu")
        places, words, indices = (
            torch.tensor(numbers, dtype=torch.int64, device=host)
            for numbers in (addresses, lengths, firsts)
        )
        counts = (words + SPAN - 1) // SPAN
        self._piece = piece = torch.repeat_interleave(counts)
        of_piece = (counts.cumsum(0) - counts)[piece]
        start = (torch.arange(len(piece), device=host) - of_piece) * SPAN
        begins, left = places[piece] + WORD_BYTES * start, words[piece] - start
        table = torch.stack([begins, left.clamp(max=SPAN), indices[piece] + start], dim=1)
        if device.type == "cuda":  # a copy that does not wait for the work queued there
            table = table.pin_memory().to(device, non_blocking=True)
        self._spans = table
        self._aligned = not (places % LINE_BYTES).any()

    def launch(self) -> ComingSums:
        """Queue the sums on the current stream."""
        spans = self._spans
        sums = torch.empty(len(spans), 2, dtype=torch.int64, device=spans.device)
        with torch.cuda.device_of(spans):
            words_kernel[(len(spans),)](spans, sums, ALIGNED=self._aligned, TILE=TILE, num_warps=4)
            return ComingSums(sums, self._piece)


class ComingSums:
    """Sums that were queued."""

    def __init__(self, sums: Tensor, piece: Tensor) -> None:
        self._piece, self._done = piece, None
        if sums.is_cuda:
            # The caller may have set a default device.
            cpu = torch.device("cpu")
            host = torch.empty(sums.shape, dtype=sums.dtype, device=cpu, pin_memory=True)
            sums = host.copy_(sums, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        self._sums = sums

    def are_there(self) -> bool:
        """Whether `read` would not wait."""
        return self._done is None or self._done.query()

    def read(self) -> Tensor:
        """Both sums of each piece, modulo 2**64, [P, 2] int64 on the host; waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        count = int(self._piece[-1]) + 1
        totals = torch.zeros(count, 2, dtype=torch.int64, device=self._sums.device)
        return totals.index_add_(0, self._piece, self._sums)


class PlacedDigest:
    """`weights_digest` of tensors that `fit`, for as long as they keep their places: one launch,
    and no wait before the digest is asked for. It does not keep their memory."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        ordered = sorted(named, key=lambda entry: entry[0])
        self._entries = [[name, str(x.dtype), list(x.shape)] for name, x in ordered]
        addresses = [x.data_ptr() for _, x in ordered]
        lengths = [x.nbytes // WORD_BYTES for _, x in ordered]
        device = ordered[0][1].device
        self._words = PlacedWords(addresses, lengths, [0] * len(ordered), device)
        self._last: tuple[list[list[int]], str] = [], ""

    def launch(self) -> Callable[[], str]:
        """Queue the reading of all tensors; what is returned waits for it, and gives the digest."""
        return partial(self._of, self._words.launch())

    def _of(self, coming: ComingSums) -> str:
        sums = coming.read().tolist()
        if sums != self._last[0]:
            unsigned = [[number & _MASK for number in both] for both in sums]
            listed = [[*entry, *s] for entry, s in zip(self._entries, unsigned, strict=True)]
            self._last = sums, _digest_of(listed)
        return self._last[1]
