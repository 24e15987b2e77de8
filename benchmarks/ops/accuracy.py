"""C6 as figures: each op's error against fp64 over that of the stock op, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.suite import Bench, Case
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.verify.checks.accuracy import check_accuracy
from rl_consistency.verify.checks.accuracy_cases import ACCURACY_CASES, FP32_ONLY, PARTS
from rl_consistency.verify.checks.op_setup import TINY_SHAPES, OpSetup, OpShapes, shapes_of
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.presets import preset_config

Check = Callable[[Tally, OpSetup], None]

CHECKS: dict[str, Check] = {
    op: partial(check_accuracy, op=op) for op in ACCURACY_CASES if op not in PARTS
}


def accuracy_cases(models: Sequence[str], dtypes: Sequence[torch.dtype]) -> list[Case]:
    """Every op at small ragged sizes and at each model's own, in every dtype."""
    sizes = [TINY_SHAPES, *(shapes_of(name, preset_config(name)) for name in models)]
    return [
        Case(
            work=op,
            shape={"sizes": shapes.name or "small"},
            dtype=str(dtype).removeprefix("torch."),
            run=partial(_error_ratio, check, dtype, shapes),
        )
        for shapes in sizes
        for dtype in dtypes
        for op, check in CHECKS.items()
        if dtype == torch.float32 or op not in FP32_ONLY
    ]


def _error_ratio(
    check: Check, dtype: torch.dtype, shapes: OpShapes, bench: Bench
) -> dict[str, Any]:
    tally = Tally()
    with numeric_settings():
        check(tally, OpSetup(dtype=dtype, device=bench.device, shapes=shapes))
    return {"error_ratio": tally.figure}
