"""What `rl-consistency verify` runs: every check of every claim, op by op and on whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rl_consistency.models.patch import patch
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.verify.checks import (
    attention,
    gradient_cuts,
    identity,
    rollout,
    row_schedules,
    rows,
    schedules,
    whole_model,
)
from rl_consistency.verify.checks.accuracy import check_accuracy
from rl_consistency.verify.checks.accuracy_cases import ACCURACY_CASES, PARTS
from rl_consistency.verify.checks.op_setup import CPU, TINY_SHAPES, OpSetup
from rl_consistency.verify.checks.whole_model import Chain
from rl_consistency.verify.claims import Check, Result, Tally
from rl_consistency.verify.processes import Job, run_in_processes
from rl_consistency.verify.targets import DTYPE_NAMES, Target

OpCheck = Callable[[Tally, OpSetup], None]
ChainCheck = Callable[[Tally, Chain], None]

OP_CHECKS: tuple[tuple[str, str, str, OpCheck], ...] = (
    ("C1", "linear", "rows: y, dX", rows.check_linear),
    ("C1", "rms_norm", "rows: y, dx", rows.check_rms_norm),
    ("C1", "rotary", "rows: q, k, dq, dk; table", rows.check_rotary),
    ("C1", "glu", "rows: y and gradients", rows.check_glu),
    ("C1", "embedding", "rows", rows.check_embedding),
    ("C1", "attention", "packed: o, lse", attention.check_attention),
    ("C1", "attention backward", "packed: dq, dk, dv", attention.check_attention_backward),
    ("C1", "paged attention", "chunks, decode, cache blocks", attention.check_paged_attention),
    ("C1", "token_logprobs", "rows, truncated too; dhidden", rows.check_token_logprobs),
    ("C1", "masked_reduction", "padding", rows.check_masked_reduction),
    ("C1", "gradient_norm", "storage, threads", rows.check_gradient_norm),
    ("C3", "linear", "dW, dbias: cuts, filler", gradient_cuts.check_linear_fold),
    ("C3", "rms_norm", "dweight: cuts, filler", gradient_cuts.check_rms_norm_fold),
    ("C3", "embedding", "dweight: cuts, filler", gradient_cuts.check_embedding_fold),
    ("C3", "token_logprobs", "dW of the LM head: cuts, filler", gradient_cuts.check_lm_head_fold),
    *(
        ("C6", op, "values, gradients", partial(check_accuracy, op=op))
        for op in ACCURACY_CASES
        if op not in PARTS
    ),
)
"""(claim, subject, what is varied, check) for every op and dtype."""

SCHEDULE_CHECKS: tuple[tuple[str, OpCheck], ...] = (
    ("matmul", schedules.check_matmul_schedules),
    ("fused products", schedules.check_fused_product_schedules),
    ("gradient fold", schedules.check_gradient_fold_schedules),
    ("attention", schedules.check_attention_schedules),
    ("token_logprobs", schedules.check_token_logprobs_schedules),
    ("glu", row_schedules.check_glu_schedules),
    ("rotary", row_schedules.check_rotary_schedules),
    ("rms_norm", row_schedules.check_rms_norm_schedules),
    ("gradient rows", row_schedules.check_gradient_row_schedules),
    ("sampling", row_schedules.check_sampling_schedules),
)
"""(op, check) for every table of schedules; on a GPU only, the CPU having one schedule per op."""

CHAIN_CHECKS: tuple[tuple[str, str, str, ChainCheck], ...] = (
    ("C1", "chain, packed", "batch, order, neighbours, gaps", whole_model.check_packed_chain),
    ("C1", "chain, padded", "left, right, position resets", whole_model.check_padded_chain),
    ("C1", "chain, paged", "chunks, decode, cache blocks", whole_model.check_paged_chain),
    ("C1", "chain, logprobs", "batch, padding, LM head rows", whole_model.check_logprob_chain),
    ("C1", "rollout engine", "batch, chunks, sharing, preemption", rollout.check_engine),
    ("C2", "rollout and training", "packed, padded; truncated sampling", rollout.check_training),
    ("C3", "chain, regrouped", "micro-batches, padding, gaps", whole_model.check_gradient_chain),
    ("C3", "chain, recomputed", "gradient checkpointing", whole_model.check_gradient_checkpointing),
)
"""(claim, subject, what is varied, check) for every model and dtype."""

PROCESS_CHECKS = (
    ("C7", "fingerprint", "orders, strictness, settings", identity.check_fingerprint),
    ("C7", "one function", "rollout and training", identity.check_one_function),
)
"""(claim, subject, what is varied, check), once per process."""

# Device memory, estimated from above by what was seen on an H200.
CHAIN_BYTES = 15 * 2**30
"""Of the checks of a model of real shape beside its parameters: activations, logits and caches."""
GRADIENTS_BYTES = 16
"""Per parameter of such a model: four sets of gradients in fp32."""
OP_BYTES = 5 * 2**30
"""Of an op's checks at real sizes."""
TABLE_OPS = {
    "C6 token_logprobs": 100,
    "C3 token_logprobs": 60,
    "token_logprobs": 12,
    "C3 embedding": 50,
    "embedding": 12,
}
"""Ops whose checks hold tables of vocabulary size by hidden size, and their bytes per element:
weights and gradients, ours, stock's and in fp64."""
TINY_BYTES = 2**30
"""Of any checks at tiny sizes, and of a small model's beside its parameters."""
LARGE_PARAMETERS = 50_000_000
"""Of a model whose checks take `CHAIN_BYTES`."""


def process_checks(device: torch.device = CPU) -> list[Check]:
    """Checks that no model or dtype takes part in."""
    return [_check(*row, "process", device=device) for row in PROCESS_CHECKS]


