"""Paged KV cache blocks: which sequence holds which, and which may be shared.

A full block is found by its content: the key (prefix id of the block before it, its token ids). A
prefix id is given to one content only, so equal keys mean equal tokens from the sequence's first
token on. By claim C1 a shared block holds the very bytes its new holder would compute.

Only full blocks are shared, and a full block is never written again. A block is announced when it
is allocated, so that a sibling can wait for it. It becomes shareable when the step that fills it
was launched and all its tokens are known: steps run in order on one stream. Released blocks keep
their content until space is needed, least recently released first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_consistency.kernels.attention.paged_cache_triton import zero_cache
from rl_consistency.models.forward import cache_sizes
from rl_consistency.rollout.sequence import RolloutSequence

_ROOT = 0  # prefix id before the first token of any sequence
_Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class _Block:
    ref_count: int = 0
    key: _Key | None = None  # set on the one block through which this content is found
    prefix_id: int | None = None  # names the content up to the end of this block, once known
    computed: bool = False  # whether the step that fills it has been launched


class PrefixMatch(NamedTuple):
    """The longest announced prefix of a sequence."""

    block_ids: list[int]  # its leading blocks that are computed
    awaited_block: int | None  # the next one, if it is announced but not computed yet


class BlockManager:
    """Hands out the blocks of a KV cache of `num_blocks` x `block_size` token slots."""

    def __init__(self, num_blocks: int, block_size: int, *, share_prefixes: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.reset()

    def reset(self) -> None:
        """Take every block back and forget all contents."""
        self._blocks = [_Block() for _ in range(self.num_blocks)]
        # Free blocks: those without content first, then the least recently released one.
        self._free = OrderedDict.fromkeys(range(self.num_blocks))
        self._by_key: dict[_Key, int] = {}
        self._last_prefix_id = _ROOT

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, sequence: RolloutSequence) -> PrefixMatch:
        """Look up the leading blocks; never the last known token, which has to be computed."""
        block_ids: list[int] = []
        parent, size, token_ids = _ROOT, self.block_size, sequence.token_ids
        shares = self.share_prefixes and not sequence.alone
        for start in range(0, (len(token_ids) - 1) // size * size if shares else 0, size):
            block_id = self._by_key.get((parent, tuple(token_ids[start : start + size])))
            if block_id is None:
                break
            block = self._blocks[block_id]
            if not block.computed:
                return PrefixMatch(block_ids, block_id)
            block_ids.append(block_id)
            parent = block.prefix_id
            assert parent is not None
        return PrefixMatch(block_ids, None)

    def is_awaited(self, block_id: int) -> bool:
        """Whether the block still has an announced content that is not computed."""
        block = self._blocks[block_id]
        return block.key is not None and not block.computed

    def allocate(self, sequence: RolloutSequence, match: PrefixMatch, *, spare: int = 0) -> bool:
        """Give the sequence blocks for all its known tokens, the matched ones shared; False, and no
        change, if `spare` blocks would not be left."""
        num_matched = len(match.block_ids)
        num_new = self.blocks_for(sequence.num_tokens) - num_matched
        num_idle = sum(self._blocks[block_id].ref_count == 0 for block_id in match.block_ids)
        if num_new + num_idle + spare > self.num_free_blocks:
            return False
        for block_id in match.block_ids:
            self._free.pop(block_id, None)
            self._blocks[block_id].ref_count += 1
        sequence.block_table = match.block_ids + [self._take() for _ in range(num_new)]
        sequence.num_published_blocks = sequence.num_borrowed_blocks = num_matched
        for index in range(num_matched, sequence.num_tokens // self.block_size):
            self._announce(sequence, index)
        return True

    def grow(self, sequence: RolloutSequence, num_drafted: int = 0) -> bool:
        """Give every token, pending and drafted too, a place; False, and no change, if none is."""
        needed = self.blocks_for(sequence.num_scheduled_tokens + num_drafted)
        missing = needed - len(sequence.block_table)
        if missing > self.num_free_blocks:
            return False
        sequence.block_table.extend(self._take() for _ in range(missing))
        return True

    def publish(self, sequence: RolloutSequence) -> None:
        """Make the blocks shareable that hold computed tokens only, all of them known."""
        # The step in flight computes a pending token, but its block has no name yet.
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self.block_size
        for index in range(sequence.num_published_blocks, num_full):
            self._announce(sequence, index)
            self._blocks[sequence.block_table[index]].computed = True
        sequence.num_published_blocks = num_full

    def release(self, sequence: RolloutSequence) -> None:
        """Take the sequence's blocks back; its tokens stay."""
        # Tail first: a cached block is then evicted before the prefix it needs to be found.
        for block_id in reversed(sequence.block_table):
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            self._free[block_id] = None
            if block.key is None or not block.computed:
                self._forget(block_id)
                self._blocks[block_id] = _Block()
                self._free.move_to_end(block_id, last=False)
        sequence.block_table = []
        sequence.num_published_blocks = 0

    def distrust(self, sequence: RolloutSequence) -> None:
        """Take the contents of the sequence's blocks out of the cache; their holders keep them."""
        for block_id in sequence.block_table:
            self._forget(block_id)

    def _announce(self, sequence: RolloutSequence, index: int) -> None:
        """Name the content of the sequence's full block `index`, if it has no name yet."""
        block_id = sequence.block_table[index]
        block = self._blocks[block_id]
        if not self.share_prefixes or sequence.alone or block.prefix_id is not None:
            return
        before = sequence.block_table[index - 1]
        parent = self._blocks[before].prefix_id if index > 0 else _ROOT
        assert parent is not None  # blocks are announced in order
        start = index * self.block_size
        key = (parent, tuple(sequence.token_ids[start : start + self.block_size]))
        holder = self._by_key.get(key)
        if holder is not None:  # the same content is cached elsewhere: this copy stays private
            block.prefix_id = self._blocks[holder].prefix_id
            return
        self._last_prefix_id += 1
        block.prefix_id = self._last_prefix_id
        block.key = key
        self._by_key[key] = block_id

    def _take(self) -> int:
        """The first free block, its content forgotten."""
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._blocks[block_id] = _Block(ref_count=1)
        return block_id

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.key is not None:
            del self._by_key[block.key]
            block.key = None


