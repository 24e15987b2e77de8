"""What `rl-consistency verify` runs: every check of every claim, op by op and on whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency.kernels.operand import DTYPES
from rl_consistency.models.families import check_config
from rl_consistency.models.patch import patch
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity import (
    accuracy_checks,
    attention_checks,
    chain_checks,
    fold_checks,
    identity_checks,
    op_checks,
    rollout_checks,
    schedule_checks,
)
from rl_consistency.parity.chain_checks import Chain
from rl_consistency.parity.claims import Check, Result, Tally
from rl_consistency.parity.op_setup import CPU, TINY_SHAPES, OpSetup, OpShapes, shapes_of
from rl_consistency.parity.presets import (
    PRESETS,
    REAL_PRESETS,
    build_preset,
    known_presets,
    preset_config,
)
from rl_consistency.parity.sweep import Sweep, sweep_for

MAX_TOKENS = 17
"""Tokens generated per completion; more than one cache block of 16."""

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

OpCheck = Callable[[Tally, OpSetup], None]
ChainCheck = Callable[[Tally, Chain], None]

OP_CHECKS: tuple[tuple[str, str, str, OpCheck], ...] = (
    ("C1", "linear", "rows: y, dX", op_checks.check_linear),
    ("C1", "rms_norm", "rows: y, dx", op_checks.check_rms_norm),
    ("C1", "rotary", "rows: q, k, dq, dk; table", op_checks.check_rotary),
    ("C1", "glu", "rows: y and gradients", op_checks.check_glu),
    ("C1", "embedding", "rows", op_checks.check_embedding),
    ("C1", "attention", "packed: o, lse", attention_checks.check_attention),
    ("C1", "attention backward", "packed: dq, dk, dv", attention_checks.check_attention_backward),
    (
        "C1",
        "paged attention",
        "chunks, decode, cache blocks",
        attention_checks.check_paged_attention,
    ),
    ("C1", "token_logprobs", "rows, truncated too; dhidden", op_checks.check_token_logprobs),
    ("C1", "masked_reduction", "padding", op_checks.check_masked_reduction),
    ("C1", "gradient_norm", "storage, threads", op_checks.check_gradient_norm),
    ("C3", "linear", "dW, dbias: cuts, filler", fold_checks.check_linear_fold),
    ("C3", "rms_norm", "dweight: cuts, filler", fold_checks.check_rms_norm_fold),
    ("C3", "embedding", "dweight: cuts, filler", fold_checks.check_embedding_fold),
    ("C3", "token_logprobs", "dW of the LM head: cuts, filler", fold_checks.check_lm_head_fold),
)
"""(claim, subject, what is varied, check) for every op and dtype."""

_ACCURACY: tuple[tuple[str, OpCheck], ...] = (
    ("linear", accuracy_checks.check_linear_accuracy),
    ("rms_norm", accuracy_checks.check_rms_norm_accuracy),
    ("rotary", accuracy_checks.check_rotary_accuracy),
    ("glu", accuracy_checks.check_glu_accuracy),
    ("embedding", accuracy_checks.check_embedding_accuracy),
    ("attention", accuracy_checks.check_attention_accuracy),
    ("token_logprobs", accuracy_checks.check_token_logprobs_accuracy),
    ("masked_reduction", accuracy_checks.check_masked_reduction_accuracy),
    ("gradient_norm", accuracy_checks.check_gradient_norm_accuracy),
)

SCHEDULE_CHECKS: tuple[tuple[str, OpCheck], ...] = (
    ("matmul", schedule_checks.check_matmul_schedules),
    ("gradient fold", schedule_checks.check_gradient_fold_schedules),
    ("attention", schedule_checks.check_attention_schedules),
    ("token_logprobs", schedule_checks.check_token_logprobs_schedules),
)
"""(op, check) for every table of schedules; on a GPU only, the CPU having one schedule per op."""

CHAIN_CHECKS: tuple[tuple[str, str, str, ChainCheck], ...] = (
    ("C1", "chain, packed", "batch, order, neighbours, gaps", chain_checks.check_packed_chain),
    ("C1", "chain, padded", "left, right, position resets", chain_checks.check_padded_chain),
    ("C1", "chain, paged", "chunks, decode, cache blocks", chain_checks.check_paged_chain),
    ("C1", "chain, logprobs", "batch, padding, LM head rows", chain_checks.check_logprob_chain),
    (
        "C1",
        "rollout engine",
        "batch, chunks, sharing, preemption",
        partial(rollout_checks.check_engine, max_tokens=MAX_TOKENS),
    ),
    (
        "C2",
        "rollout and training",
        "packed, padded; truncated sampling",
        partial(rollout_checks.check_rollout_against_training, max_tokens=MAX_TOKENS),
    ),
    ("C3", "chain, regrouped", "micro-batches, padding, gaps", chain_checks.check_gradient_chain),
    (
        "C3",
        "chain, recomputed",
        "gradient checkpointing",
        chain_checks.check_gradient_checkpointing,
    ),
)
"""(claim, subject, what is varied, check) for every model and dtype."""

PROCESS_CHECKS = (
    ("C7", "fingerprint", "orders, strictness, settings", identity_checks.check_fingerprint),
    ("C7", "one function", "rollout and training", identity_checks.check_one_function),
)
"""(claim, subject, what is varied, check), once per process."""


QUICK_LAYERS = 2
"""Layers of a model of real shape, unless all are asked for."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One model to verify."""

    name: str
    dtype: torch.dtype
    device: torch.device = CPU
    sweep: Sweep
    build: Callable[[], nn.Module]
    shapes: OpShapes = TINY_SHAPES
    """Sizes at which the ops are checked, beside the tiny ones."""

    @property
    def scope(self) -> str:
        return f"{self.name} {DTYPE_NAMES[self.dtype]}"


