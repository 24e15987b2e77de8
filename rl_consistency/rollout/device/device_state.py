"""What the device keeps of the running sequences from one step to the next, by slot.

The host has a copy of all but the sampled tokens, so it never waits for the device to read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from rl_consistency.rollout.device.sampling_table import SamplingTable
from rl_consistency.rollout.device.shared_prefixes import Arrangement, arranged
from rl_consistency.rollout.sequence import RolloutSequence

ALIGNMENT = 64  # bytes an array starts on: the same alignment in every buffer

Fields = dict[str, tuple[DTypeLike, tuple[int, ...]]]
"""Arrays by name: int64, int32 or float32, and the shape."""


class StagedFields:
    """Where arrays lie in a buffer of bytes.

    StagedFields({"slots": (np.int64, (3,)), "lens": (np.int32, (3,))}).nbytes == 128
    """

    def __init__(self, fields: Fields) -> None:
        self._places: dict[str, tuple[int, int, np.dtype[Any], tuple[int, ...]]] = {}
        self.nbytes = 0
        for name, (kind, shape) in fields.items():
            dtype = np.dtype(kind)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            self._places[name] = (self.nbytes, self.nbytes + size, dtype, shape)
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def on_host(self, device: torch.device) -> tuple[Tensor, dict[str, NDArray[Any]]]:
        """A fresh buffer [nbytes] uint8 to fill, pinned for a GPU, and the arrays in it. It may be
        dropped once copies from it are queued: torch reuses it when they are done."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        memory = buffer.numpy()
        return buffer, {
            name: memory[begin:end].view(dtype).reshape(shape)
            for name, (begin, end, dtype, shape) in self._places.items()
        }

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """The arrays as tensors, views of a buffer [nbytes] uint8 on any device."""
        return {
            name: buffer[begin:end].view(getattr(torch, dtype.name)).view(shape)
            for name, (begin, end, dtype, shape) in self._places.items()
        }


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """The arrays on a device, in one copy that does not wait for the work queued there."""
    fields = StagedFields({name: (array.dtype, array.shape) for name, array in arrays.items()})
    buffer, places = fields.on_host(device)
    for name, array in arrays.items():
        places[name][...] = array
    return fields.tensors(buffer.to(device, non_blocking=True))


def to_host(values: Tensor) -> Tensor:
    """A copy on the host that is queued, not waited for: read it after an event recorded later."""
    if values.device.type == "cpu":
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class DeviceState:
    """Rows for `num_slots` sequences of at most `width` blocks, and one more for padding.

    Attributes:
        dummy_slot: the slot of padding rows, number `num_slots`.
        dummy_block: the block that they write to.
        last_tokens: [S] int64, the token that was sampled last; S = num_slots + 1.
        block_tables: [S, width] int32, each sequence's blocks in logical order, then `dummy_block`.
        sampling: how the sequence in each slot is sampled.
    """

    def __init__(
        self, num_slots: int, *, width: int, block_size: int, dummy_block: int, device: torch.device
    ) -> None:
        rows = num_slots + 1
        self.device, self._block_size = device, block_size
        self.dummy_slot, self.dummy_block = num_slots, dummy_block
        self._tables = np.full((rows, width), dummy_block, dtype=np.int32)
        self._num_blocks = np.zeros(rows, dtype=np.int64)
        self._stale: dict[int, None] = {}  # slots to copy, in order
        self._num_admitted = 0
        self._arranged: dict[int, tuple[tuple[bytes, int], Arrangement | None]] = {}  # by width
        self.sampling = SamplingTable(rows, device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_tables = torch.from_numpy(self._tables).to(device, copy=True)

    def admit(self, sequence: RolloutSequence) -> None:
        """Write a sequence's sampling params, stream key and blocks to its slot, in place of those
        of its last holder."""
        slot = sequence.slot
        if slot is None or not 0 <= slot < self.dummy_slot:
            raise ValueError(f"a running sequence needs a slot in [0, {self.dummy_slot}): {slot}")
        self.sampling.write(slot, sequence.params, sequence.prompt_id, sequence.sample_index)
        count = len(sequence.block_table)
        self._tables[slot, :count] = sequence.block_table
        self._tables[slot, count:] = self.dummy_block
        self._num_blocks[slot] = count
        self._stale[slot] = None
        self._num_admitted += 1

    def arrangement(
        self, slots: NDArray[np.int64], pasts: NDArray[np.int64], *, width: int
    ) -> Arrangement | None:
        """How the sequences in slots [n], with pasts [n], share keys in a call of `width` tokens
        each; None where they share too few. Tables hold all pasts: `admit` and `cover` enter them.

        Blocks are shared from the admission on: an arrangement holds while the same ones decode.
        """
        key = slots.tobytes(), self._num_admitted
        kept = self._arranged.get(width)
        if kept is None or kept[0] != key:
            kept = key, arranged(self._tables[slots], pasts, self._block_size)
            self._arranged[width] = kept
        return kept[1]

    def cover(
        self,
        sequences: Sequence[RolloutSequence],
        slots: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """Enter the blocks that hold positions below `ends` [n] and are new to the tables."""
        needed = -(-ends // self._block_size)
        for i in np.flatnonzero(needed > self._num_blocks[slots]).tolist():
            slot, count = int(slots[i]), int(needed[i])
            known = int(self._num_blocks[slot])
            self._tables[slot, known:count] = sequences[i].block_table[known:count]
            self._num_blocks[slot] = count
            self._stale[slot] = None

    def places(self, slots: NDArray[Any], positions: NDArray[Any]) -> NDArray[np.int64]:
        """Where in the cache the token at each position of each slot's sequence lies, int64."""
        size = self._block_size
        blocks = self._tables[slots, positions // size].astype(np.int64)
        return blocks * size + positions % size

    def flush(self) -> None:
        """Queue one copy of the rows that changed on the host."""
        if not self._stale:
            return
        slots = np.fromiter(self._stale, dtype=np.int64, count=len(self._stale))
        self._stale.clear()
        changed = {"slots": slots, "tables": self._tables[slots], **self.sampling.written(slots)}
        new = to_device(changed, self.device)
        self.sampling.load(new["slots"], new)
        self.block_tables.index_copy_(0, new["slots"], new["tables"])

    def resolve(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """Token ids [n] int64 with -1 replaced by the token sampled last in the row's slot."""
        return torch.where(token_ids < 0, self.last_tokens.index_select(0, slots), token_ids)
