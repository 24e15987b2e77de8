"""Ways to make gradients wrong, each put back on exit; see `perturbations`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_consistency.kernels.gradient_fold import op as gradient_fold
from rl_consistency.models import packing
from rl_consistency.verify.substitution import attribute, substituted


def gradients_added_up_per_call() -> AbstractContextManager[None]:
    original = gradient_fold.fold_parameter

    def mutant(
        parameter: Any, buffer: Any, fold: Callable[[Any, bool], None], **options: Any
    ) -> Tensor | None:
        del options

        def from_zero(accumulator: Tensor, fresh: bool) -> None:
            del fresh
            own = torch.zeros_like(accumulator)
            fold(own, True)
            accumulator.copy_(accumulator.float() + own.float())

        return original(parameter, buffer, from_zero)

    return substituted(original, mutant)


@contextmanager
def fold_steps_in_any_order() -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    outer, columns = gradient_fold.fold_outer, gradient_fold.fold_columns

    def shuffled(rows: int, step: int) -> Tensor:
        whole = torch.arange(rows // step * step).view(-1, step)
        mixed = whole[torch.randperm(len(whole), generator=generator)].flatten()
        return torch.cat([mixed, torch.arange(len(mixed), rows)])

    def mutant_outer(buffer: Tensor, dy: Tensor, x: Tensor, **options: Any) -> None:
        order = shuffled(len(dy), gradient_fold.STEP).to(dy.device)
        outer(buffer, dy[order], x[order], **options)

    def mutant_columns(buffer: Tensor, rows: Tensor, *, rows_per_token: int = 1) -> None:
        order = shuffled(len(rows), gradient_fold.STEP * rows_per_token).to(rows.device)
        columns(buffer, rows[order], rows_per_token=rows_per_token)

    with substituted(outer, mutant_outer), substituted(columns, mutant_columns):
        yield


def sequences_not_aligned() -> AbstractContextManager[None]:
    return attribute(packing, "ALIGNMENT", 1)


def embedding_gradient_in_any_order() -> AbstractContextManager[None]:
    original = gradient_fold.fold_rows
    generator = torch.Generator().manual_seed(0)

    def mutant(buffer: Tensor, index: Tensor, rows: Tensor, **options: Any) -> None:
        order = torch.randperm(len(index), generator=generator).to(index.device)
        original(buffer, index[order], rows[order], **options)

    return substituted(original, mutant)


def tied_weights_share_a_buffer() -> AbstractContextManager[None]:
    def mutant(
        cls: type[gradient_fold.GradientBuffer], parameter: Any, count: int
    ) -> list[gradient_fold.GradientBuffer]:
        return [cls(parameter)] * count

    return attribute(gradient_fold.GradientBuffer, "for_uses", classmethod(mutant))
