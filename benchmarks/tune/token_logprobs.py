"""Times the schedules of `token_logprobs` on one NVIDIA GPU and checks that they agree.

`python -m benchmarks.tune.token_logprobs --seconds 240 --json FILE` measures 8192 tokens by hidden
sizes 1024, 2048 and 4096 by 151,936 ids in bf16: the forward reduction and the logit gradients by
every schedule of their tables and unfused, then the whole op for several chunks of tokens against
`log_softmax` of the full logits (and Liger's fused cross-entropy where it is installed), with peak
memory. Every schedule's bytes are compared with the first one's; a difference ends in exit status
1. It stops measuring when the seconds are spent and writes what it has.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_consistency.kernels.gradient_fold.op import GradientBuffer
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.sampling.statistics_triton import (
    vocabulary_combine,
    vocabulary_row_statistics,
)
from rl_consistency.kernels.token_logprobs.backward_triton import (
    token_gradient,
    token_gradient_table,
    token_row_gradient,
)
from rl_consistency.kernels.token_logprobs.forward_triton import token_statistics
from rl_consistency.kernels.token_logprobs.op import IGNORED, triton_token_logprobs
from rl_consistency.kernels.token_logprobs.plan import Plan, choose_plan
from rl_consistency.kernels.token_logprobs.schedules import (
    GRADIENT_SCHEDULES,
    STATISTICS_SCHEDULES,
    UNFUSED,
)

REPEATS = 5


@dataclass
class Session:
    """What is measured, and until when."""

    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def measure(self, work: str, name: str, call: Callable[[], object], **details: Any) -> None:
        """Median time and peak memory above what is allocated before the call."""
        if perf_counter() > self.deadline:
            return
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = []
        for _ in range(REPEATS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        peak = torch.cuda.max_memory_allocated() - before
        row = {"work": work, "name": name, "ms": median(times), "peak_bytes": peak, **details}
        self.rows.append(row)
        print(f"{work:<34}{median(times):9.3f} ms {peak / 2**20:9.0f} MiB  {name}", flush=True)

    def same(self, work: str, name: str, got: Tensor, expected: Tensor) -> None:
        """Note a schedule whose bytes differ."""
        if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
            self.differing.append(f"{work}: {name}")
            print(f"{work:<34} DIFFERS  {name}", flush=True)


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    rows: SamplingRows

    @classmethod
    def make(cls, tokens: int, width: int, vocabulary: int) -> Case:
        """Random operands with a few outlier channels, made on the device."""
        generator = torch.Generator("cuda").manual_seed(width)
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        hidden = normal(tokens, width)
        hidden[:, ::97] *= 8
        return cls(
            hidden,
            normal(vocabulary, width) * width**-0.5,
            torch.randint(vocabulary, (tokens,), generator=generator, device="cuda"),
            SamplingRows.uniform(tokens, device="cuda"),
        )


def tune_statistics(session: Session, case: Case, label: str) -> None:
    """The forward reduction by every schedule that a descriptor can feed, and unfused."""
    work = f"statistics {label}"
    divisor = case.rows.divisor

    def unfused() -> Tensor:
        chunk = case.weight.shape[1]
        pieces = [
            vocabulary_row_statistics(matmul_nt(h, case.weight), divisor[: len(h)], True)
            for h in case.hidden.split(chunk)
        ]
        return torch.cat(pieces, dim=2)

    calls: dict[str, Callable[[], Tensor]] = {"unfused": unfused}
    for i, schedule in STATISTICS_SCHEDULES.items():
        if schedule.kind == "tma":
            calls[f"{i}: {schedule}"] = partial(
                token_statistics, case.hidden, case.weight, divisor, True, i
            )
    expected = token_statistics(case.hidden, case.weight, divisor, True, "tma")
    for name, call in calls.items():
        session.measure(work, name, call)
        if perf_counter() < session.deadline:
            session.same(work, name, call(), expected)


def tune_gradient(session: Session, case: Case, label: str) -> None:
    """The logit gradients of one chunk of tokens."""
    width = case.weight.shape[1]
    work = f"gradient, {width} rows {label}"
    hidden, targets = case.hidden[:width], case.targets[:width]
    divisor = case.rows.divisor[:width]
    partials = token_statistics(hidden, case.weight, divisor, True, "tma")
    top, log_normalizer, entropy = vocabulary_combine(partials)
    dlogprobs, dentropy = torch.randn(2, width, device="cuda").unbind(0)
    table = token_gradient_table(
        divisor, top, log_normalizer, entropy, dlogprobs, dentropy, targets, IGNORED
    )
    rooms = [case.weight.new_empty(width, case.weight.shape[0]) for _ in range(2)]
    token_gradient(hidden, case.weight, table, rooms[0], True, "tma")

    def unfused() -> None:
        token_row_gradient(matmul_nt(hidden, case.weight), table, rooms[1], True)

    calls: dict[str, Callable[[], None]] = {"unfused": unfused}
    for i, schedule in GRADIENT_SCHEDULES.items():
        if schedule.kind == "tma":
            calls[f"{i}: {schedule}"] = partial(
                token_gradient, hidden, case.weight, table, rooms[1], True, i
            )
    for name, call in calls.items():
        session.measure(work, name, call)
        if perf_counter() < session.deadline:
            session.same(work, name, *rooms)


def fastest(session: Session, prefix: str, label: str) -> str:
    """Name of the fastest schedule measured for a piece of work, or of the default."""
    measured = [
        row
        for row in session.rows
        if row["work"].startswith(prefix) and row["work"].endswith(label)
    ]
    if not measured:
        return "tma"
    name = min(measured, key=lambda row: row["ms"])["name"]
    return name.split(":")[0]


def step(case: Case, head: nn.Parameter, plan: Plan) -> None:
    """Forward and backward of the op, with the gradient folded from zero."""
    head.grad = None
    hidden = case.hidden.detach().requires_grad_()
    logprobs, _ = triton_token_logprobs(
        hidden, head, case.targets, case.rows, None, GradientBuffer(head), plan
    )
    logprobs.mean().neg().backward()


def stock_step(case: Case, head: nn.Parameter) -> None:
    """What a trainer without a fused head does."""
    head.grad = None
    hidden = case.hidden.detach().requires_grad_()
    logits = F.linear(hidden, head).float()
    logprobs = logits.log_softmax(-1).gather(1, case.targets[:, None])
    logprobs.mean().neg().backward()


def liger_step(loss: Callable[..., Tensor], case: Case, head: nn.Parameter) -> None:
    """Liger's fused linear cross-entropy."""
    head.grad = None
    hidden = case.hidden.detach().requires_grad_()
    loss(head, hidden, case.targets).backward()


