"""Cases of sums that are no op of a layer: of rows, of active values, of all gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_consistency.cases.case import ROWS, Case, Op, Setting
from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.sums import gradient_norm, masked_mean, tree_sum


def row_reduction_cases(setting: Setting) -> Iterator[Case]:
    """The sum of each row; a GPU's kernels hold sums of their own."""
    if setting.device.type == "cpu":
        yield Case(
            op="row_reduction",
            size=f"{ROWS}",
            rows=("x",),
            draw=lambda rows, seed: (setting.drawn((rows, ROWS), seed),),
            call=tree_sum,
            stock=lambda x: x.float().sum(-1),
            reference=lambda x: x.sum(-1),
            seeds=(1,),
        )


def masked_reduction_cases(setting: Setting) -> Iterator[Case]:
    """Means of many batches: the error of one number would be a matter of luck. Always fp32."""
    active = torch.arange(4097, device=setting.device) % 3 != 0
    if setting.device.type != "cpu":  # the library's sum of a part errs less: docs/limits.md
        active = torch.ones_like(active)

    def of_rows(mean: Op) -> Op:
        return lambda values: torch.stack([mean(row) for row in values.unbind(0)])

    stock = of_rows(lambda row: row[active].mean())
    yield Case(
        op="masked_reduction",
        size=f"4097, {int(active.sum())} active",
        rows=("values",),
        gradients=("values",),
        outputs=("mean",),
        draw=lambda rows, seed: (probe((rows, 4097), seed=seed, device=setting.device),),
        draw_dys=lambda rows, seed: (probe((rows,), seed=seed + 1, device=setting.device),),
        call=of_rows(lambda row: masked_mean(row, active)),
        stock=stock,
        reference=stock,
        seeds=(1,),
        count=256,
    )


def gradient_norm_cases(setting: Setting) -> Iterator[Case]:
    """Norms of many sets of gradients, which are fp32 whatever the model is."""
    sizes = (3, 96, 331)

    def draw(sets: int, seed: int) -> tuple[Tensor, ...]:
        drawn = [
            torch.cat([probe((n, 96), seed=64 * i + n, device=setting.device) for n in sizes])
            for i in range(sets)
        ]
        return (torch.stack(drawn),)

    def of_sets(norm: Op) -> Op:
        return lambda sets: torch.stack([norm(list(one.split(sizes))) for one in sets.unbind(0)])

    yield Case(
        op="gradient_norm",
        size="430 x 96",
        rows=("sets",),
        outputs=("norm",),
        draw=draw,
        call=of_sets(gradient_norm),
        stock=of_sets(torch.nn.utils.get_total_norm),
        reference=of_sets(lambda gradients: torch.cat([g.double() for g in gradients]).norm()),
        seeds=(0,),
        count=64,
    )
