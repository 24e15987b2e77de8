"""The models that `rl-consistency verify` looks at, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rl_consistency.cases.case import CPU, TINY_SHAPES, OpShapes, shapes_of
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.models.families import check_config
from rl_consistency.trainers.policy import read_config, read_model
from rl_consistency.verify.presets import PRESETS, REAL_PRESETS, build_preset, preset_config
from rl_consistency.verify.sweep import Sweep, sweep_for

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One model to verify."""

    name: str
    dtype: torch.dtype
    device: torch.device = CPU
    sweep: Sweep
    build: Callable[[], nn.Module]
    parameters: int = 0
    """Parameters of the model, each counted once."""
    shapes: OpShapes = TINY_SHAPES
    """Sizes at which the ops are checked, beside the tiny ones."""

    @property
    def scope(self) -> str:
        return f"{self.name} {DTYPE_NAMES[self.dtype]}"


def default_targets(
    dtypes: Sequence[torch.dtype] = (), *, device: torch.device = CPU, quick: bool = False
) -> list[Target]:
    """The targets where none is named.

    On a CPU: the first preset over the full sweep and the other families over a smaller one. On a
    GPU: all of these and the smallest model of real shape over one sweep.
    """
    first, *others = PRESETS
    targets = preset_targets(first, dtypes, device=device, quick=quick)
    if cuda := device.type == "cuda":
        others.append(next(iter(REAL_PRESETS)))
    for name in others:
        targets += preset_targets(name, dtypes, device=device, quick=quick or not cuda)
    return targets


def preset_targets(
    name: str,
    dtypes: Sequence[torch.dtype],
    *,
    device: torch.device = CPU,
    quick: bool | None = None,
) -> list[Target]:
    """One preset in some dtypes, or where none is given in fp32 and bf16, on a GPU fp16 too.

    `quick` takes the smaller sweep, and two layers of a model of real shape; None: on a GPU only.
    An unknown preset, or one too large for a CPU, is a ValueError.
    """
    cuda, real = device.type == "cuda", name in REAL_PRESETS
    quick = cuda if quick is None else quick
    layers = 2 if real and quick else None
    config = preset_config(name, num_layers=layers)
    if real and not cuda:
        text = f"preset {name!r} has its real shapes, which take hours on a CPU; run it with "
        raise ValueError(f"{text}--device cuda, or choose one of {', '.join(PRESETS)}.")
    build = partial(build_preset, name, device=device, num_layers=layers)
    shapes = shapes_of(name, config) if real else TINY_SHAPES
    chosen = dtypes or (DTYPES if cuda else DTYPES[:2])
    return _targets(name, config, chosen, device, quick, build, shapes)


def directory_targets(
    directory: Path,
    dtypes: Sequence[torch.dtype],
    *,
    device: torch.device = CPU,
    quick: bool = False,
) -> list[Target]:
    """A model directory in some dtypes, or in the one it was saved in. An architecture or dtype
    without canonical orders is a ValueError."""
    if not (directory / "config.json").is_file():
        what = "has no config.json" if directory.is_dir() else "is not a directory"
        text = f"{directory} {what}; --model takes a directory written by save_pretrained."
        raise FileNotFoundError(text)
    config = read_config(directory)
    check_config(config)
    chosen = list(dtypes) or [getattr(config, "dtype", None) or torch.float32]
    if unknown := [dtype for dtype in chosen if dtype not in DTYPES]:
        allowed = f"canonical orders exist for {', '.join(map(str, DTYPES))}"
        raise ValueError(f"{directory} is in {unknown[0]}; {allowed}. Choose one with --dtype.")
    build = partial(_load, directory, device)
    return _targets(directory.name, config, chosen, device, quick, build)


def _targets(
    name: str,
    config: PreTrainedConfig,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    quick: bool,
    build: Callable[[torch.dtype], nn.Module],
    shapes: OpShapes = TINY_SHAPES,
) -> list[Target]:
    with torch.device("meta"):  # no weight is made
        model = AutoModelForCausalLM.from_config(config)
    parameters, sweep = sum(p.numel() for p in model.parameters()), sweep_for(device, quick=quick)
    given = {"name": name, "device": device, "sweep": sweep, "parameters": parameters}
    return [
        Target(**given, dtype=dtype, build=partial(build, dtype), shapes=shapes) for dtype in dtypes
    ]


def _load(directory: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    model = read_model(directory, dtype)
    return model.to(device).eval()  # type: ignore[return-value]
