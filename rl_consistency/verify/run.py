"""What `rl-consistency verify` runs: every check of every claim, op by op and on whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rl_consistency.cases.case import CPU, TINY_SHAPES
from rl_consistency.cases.table import CASES, PARTS
from rl_consistency.models.patch import patch
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.verify.checks import attention, identity, ops, rollout, schedules, whole_model
from rl_consistency.verify.checks.accuracy import check_accuracy
from rl_consistency.verify.checks.whole_model import Chain
from rl_consistency.verify.claims import Check, Result, Tally
from rl_consistency.verify.processes import Job, run_in_processes
from rl_consistency.verify.sweep import OpSetup
from rl_consistency.verify.targets import DTYPE_NAMES, Target

OpCheck = Callable[[Tally, OpSetup], None]
ChainCheck = Callable[[Tally, Chain], None]

OP_CHECKS: tuple[tuple[str, str, str, OpCheck], ...] = (
    ("C1", "linear", "rows: y, dX; gated products", partial(ops.check_rows, op="linear")),
    ("C1", "rms_norm", "rows: y, dx", partial(ops.check_rows, op="rms_norm")),
    ("C1", "rotary", "rows: q, k, dq, dk; table", ops.check_rotary),
    ("C1", "glu", "rows: y and gradients", partial(ops.check_rows, op="glu")),
    ("C1", "embedding", "rows", partial(ops.check_rows, op="embedding")),
    ("C1", "attention", "packed: o, lse", attention.check_attention),
    ("C1", "attention backward", "packed: dq, dk, dv", attention.check_attention_backward),
    ("C1", "paged attention", "chunks, decode, cache blocks", attention.check_paged_attention),
    ("C1", "router", "rows: ids, weights, dx; ties", ops.check_router),
    ("C1", "experts", "rows: y, dx, dweights; filler", ops.check_experts),
    ("C1", "token_logprobs", "rows, truncated too; dhidden", ops.check_token_logprobs),
    ("C1", "masked_reduction", "padding", ops.check_masked_reduction),
    ("C1", "gradient_norm", "storage, threads", ops.check_gradient_norm),
    ("C3", "linear", "dW, dbias: cuts, filler", partial(ops.check_fold, op="linear")),
    ("C3", "rms_norm", "dweight: cuts, filler", partial(ops.check_fold, op="rms_norm")),
    ("C3", "embedding", "dweight: cuts, filler", partial(ops.check_fold, op="embedding")),
    ("C3", "router", "dweight: cuts, filler", partial(ops.check_fold, op="router")),
    ("C3", "experts", "runs: cuts, filler", ops.check_experts_fold),
    ("C3", "token_logprobs", "dW of the LM head: cuts, filler", ops.check_lm_head_fold),
    *(
        ("C6", op, "values, gradients", partial(check_accuracy, op=op))
        for op in CASES
        if op not in PARTS
    ),
)
"""(claim, subject, what is varied, check) for every op and dtype."""

SCHEDULE_CHECKS: tuple[tuple[str, OpCheck], ...] = (
    ("matmul", schedules.check_matmul),
    ("fused products", partial(schedules.check_launches, of=schedules.fused_products)),
    ("gradient fold", partial(schedules.check_launches, of=schedules.gradient_folds)),
    ("attention", partial(schedules.check_launches, of=schedules.attention)),
    ("token_logprobs", partial(schedules.check_launches, of=schedules.token_logprobs)),
    ("glu", partial(schedules.check_launches, of=schedules.gated)),
    ("rotary", partial(schedules.check_launches, of=schedules.rotation)),
    ("rms_norm", partial(schedules.check_launches, of=schedules.norms)),
    ("gradient rows", partial(schedules.check_launches, of=schedules.gradient_rows)),
    ("sampling", schedules.check_sampling),
    ("router", partial(schedules.check_launches, of=schedules.router)),
    ("experts", partial(schedules.check_launches, of=schedules.experts)),
    ("experts backward", partial(schedules.check_launches, of=schedules.experts_backward)),
)
"""(op, check) for the tables of schedules of all ops; on a GPU only: the CPU has one schedule per
op."""

CHAIN_CHECKS: tuple[tuple[str, str, str, ChainCheck], ...] = (
    ("C1", "chain, packed", "batch, order, neighbours, gaps", whole_model.check_packed_chain),
    ("C1", "chain, padded", "left, right, position resets", whole_model.check_padded_chain),
    ("C1", "chain, paged", "chunks, decode, cache blocks", whole_model.check_paged_chain),
    ("C1", "chain, logprobs", "batch, padding, LM head rows", whole_model.check_logprob_chain),
    ("C1", "rollout engine", "batch, chunks, sharing, preemption", rollout.check_engine),
    ("C2", "rollout and training", "packed, padded; truncated sampling", rollout.check_training),
    ("C2", "weights in place", "all weights written", whole_model.check_weights_in_place),
    ("C3", "chain, regrouped", "micro-batches, padding, gaps", whole_model.check_gradient_chain),
    ("C3", "chain, recomputed", "gradient checkpointing", whole_model.check_gradient_checkpointing),
    ("C3", "chain, replayed", "CUDA graphs, rows padded", whole_model.check_captured_layers),
)
"""(claim, subject, what is varied, check) for every model and dtype."""

PROCESS_CHECKS = (
    ("C7", "fingerprint", "orders, strictness, settings", identity.check_fingerprint),
    ("C7", "one function", "rollout and training", identity.check_one_function),
)
"""(claim, subject, what is varied, check), once per process."""

# Device memory, estimated from above by what was seen on an H200.
CHAIN_BYTES = 15 * 2**30
"""Bytes that checks of a model of real shape take beside its parameters: activations, logits and
caches."""
GRADIENTS_BYTES = 16
"""Bytes for each parameter of such a model: four sets of gradients in fp32."""
OP_BYTES = 5 * 2**30
"""Bytes that an op's checks take at real sizes."""
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
"""Bytes that checks take at tiny sizes, and those of a small model beside its parameters."""
LARGE_PARAMETERS = 50_000_000
"""Fewest parameters of a model whose checks take `CHAIN_BYTES`."""