def default_targets(
    dtypes: Sequence[torch.dtype] = (), *, device: torch.device = CPU, quick: bool = False
) -> list[Target]:
    """On a CPU the first preset over the full sweep and the other families over a smaller one; on
    a GPU all of these and the smallest model of real shape over one sweep."""
    if device.type == "cuda":
        names = (*PRESETS, next(iter(REAL_PRESETS)))
        return [
            target
            for name in names
            for target in preset_targets(name, dtypes, device=device, quick=quick)
        ]
    targets = []
    for i, name in enumerate(PRESETS):
        targets += preset_targets(name, dtypes, device=device, quick=quick or i > 0)
    return targets


def preset_targets(
    name: str,
    dtypes: Sequence[torch.dtype],
    *,
    device: torch.device = CPU,
    quick: bool | None = None,
) -> list[Target]:
    """One preset in some dtypes.

    Args:
        name: tiny, or on a GPU of real shape.
        dtypes: none given: fp32 and bf16 on a CPU, fp16 too on a GPU.
        device: where to build and run it.
        quick: the smaller sweep, and two layers of a model of real shape; None is True on a GPU,
            False on a CPU.

    Raises:
        ValueError: an unknown preset, or one too large for a CPU.
    """
    if name not in known_presets():
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(known_presets())}.")
    real = name in REAL_PRESETS
    if real and device.type == "cpu":
        raise ValueError(
            f"preset {name!r} has its real shapes, which take hours on a CPU; run it with --device "
            f"cuda, or choose one of {', '.join(PRESETS)}."
        )
    quick = device.type == "cuda" if quick is None else quick
    layers = QUICK_LAYERS if real and quick else None
    return [
        Target(
            name=name,
            dtype=dtype,
            device=device,
            sweep=sweep_for(device, quick=quick),
            build=partial(build_preset, name, dtype, device=device, num_layers=layers),
            shapes=shapes_of(name, preset_config(name)) if real else TINY_SHAPES,
        )
        for dtype in dtypes or default_dtypes(device)
    ]


def default_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """fp32 and bf16; on a GPU fp16 as well."""
    return DTYPES if device.type == "cuda" else DTYPES[:2]


def directory_targets(
    directory: Path,
    dtypes: Sequence[torch.dtype],
    *,
    device: torch.device = CPU,
    quick: bool = False,
) -> list[Target]:
    """A model directory in some dtypes, or in the one it was saved in.

    Raises:
        FileNotFoundError: no such directory, or no config.json in it.
        ValueError: an architecture or dtype without canonical orders.
    """
    if not (directory / "config.json").is_file():
        what = "has no config.json" if directory.is_dir() else "is not a directory"
        raise FileNotFoundError(
            f"{directory} {what}; --model takes a directory written by save_pretrained."
        )
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    check_config(config)
    saved = getattr(config, "dtype", None) or torch.float32
    chosen = list(dtypes) or [saved]
    for dtype in chosen:
        if dtype not in DTYPES:
            raise ValueError(
                f"{directory} is in {dtype}; canonical orders exist for "
                f"{', '.join(map(str, DTYPES))}. Choose one with --dtype."
            )
    return [
        Target(
            name=directory.name,
            dtype=d,
            device=device,
            sweep=sweep_for(device, quick=quick),
            build=partial(_load, directory, d, device),
        )
        for d in chosen
    ]


