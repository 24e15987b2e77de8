"""Layouts of sequences, packed and in a paged cache."""

import torch

from rl_consistency.kernels.attention.layout import PackedSequences, PagedAttention

BLOCK = 16


def packed(lens):
    """Sequences behind one another."""
    return PackedSequences.of([sum(lens[:i]) for i in range(len(lens))], lens)


def paged(contexts, queries=1, **given):
    """Sequences of so many keys, the last `queries` of which are new; fields may be given."""
    count, size = len(contexts), given.get("block_size", BLOCK)
    fields = {
        "query_starts": range(0, count * queries, queries),
        "query_lens": [queries] * count,
        "context_lens": contexts,
        "block_tables": [list(range(-(-n // size))) for n in contexts],
        "slot_mapping": torch.zeros(count * queries, dtype=torch.int64),
        "key_cache": [],
        "value_cache": [],
        "block_size": size,
    }
    return PagedAttention(**(fields | given))
