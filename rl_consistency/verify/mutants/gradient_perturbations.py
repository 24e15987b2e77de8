"""Ways to make gradients wrong, each put back on exit; see `perturbations`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer, fold_parameter
from rl_consistency.kernels.gradient_fold.op import STEP, fold_columns, fold_outer, fold_rows
from rl_consistency.models import packing
from rl_consistency.verify.substitution import attribute, perturbation, substituted


@perturbation(substituted, fold_parameter)
def gradients_added_up_per_call(
    ctx: Any, parameter: Any, buffer: Any, fold: Callable[[Any, bool], None], **options: Any
) -> Tensor | None:
    """Each call's gradient is summed from zero, then added."""

    def from_zero(accumulator: Tensor, fresh: bool) -> None:
        own = torch.zeros_like(accumulator)
        fold(own, True)
        accumulator.copy_(accumulator.float() + own.float())

    return fold_parameter(ctx, parameter, buffer, from_zero)


@contextmanager
def fold_steps_in_any_order() -> Iterator[None]:
    """The steps of a fold arrive in any order."""
    generator = torch.Generator().manual_seed(0)

    def shuffled(rows: Tensor, step: int) -> Tensor:
        whole = torch.arange(len(rows) // step * step).view(-1, step)
        mixed = whole[torch.randperm(len(whole), generator=generator)].flatten()
        return torch.cat([mixed, torch.arange(len(mixed), len(rows))]).to(rows.device)

    def mutant_outer(buffer: Tensor, dy: Tensor, x: Tensor, **options: Any) -> None:
        order = shuffled(dy, STEP)
        fold_outer(buffer, dy[order], x[order], **options)

    def mutant_columns(buffer: Tensor, rows: Tensor, *, rows_per_token: int = 1) -> None:
        order = shuffled(rows, STEP * rows_per_token)
        fold_columns(buffer, rows[order], rows_per_token=rows_per_token)

    with substituted(fold_outer, mutant_outer), substituted(fold_columns, mutant_columns):
        yield


def sequences_not_aligned() -> AbstractContextManager[None]:
    """Packed sequences do not start on a multiple of 16."""
    return attribute(packing, "ALIGNMENT", 1)


def embedding_gradient_in_any_order() -> AbstractContextManager[None]:
    """Repeated tokens are added in any order."""
    generator = torch.Generator().manual_seed(0)

    def mutant(buffer: Tensor, index: Tensor, rows: Tensor, **options: Any) -> None:
        order = torch.randperm(len(index), generator=generator).to(index.device)
        fold_rows(buffer, index[order], rows[order], **options)

    return substituted(fold_rows, mutant)


def tied_weights_share_a_buffer() -> AbstractContextManager[None]:
    """Embedding and LM head fold into one buffer."""

    for_uses = GradientBuffer.for_uses

    def mutant(cls: type[GradientBuffer], parameter: Any, count: int) -> list[GradientBuffer]:
        first, *_ = for_uses(parameter, count)
        first._gradient._require_unfolded = lambda use: None
        return [first] * count

    return attribute(GradientBuffer, "for_uses", classmethod(mutant))