DEFAULT_TOKENS_PER_SEQUENCE = 1024  # tokens of each running sequence the default cache has room for

CPU_CACHE_BYTES, GPU_CACHE_SHARE = 4 << 30, 0.4
"""Upper bounds of the default cache; on a GPU a share of the free memory: a trainer in the same
process needs the rest."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KVCache:
    """Two tensors per layer, [num_blocks + 1, block_size, num_key_value_heads, head_dim] each, in
    memory as `zero_cache` lays them out.

    Padding rows write to block number `num_blocks`, behind the last. No sequence holds or reads it.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    block_size: int
    num_blocks: int  # blocks that sequences may hold

    @property
    def tensors(self) -> dict[str, Any]:
        """What layouts of a paged cache are given."""
        return {"key_cache": self.keys, "value_cache": self.values, "block_size": self.block_size}

    @classmethod
    def allocate(cls, model: Any, **size: Any) -> KVCache:
        """A cache in the model's dtype, on its device; `size` is that of `cache_shape`. ValueError
        if the device has no room for it."""
        shape = cache_shape(model, **size)
        count, rows, block_size, *row = shape
        try:
            # Zeros: a NaN in a slot that was never written would pass a mask of weight 0.
            tensors = [
                zero_cache(rows, block_size, *row, dtype=model.dtype, device=model.device)
                for _ in range(count)
            ]
        except torch.OutOfMemoryError as error:
            gib = math.prod(shape) * model.dtype.itemsize / 2**30
            raise ValueError(
                f"no room on {model.device} for a KV cache of {rows - 1} blocks of {block_size} "
                f"tokens ({gib:.1f} GiB): lower num_kv_blocks"
            ) from error
        keys, values = tensors[: count // 2], tensors[count // 2 :]
        return cls(keys=keys, values=values, block_size=block_size, num_blocks=rows - 1)


def cache_shape(
    model: Any,
    block_size: int,
    num_blocks: int | None,
    max_num_seqs: int,
    tokens_per_sequence: int | None = None,
) -> tuple[int, int, int, int, int]:
    """[2 * layers, num_blocks + 1, block_size, num_key_value_heads, head_dim] of a cache made now.

    Without `num_blocks` it has room for `max_num_seqs` sequences of `tokens_per_sequence` tokens
    (None is 1024; the model's context at most), within 4 GiB on a CPU and 40 % of the free memory
    on a GPU, but always for one.
    """
    layers, kv_heads, head_dim = cache_sizes(model)
    row = (block_size, kv_heads, head_dim)
    if num_blocks is None:
        tokens = tokens_per_sequence or DEFAULT_TOKENS_PER_SEQUENCE
        per_sequence = -(-min(model.config.max_position_embeddings, tokens) // block_size)
        block_bytes = 2 * layers * math.prod(row) * model.dtype.itemsize
        affordable = cache_bytes(model.device) // block_bytes
        num_blocks = max(per_sequence, min(max_num_seqs * per_sequence, affordable))
    assert num_blocks is not None
    return 2 * layers, num_blocks + 1, *row


def cache_bytes(device: torch.device) -> int:
    """Most bytes the default cache may take."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + reusable) * GPU_CACHE_SHARE)