def _load(directory: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {directory} are damaged ({error}); save them again."
        ) from error
    return model.to(device).eval()  # type: ignore[return-value]


def process_checks(device: torch.device = CPU) -> list[Check]:
    """Checks that no model or dtype takes part in."""
    return [
        _check(claim, subject, what, partial(_with_device, body, device), scope="process")
        for claim, subject, what, body in PROCESS_CHECKS
    ]


def _with_device(body: Callable[..., None], device: torch.device, tally: Tally) -> None:
    body(tally, device)


def op_checks_in(setup: OpSetup) -> list[Check]:
    """Checks of every op in one dtype, at one set of sizes."""
    rows = OP_CHECKS + tuple(("C6", op, "values, gradients", body) for op, body in _ACCURACY)
    return [_op_check(*row, setup) for row in rows]


def schedule_checks_in(setup: OpSetup) -> list[Check]:
    """Checks of every table of schedules, on a GPU; else none."""
    if setup.device.type != "cuda":
        return []
    rows = [("C1", f"schedules: {op}", "every entry of the table") for op, _ in SCHEDULE_CHECKS]
    bodies = [body for _, body in SCHEDULE_CHECKS]
    return [_op_check(*row, body, setup) for row, body in zip(rows, bodies, strict=True)]


def _op_check(claim: str, subject: str, what: str, body: OpCheck, setup: OpSetup) -> Check:
    def held(tally: Tally) -> None:
        # As inside a patched model; without them no library product is a schedule.
        with numeric_settings():
            body(tally, setup)

    scope = f"{setup.shapes.name} {DTYPE_NAMES[setup.dtype]}".lstrip()
    return _check(claim, subject, what, held, scope=scope)


@contextmanager
def chain_checks_of(target: Target) -> Iterator[list[Check]]:
    """Checks of one whole model, which is built and patched for the length of the block."""
    model = target.build()
    with patch(model):
        chain = Chain(model, target.sweep)
        yield [
            _check(
                claim,
                subject,
                what,
                lambda tally, body=body: body(tally, chain),
                scope=target.scope,
            )
            for claim, subject, what, body in CHAIN_CHECKS
        ]


def op_setups(targets: Sequence[Target]) -> list[OpSetup]:
    """Every dtype at the tiny sizes, over its first target's sweep, and at each model's own."""
    found: dict[tuple[torch.dtype, str], OpSetup] = {}
    for target in targets:
        for shapes in (TINY_SHAPES, target.shapes):
            setup = OpSetup(
                dtype=target.dtype, device=target.device, sweep=target.sweep, shapes=shapes
            )
            found.setdefault((target.dtype, shapes.name), setup)
    return list(found.values())


def _checks_of_ops(targets: Sequence[Target]) -> list[Check]:
    setups = op_setups(targets)
    checks: list[Check] = []
    for setup in setups:
        checks += op_checks_in(setup)
        # Ragged sizes have fewer schedules; the tables are for the real ones, if there are any.
        if setup.shapes.name or not any(s.shapes.name for s in setups):
            checks += schedule_checks_in(setup)
    return checks


def count_checks(targets: Sequence[Target]) -> int:
    """Checks that `run_checks` will make."""
    return len(PROCESS_CHECKS) + sum(
        len(_checks_of_ops(own)) + len(CHAIN_CHECKS) * len(own) for own in _by_dtype(targets)
    )


def _by_dtype(targets: Sequence[Target]) -> list[list[Target]]:
    dtypes = dict.fromkeys(target.dtype for target in targets)
    return [[target for target in targets if target.dtype == dtype] for dtype in dtypes]


def run_checks(
    targets: Sequence[Target],
    *,
    on_start: Callable[[Check], None] = lambda check: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every check: the process, then dtype by dtype the ops and each target's chain.

    Args:
        targets: models to verify.
        on_start: called with each check before it runs.
        on_result: called with each result.
    """
    results: list[Result] = []

    def run(checks: Sequence[Check]) -> None:
        for check in checks:
            on_start(check)
            results.append(check.run())
            on_result(results[-1])

    run(process_checks(targets[0].device if targets else CPU))
    for own in _by_dtype(targets):
        run(_checks_of_ops(own))
        for target in own:
            with chain_checks_of(target) as checks:
                run(checks)
    return results


def _check(claim: str, subject: str, what: str, body: Callable[..., None], *, scope: str) -> Check:
    return Check(claim=claim, subject=subject, what=what, scope=scope, body=body)
