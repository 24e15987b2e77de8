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
from rl_consistency.parity import (
    accuracy_checks,
    attention_checks,
    chain_checks,
    fold_checks,
    identity_checks,
    op_checks,
    rollout_checks,
)
from rl_consistency.parity.chain_checks import Chain
from rl_consistency.parity.claims import Check, Result, Tally
from rl_consistency.parity.presets import PRESETS, build_preset
from rl_consistency.parity.sweep import FULL, QUICK, Sweep

MAX_TOKENS = 17
"""Tokens generated per completion; more than one cache block of 16."""

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

OpCheck = Callable[[Tally, Sweep, torch.dtype], None]
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

_ACCURACY: tuple[tuple[str, Callable[[Tally, torch.dtype], None]], ...] = (
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


@dataclass(frozen=True, kw_only=True)
class Target:
    """One model to verify."""

    name: str
    dtype: torch.dtype
    sweep: Sweep
    build: Callable[[], nn.Module]

    @property
    def scope(self) -> str:
        return f"{self.name} {DTYPE_NAMES[self.dtype]}"


def default_targets(dtypes: Sequence[torch.dtype] = (), *, quick: bool = False) -> list[Target]:
    """The first preset over the full sweep, the other families over a smaller one."""
    targets = []
    for i, name in enumerate(PRESETS):
        sweep = QUICK if quick or i else FULL
        targets += preset_targets(name, dtypes or DTYPES[:2], sweep)
    return targets


def preset_targets(name: str, dtypes: Sequence[torch.dtype], sweep: Sweep) -> list[Target]:
    """One preset in some dtypes.

    Raises:
        ValueError: an unknown preset.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}.")
    return [
        Target(name=name, dtype=d, sweep=sweep, build=partial(build_preset, name, d))
        for d in dtypes or DTYPES[:2]
    ]


def directory_targets(directory: Path, dtypes: Sequence[torch.dtype], sweep: Sweep) -> list[Target]:
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
        Target(name=directory.name, dtype=d, sweep=sweep, build=partial(_load, directory, d))
        for d in chosen
    ]


def _load(directory: Path, dtype: torch.dtype) -> nn.Module:
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {directory} are damaged ({error}); save them again."
        ) from error
    return model.eval()


def process_checks() -> list[Check]:
    """Checks that no model or dtype takes part in."""
    return [_check(*row, scope="process") for row in PROCESS_CHECKS]


def op_checks_in(dtype: torch.dtype, sweep: Sweep) -> list[Check]:
    """Checks of every op in one dtype."""
    scope = DTYPE_NAMES[dtype]
    checks = [
        _check(
            claim, subject, what, lambda tally, body=body: body(tally, sweep, dtype), scope=scope
        )
        for claim, subject, what, body in OP_CHECKS
    ]
    what = "values, gradients"
    return checks + [
        _check("C6", subject, what, lambda tally, body=body: body(tally, dtype), scope=scope)
        for subject, body in _ACCURACY
    ]


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


def count_checks(targets: Sequence[Target]) -> int:
    """Checks that `run_checks` will make."""
    dtypes = {target.dtype for target in targets}
    per_dtype = len(OP_CHECKS) + len(_ACCURACY)
    return len(PROCESS_CHECKS) + per_dtype * len(dtypes) + len(CHAIN_CHECKS) * len(targets)


def run_checks(
    targets: Sequence[Target],
    *,
    on_start: Callable[[Check], None] = lambda check: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every check: the process, the ops in each target's dtype, then each target's chain.

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

    run(process_checks())
    widest: dict[torch.dtype, Sweep] = {}
    for target in targets:
        widest.setdefault(target.dtype, target.sweep)
    for dtype, sweep in widest.items():
        run(op_checks_in(dtype, sweep))
    for target in targets:
        with chain_checks_of(target) as checks:
            run(checks)
    return results


def _check(claim: str, subject: str, what: str, body: Callable[..., None], *, scope: str) -> Check:
    return Check(claim=claim, subject=subject, what=what, scope=scope, body=body)
