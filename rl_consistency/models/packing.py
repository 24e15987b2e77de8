"""The layout inside the model: sequences one after another, each starting on a multiple of 16.

Every form of a batch becomes a `PackedBatch`, so all give the same bits. The alignment is the step
of the gradient fold: a cut between two sequences is then also a cut between two steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    peek_interpreter_stack,
)

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.gradient_fold.op import STEP

ROW_ALIGNMENT = STEP
"""Rows that each sequence starts on a multiple of."""

Layout = Literal["packed", "packed_with_gaps", "left_padded", "right_padded"]
"""What `lay_out` can hand sequences to `token_logprobs` in; all give the same bytes."""

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What a collator of packed rows passes beside the position ids, whose restarts say the same."""

EXTRA_COLUMNS = 3
"""Beyond the longest sequence, so that every padded row has padding."""


def from_host(values: np.ndarray, device: torch.device | str) -> Tensor:
    """An array as a tensor on the device. The copy does not wait for work queued there."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Sequences in packed rows.

    Example: sequences [[5, 6], [7]] give 32 rows; row 0 and 1 hold 5 and 6, row 16 holds 7, the
    others are filler that no sequence owns: 5 at position 0. The embedding of a token that is not
    in the batch might not be finite, and 0 times it would be NaN.
    """

    input_ids: Tensor  # [R] int64
    position_ids: Tensor  # [R] int64, counted from each sequence's first token
    layout: PackedSequences
    token_rows: Tensor  # [N] int64, row of each real token, sequence by sequence
    id_range: tuple[int, int]  # the smallest and the largest token id

    @classmethod
    def from_sequences(
        cls, sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu", *, gap: int = 0
    ) -> PackedBatch:
        """Pack lists of token ids, with `gap` steps of filler before each sequence.

        ValueError for no sequence or an empty one, TypeError for ids that are not integers.
        """
        tokens = np.asarray([token for sequence in sequences for token in sequence])
        if tokens.size and (tokens.dtype.kind not in "iu" or tokens.ndim != 1):
            found = tokens.dtype if tokens.ndim == 1 else f"lists of {tokens.dtype}"
            raise TypeError(f"token ids must be integers, got {found}.")
        lens = [len(sequence) for sequence in sequences]
        tokens = tokens.astype(np.int64)
        id_range = (int(tokens.min()), int(tokens.max())) if tokens.size else None
        return cls.from_tokens(from_host(tokens, device), lens, gap=gap, id_range=id_range)

    @classmethod
    def from_tokens(
        cls,
        tokens: Tensor,
        lens: Sequence[int],
        *,
        gap: int = 0,
        id_range: tuple[int, int] | None = None,
    ) -> PackedBatch:
        """Pack tokens [N] that stand sequence by sequence; see `from_sequences`.

        Without `id_range`, their smallest and largest id, they are read, which waits for a GPU.
        """
        if not lens or min(lens) == 0:
            found = f"{len(lens)} sequences of lengths {list(lens)[:8]}"
            raise ValueError(f"cannot pack {found}; give at least one, and none may be empty.")
        sizes = np.asarray(lens, dtype=np.int64)
        taken = -(-sizes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        starts = np.cumsum(taken + gap * ROW_ALIGNMENT) - taken
        positions = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = np.repeat(starts, sizes) + positions
        position_ids = np.zeros(starts[-1] + taken[-1], dtype=np.int64)
        position_ids[rows] = positions
        token_rows = from_host(rows, tokens.device)
        input_ids = tokens[:1].repeat(len(position_ids))
        input_ids[token_rows] = tokens
        layout = PackedSequences.of(starts.tolist(), sizes.tolist())
        if id_range is None:
            low, high = torch.stack(tokens.aminmax()).tolist()
            id_range = low, high
        position_ids = from_host(position_ids, tokens.device)
        return cls(input_ids, position_ids, layout, token_rows, id_range)

    def require_vocabulary(self, size: int) -> None:
        """ValueError if an id is outside a vocabulary of this size."""
        low, high = self.id_range
        if low < 0 or high >= size:
            raise ValueError(
                f"token ids span [{low}, {high}], and the model's vocabulary has {size}. Use the "
                "tokenizer that belongs to the model."
            )


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A padded [B, L] batch and its packed form."""

    packed: PackedBatch
    mask: Tensor  # [B, L] bool, real tokens

    def unpack(self, rows: Tensor) -> Tensor:
        """[R, ...] packed rows -> [B, L, ...], zeros at padding; differentiable."""
        padded = rows.new_zeros(*self.mask.shape, *rows.shape[1:])
        mask = self.mask.view(*self.mask.shape, *([1] * (rows.dim() - 1)))
        return padded.masked_scatter(mask, rows[self.packed.token_rows])


def pack_padded(
    input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> PaddedBatch:
    """Pack a padded batch, left- or right-padded, or rows of packed sequences with position resets.

    Args:
        input_ids: [B, L] int64.
        attention_mask: [B, L], 1 or True at real tokens, in one run per row; None if all are real.
        position_ids: [L] or [B, L]; where they restart at 0 a new sequence begins.

    TypeError for what is no tensor, ValueError for other shapes, holes in a row and positions that
    do not count.
    """
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    for name, value in {"input_ids": input_ids, **given}.items():
        if type(value) is not Tensor and (value is not None or name not in given):
            raise TypeError(
                f"{name} is a {type(value).__name__}; a plain tensor [batch, length] is needed. "
                "Masks of each kind of layer, as a dict has them, are not covered."
            )
    shape = tuple(input_ids.shape)
    if len(shape) != 2:
        raise ValueError(f"input_ids {shape}; a batch of shape [batch, length] is needed.")
    mask = _checked_mask(input_ids, attention_mask)
    by_row = position_ids is None
    lens = mask.sum(dim=1).tolist() if by_row else _lengths_by_position(mask, position_ids)
    return PaddedBatch(PackedBatch.from_tokens(input_ids[mask], lens), mask)


def _checked_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}: "
            "give one shape. Instead of 4-D and blockwise masks use packed position_ids."
        )
    mask = attention_mask.bool()
    runs = mask[:, 0].int() + (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1)
    for row in torch.nonzero(runs != 1).flatten().tolist():
        raise ValueError(
            f"attention_mask row {row} has a hole or no token; pad each row at its ends only."
        )
    return mask


def _lengths_by_position(mask: Tensor, position_ids: Tensor) -> list[int]:
    if position_ids.shape not in (mask.shape, mask.shape[1:], (1, mask.shape[1])):
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} must have the shape of input_ids "
            f"{tuple(mask.shape)}, or that of one row."
        )
    positions = position_ids.expand_as(mask)[mask]
    first_of_row = mask & (mask.cumsum(dim=1) == 1)
    starts = positions == 0
    counts = starts[1:] | (positions[1:] == positions[:-1] + 1)
    if not (bool(counts.all()) and bool(starts[first_of_row[mask]].all())):
        raise ValueError(
            "position_ids must count each sequence from 0 in steps of 1 over its real tokens "
            "(packed rows restart at 0). For padded rows they may be left out."
        )
    edges = torch.nonzero(starts).flatten().tolist() + [len(positions)]
    return [end - begin for begin, end in itertools.pairwise(edges)]


def refuse_transforms() -> None:
    """ValueError where torch records or transforms a computation, which no kernel can follow."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        what = "torch.jit.trace"
    elif peek_interpreter_stack() is not None:
        what = "a transform of torch.func (vmap, grad, jvp)"
    else:
        return
    raise ValueError(
        f"{what} of a patched model is not covered: its ops are kernels, whose insides torch does "
        "not see. Use the stock model, inside session.stock() or after restore()."
    )


def packed_inputs(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    kwargs: dict[str, Any],
) -> PaddedBatch:
    """The packed arguments of a patched forward; ValueError for those only the stock one takes, and
    for borders of packed rows that are not those of the position ids."""
    refuse_transforms()
    borders = kwargs.get("cu_seq_lens_q")
    if position_ids is not None:
        kwargs = {key: value for key, value in kwargs.items() if key not in _BORDERS}
    unused = {name for name, value in kwargs.items() if value is None or value is False}
    # The one has no effect here; the other is a divisor of losses that are computed elsewhere.
    extra = sorted(kwargs.keys() - unused - {"return_dict", "num_items_in_batch"})
    if extra or input_ids is None:
        given = ", ".join(extra) or "no input_ids"
        raise ValueError(
            f"the patched forward was given {given}; it takes input_ids, attention_mask and "
            "position_ids. To decode with a cache use RolloutEngine, for logprobs token_logprobs, "
            "for a trainer attach, all of rl_consistency; or the stock model, inside "
            "session.stock() or, after attach, attachment.stock()."
        )
    batch = pack_padded(input_ids, attention_mask, position_ids)
    found = list(itertools.accumulate(batch.packed.layout.query_lens, initial=0))
    if borders is not None and borders.tolist() != found:
        raise ValueError(
            f"cu_seq_lens_q is {borders.tolist()}, and position_ids restart at {found}; give "
            "position_ids that count each packed sequence from 0."
        )
    return batch


def lay_out(
    sequences: Sequence[Sequence[int]], layout: Layout, device: torch.device | str = "cpu"
) -> tuple[PackedBatch | Tensor, Tensor | None]:
    """Sequences in one of the layouts, and the attention mask [B, L] where the layout is padded;
    ValueError on another layout."""
    if layout not in get_args(Layout):
        raise ValueError(f"layout {layout!r}; allowed: {', '.join(get_args(Layout))}.")
    if layout.startswith("packed"):
        return PackedBatch.from_sequences(sequences, device, gap=int("gaps" in layout)), None
    width = max(len(sequence) for sequence in sequences) + EXTRA_COLUMNS
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        start = width - len(sequence) if layout == "left_padded" else 0
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    return from_host(ids, device), from_host(mask, device)