def _check(
    claim: str, subject: str, what: str, body: Callable[..., None], scope: str, **given: Any
) -> Check:
    body = partial(body, **given)
    return Check(claim=claim, subject=subject, what=what, scope=scope, body=body)


def op_checks_in(setup: OpSetup) -> list[Check]:
    """Checks of every op in one dtype, at one set of sizes."""
    return [_op_check(*row, setup) for row in OP_CHECKS]


def schedule_checks_in(setup: OpSetup) -> list[Check]:
    """Checks of every table of schedules, on a GPU; else none."""
    if setup.device.type != "cuda":
        return []
    what = "every entry of the table"
    return [_op_check("C1", f"schedules: {op}", what, body, setup) for op, body in SCHEDULE_CHECKS]


def _op_check(claim: str, subject: str, what: str, body: OpCheck, setup: OpSetup) -> Check:
    def held(tally: Tally) -> None:
        # As inside a patched model; without them no library product is a schedule.
        with numeric_settings():
            body(tally, setup)

    scope = f"{setup.shapes.name} {DTYPE_NAMES[setup.dtype]}".lstrip()
    return _check(claim, subject, what, held, scope)


@contextmanager
def chain_checks_of(target: Target) -> Iterator[list[Check]]:
    """Checks of one whole model, which is built and patched for the length of the block."""
    model = target.build()
    with patch(model):
        built = Chain(model, target.sweep)
        yield [_check(*row, target.scope, chain=built) for row in _chain_checks(target.dtype)]


def _chain_checks(dtype: torch.dtype) -> list[tuple[str, str, str, ChainCheck]]:
    """The rows for a model of this dtype; fp16 is not trained."""
    return [row for row in CHAIN_CHECKS if row[0] != "C3" or dtype != torch.float16]


def op_setups(targets: Sequence[Target]) -> list[OpSetup]:
    """Every dtype at the tiny sizes, over its first target's sweep, and at each model's own."""
    found: dict[tuple[torch.dtype, str], OpSetup] = {}
    for t in targets:
        for shapes in (TINY_SHAPES, t.shapes):
            setup = OpSetup(dtype=t.dtype, device=t.device, sweep=t.sweep, shapes=shapes)
            found.setdefault((t.dtype, shapes.name), setup)
    return list(found.values())


def jobs_of(targets: Sequence[Target]) -> list[Job]:
    """All checks: the process, then dtype by dtype the ops and each target's chain."""
    on_device = partial(_process_checks_on, _device_of(targets))
    jobs = [Job(scope="process", count=len(PROCESS_CHECKS), open=on_device)]
    for dtype in dict.fromkeys(target.dtype for target in targets):
        own = [target for target in targets if target.dtype == dtype]
        jobs += _jobs_of_ops(own)
        for t in own:
            memory = CHAIN_BYTES if t.parameters >= LARGE_PARAMETERS else TINY_BYTES
            memory += t.parameters * (dtype.itemsize + GRADIENTS_BYTES)
            made = partial(chain_checks_of, t)
            jobs.append(
                Job(scope=t.scope, count=len(_chain_checks(dtype)), memory=memory, open=made)
            )
    return jobs


def _device_of(targets: Sequence[Target]) -> torch.device:
    return targets[0].device if targets else CPU


def _jobs_of_ops(targets: Sequence[Target]) -> list[Job]:
    """One job for each op's check, at all sizes of a dtype: they share what has to be compiled."""
    setups = op_setups(targets)
    # Ragged sizes have fewer schedules; the tables are for the real ones, if there are any.
    real = [s for s in setups if s.shapes.name] or setups
    jobs = []
    for make, sizes in ((op_checks_in, setups), (schedule_checks_in, real)):
        for i, check in enumerate(make(sizes[0]) if sizes else []):
            memory, made = _op_memory(check.key, sizes), partial(_row_at, make, sizes, i)
            jobs.append(Job(scope=check.key, count=len(sizes), memory=memory, open=made))
    return jobs


def _op_memory(key: str, sizes: Sequence[OpSetup]) -> int:
    if not any(s.shapes.name for s in sizes):
        return TINY_BYTES
    table = max(s.shapes.vocab_size * s.shapes.hidden_size for s in sizes)
    return OP_BYTES + table * next((b for op, b in TABLE_OPS.items() if key.endswith(op)), 0)


# A check cannot be sent to another process; a function that makes it there can.


def _process_checks_on(device: torch.device) -> AbstractContextManager[list[Check]]:
    return nullcontext(process_checks(device))


def _row_at(
    make: Callable[[OpSetup], list[Check]], sizes: Sequence[OpSetup], index: int
) -> AbstractContextManager[list[Check]]:
    return nullcontext([make(setup)[index] for setup in sizes])


def count_checks(targets: Sequence[Target]) -> int:
    """Checks that `run_checks` will make."""
    return sum(job.count for job in jobs_of(targets))


def run_checks(
    targets: Sequence[Target],
    *,
    processes: int = 1,
    on_start: Callable[[Check], None] = lambda check: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every check: the process, then dtype by dtype the ops and each target's chain.

    Args:
        targets: models to verify.
        processes: how many share the checks; most of a first run on a GPU is compilation.
        on_start: called with each check before it runs, if it runs in this process.
        on_result: called with each result as soon as it is found.

    Returns:
        The results in the order of the checks.

    Raises:
        RuntimeError: the traceback of another process whose error cannot be sent here.
    """
    jobs = jobs_of(targets)
    if processes > 1:
        return run_in_processes(jobs, processes, _device_of(targets), on_result)
    results: list[Result] = []

    def found(result: Result) -> None:
        results.append(result)
        on_result(result)

    for job in jobs:
        job.run(on_start, found)
    return results