def process_checks(device: torch.device = CPU) -> list[Check]:
    """Checks that no model or dtype takes part in."""
    return _checks(PROCESS_CHECKS, "process", device=device)


def op_checks_in(setup: OpSetup) -> list[Check]:
    """Checks of every op in one dtype, at one set of sizes."""
    rows = [(*row, partial(_with_settings, check=check)) for *row, check in OP_CHECKS]
    return _checks(rows, _scope(setup), setup=setup)


def schedule_checks_in(setup: OpSetup) -> list[Check]:
    """Checks of every table of schedules, on a GPU; else none."""
    rows = [
        ("C1", f"schedules: {op}", "every entry of the table", partial(_with_settings, check=check))
        for op, check in SCHEDULE_CHECKS
        if setup.device.type == "cuda"
    ]
    return _checks(rows, _scope(setup), setup=setup)


@contextmanager
def chain_checks_of(target: Target) -> Iterator[list[Check]]:
    """Checks of one whole model, which is built and patched for the length of the block."""
    model = target.build()
    # Checks look at ops, one by one; one check captures the layers itself.
    with patch(model, grad_dtype=torch.float32, cuda_graphs=False):
        built = Chain(model, target.sweep)
        yield _checks(chain_rows(target.dtype), target.scope, chain=built)


def chain_rows(dtype: torch.dtype) -> list[tuple[str, str, str, ChainCheck]]:
    """The rows for a model of this dtype; fp16 is not trained."""
    return [row for row in CHAIN_CHECKS if row[0] != "C3" or dtype != torch.float16]


def _checks(rows: Iterable[Any], scope: str, **given: Any) -> list[Check]:
    return [
        Check(claim=claim, subject=subject, scope=scope, what=what, body=partial(body, **given))
        for claim, subject, what, body in rows
    ]


def _scope(setup: OpSetup) -> str:
    return f"{setup.shapes.name} {DTYPE_NAMES[setup.dtype]}".lstrip()


def _with_settings(tally: Tally, check: OpCheck, setup: OpSetup) -> None:
    # As inside a patched model; without them no library product is a schedule.
    with numeric_settings():
        check(tally, setup)


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
    device = targets[0].device if targets else CPU
    jobs = [Job(scope="process", open=partial(nullcontext, process_checks(device)))]
    for dtype in dict.fromkeys(target.dtype for target in targets):
        own = [target for target in targets if target.dtype == dtype]
        jobs += _jobs_of_ops(op_setups(own))
        for t in own:
            memory = CHAIN_BYTES if t.parameters >= LARGE_PARAMETERS else TINY_BYTES
            memory += t.parameters * (dtype.itemsize + GRADIENTS_BYTES)
            jobs.append(Job(scope=t.scope, memory=memory, open=partial(chain_checks_of, t)))
    return jobs


def _jobs_of_ops(setups: Sequence[OpSetup]) -> Iterator[Job]:
    """One job for each op's check, at all sizes of a dtype: they share what has to be compiled."""
    # Ragged sizes have fewer schedules; the tables are for the real ones, if there are any.
    real = [s for s in setups if s.shapes.name]
    by_op = [
        *zip(*map(op_checks_in, setups), strict=True),
        *zip(*map(schedule_checks_in, real or setups), strict=True),
    ]
    table = max((s.shapes.vocab_size * s.shapes.hidden_size for s in real), default=0)
    for checks in by_op:
        key, memory = checks[0].key, OP_BYTES if real else TINY_BYTES
        memory += table * next((b for op, b in TABLE_OPS.items() if key.endswith(op)), 0)
        yield Job(scope=key, memory=memory, open=partial(nullcontext, [*checks]))


def run_checks(
    targets: Sequence[Target],
    *,
    only: Sequence[str] = (),
    processes: int = 1,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run all checks, shared among some processes: most of a first run on a GPU is compilation.

    `only` keeps the checks whose scope holds one of these words, such as `C3 linear` or
    `tiny-qwen3 bf16`; ValueError where a word is in none. `on_result` is called with each result as
    soon as it is found. All are returned in the order of `jobs_of`. For errors of another process
    see `run_in_processes`.
    """
    jobs = jobs_of(targets)
    scopes = [job.scope for job in jobs]
    if idle := [word for word in only if not any(word in scope for scope in scopes)]:
        known = ", ".join(dict.fromkeys(scopes))
        raise ValueError(f"no check is called {idle[0]!r}; their names hold: {known}.")
    jobs = [job for job in jobs if not only or any(word in job.scope for word in only)]
    if processes > 1:
        device = targets[0].device if targets else CPU
        return run_in_processes(jobs, processes, device, on_result)
    return [result for job in jobs for result in job.run(on_result)]