def tune_whole(session: Session, case: Case, label: str) -> None:
    """Forward, and forward with backward, for several chunks, against the others."""
    head = nn.Parameter(case.weight)
    tuned = {
        "statistics": fastest(session, "statistics", label),
        "gradient": fastest(session, "gradient", label),
    }
    default = choose_plan(case.hidden, case.weight, case.rows)
    plans = {"default": default}
    for times in (0.5, 1, 1.5, 2):
        tokens = int(times * case.weight.shape[1])
        plans[f"tuned, chunk {tokens}"] = Plan(
            chunk_tokens=tokens, statistics=tuned["statistics"], gradient=tuned["gradient"]
        )
    plans["unfused"] = replace(default, statistics=UNFUSED, gradient=UNFUSED)
    for name, plan in plans.items():
        session.measure(f"both {label}", name, partial(step, case, head, plan), plan=asdict(plan))
    operands = (case.hidden, case.weight, case.targets, case.rows)
    with torch.no_grad():
        session.measure(f"forward {label}", "default", partial(triton_token_logprobs, *operands))
        session.measure(
            f"forward {label}",
            "log_softmax",
            lambda: (
                F.linear(case.hidden, case.weight)
                .float()
                .log_softmax(-1)
                .gather(1, case.targets[:, None])
            ),
        )
    session.measure(f"both {label}", "log_softmax", partial(stock_step, case, head))
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyLoss,
        )

        # Ours is an fp32 gradient; Liger's default adds up in the model dtype.
        for name, accumulator in (("Liger", None), ("Liger, fp32 gradient", torch.float32)):
            loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulator)
            session.measure(f"both {label}", name, partial(liger_step, loss, case, head))


def main() -> int:
    """Run, print, write; 1 where a schedule's bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("an NVIDIA GPU is needed; none is visible.")
    session = Session(perf_counter() + options.seconds)
    for width in options.widths:
        if perf_counter() > session.deadline:
            print(f"hidden {width}: no seconds left")
            continue
        label = f"{options.tokens}x{width}x{options.vocabulary}"
        case = Case.make(options.tokens, width, options.vocabulary)
        for tune in (tune_statistics, tune_gradient, tune_whole):
            tune(session, case, label)
            torch.cuda.empty_cache()
        del case
    if options.json is not None:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": session.rows,
            "differing": session.differing,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(session.rows)} measurements, {len(session.differing)} schedules differ")
    return 1 if session.differing else 0


if __name__ == "__main__":
    sys.exit(main())
