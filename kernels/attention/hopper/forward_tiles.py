"""Which tiles each program of `hopper/forward.py` has: dealt on the host, so that all programs end
together and those that run at one time read the keys of few heads. No bit depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_consistency.kernels.attention.layout import AttentionLayout, from_host

ROWS = 128
"""Rows of a tile, 64 for each consumer."""
ROUND = 2.2
"""What a tile costs beside its blocks of keys, in blocks: its first scores, its results, the last
product that nothing overlaps. By clock stamps on an H100 (docs/log.md)."""


@dataclass(frozen=True)
class Deal:
    """The tiles of a launch for one number of programs."""

    layout: AttentionLayout
    group: int
    kv_heads: int
    keys: int
    """Keys in one block."""
    window: int | None
    programs: int

    def on(self, device: torch.device) -> Tensor:
        """[tiles, 3] int32 on a device, made once for a layout: sequence, first row in it, KV head.
        Program p has the entries p, p + programs, p + 2 programs and so on."""
        key = ("deal", device, self.group, self.kv_heads, self.keys, self.window, self.programs)
        return self.layout.kept(key, lambda: from_host(self._dealt(), device))

    def _dealt(self) -> Tensor:
        tiles = self.layout.tiles(torch.device("cpu"), self.group, ROWS)
        # One head after another: the programs find its keys in the L2 cache.
        head = torch.arange(self.kv_heads, dtype=torch.int32).repeat_interleave(len(tiles))
        entries = torch.column_stack([tiles.repeat(self.kv_heads, 1), head])
        if self.programs >= len(entries):
            return entries
        cost = (self._blocks(tiles) + ROUND).repeat(self.kv_heads)
        dealt = torch.full((-(-len(entries) // self.programs), self.programs), -1)
        load = torch.zeros(self.programs, dtype=torch.float64)
        for i, costs in enumerate(cost.split(self.programs)):
            longest = costs.argsort(descending=True, stable=True)
            least = load.argsort(stable=True)[: len(longest)]
            dealt[i, least] = longest + i * self.programs
            load[least] += costs[longest]
        # The last round may be short: the programs that have a tile in it come first.
        order = dealt[:, (dealt[-1] < 0).to(torch.int32).argsort(stable=True)].flatten()
        return entries[order[order >= 0]]

    def _blocks(self, tiles: Tensor) -> Tensor:
        """Blocks of keys that each tile [sequence, first row] reads."""
        sequence, first_row = tiles.long().unbind(1)
        limit = torch.tensor(list(self.layout.context_lens))[sequence]
        past = limit - torch.tensor(list(self.layout.query_lens))[sequence]
        last = torch.minimum(past + (first_row + ROWS - 1) // self.group, limit - 1)
        first = torch.zeros_like(last)
        if self.window is not None:
            first = (past + first_row // self.group - self.window + 1).clamp(min=0) // self.keys
        return last // self.keys + 1 - first
