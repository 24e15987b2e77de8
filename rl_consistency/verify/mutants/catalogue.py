"""Negative controls: programs that are wrong in one known way, and the checks that must notice.

A check that no mutant can fail proves nothing. Each mutant perturbs the program inside a context
manager and is put back on any exit; every check it names must turn red, on a model that is built
inside the perturbation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from rl_consistency.verify.checks.op_setup import CPU, OpSetup
from rl_consistency.verify.claims import Check, Result
from rl_consistency.verify.mutants import (
    gradient_perturbations,
    perturbations,
    schedule_perturbations,
)
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.run import (
    chain_checks_of,
    op_checks_in,
    process_checks,
    schedule_checks_in,
)
from rl_consistency.verify.sweep import QUICK
from rl_consistency.verify.targets import Target

PRESET = "tiny-qwen3"
"""Tied embeddings, GQA and qk-norm: every mutant can show in it."""

Perturbation = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong program."""

    name: str
    what: str
    """What is wrong with it."""
    perturb: Perturbation
    caught_by: tuple[str, ...]
    """Keys of the checks that must turn red; of none where the program has no such part."""
    caught_on_cuda: tuple[str, ...] | None = None
    """The same on a GPU, where it differs."""

    def keys(self, device: torch.device) -> tuple[str, ...]:
        """Keys of the checks that must turn red on a device."""
        differs = device.type == "cuda" and self.caught_on_cuda is not None
        return self.caught_on_cuda or () if differs else self.caught_by


@dataclass(frozen=True, kw_only=True)
class MutantResult:
    """Which of a mutant's checks turned red."""

    mutant: Mutant
    results: tuple[Result, ...]

    @property
    def survivors(self) -> tuple[str, ...]:
        """Checks that stayed green although they must not."""
        return tuple(r.key for r in self.results if r.passed)

    @property
    def killed(self) -> bool:
        """Whether every check named by the mutant turned red."""
        return bool(self.results) and not self.survivors


def mutants_on(device: torch.device) -> tuple[Mutant, ...]:
    """The mutants that a device can show."""
    return tuple(mutant for mutant in MUTANTS if mutant.keys(device))


def run_mutant(mutant: Mutant, device: torch.device = CPU) -> MutantResult:
    """Run a mutant's checks inside its perturbation."""
    with mutant.perturb():
        results = run_controls(mutant.keys(device), device)
    return MutantResult(mutant=mutant, results=tuple(results))


def run_controls(keys: Iterable[str], device: torch.device = CPU) -> list[Result]:
    """Run some checks on the program as it is now, over a small sweep."""
    wanted = list(dict.fromkeys(keys))
    found: dict[str, Result] = {}
    for dtype in dict.fromkeys(_dtype_of(key, device) for key in wanted):
        group = [key for key in wanted if _dtype_of(key, device) == dtype]
        with control_checks(group, device, dtype) as checks:
            by_key = {check.key: check for check in checks}
            unknown = [key for key in group if key not in by_key]
            if unknown:
                raise ValueError(f"no check {unknown[0]!r}; known: {', '.join(by_key)}.")
            found |= {key: by_key[key].run() for key in group}
    return [found[key] for key in wanted]


def _dtype_of(key: str, device: torch.device) -> torch.dtype:
    """fp32, in which no rounding hides a difference; but on a GPU an fp32 model adds its gradients
    up in fp64, which hides most of theirs, and lacks the schedules for operands of 16 bits."""
    half = device.type == "cuda" and key.startswith(("C3", "C1 schedules"))
    return torch.bfloat16 if half else torch.float32


@contextmanager
def control_checks(
    keys: Sequence[str], device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Iterator[list[Check]]:
    """All checks; a model is built only if one of `keys` needs it."""
    setup = OpSetup(dtype=dtype, device=device, sweep=QUICK)
    checks = process_checks(device) + op_checks_in(setup) + schedule_checks_in(setup)
    if {check.key for check in checks}.issuperset(keys):
        yield checks
        return
    target = Target(
        name=PRESET,
        dtype=dtype,
        device=device,
        sweep=QUICK,
        build=partial(build_preset, PRESET, dtype, device=device),
    )
    with chain_checks_of(target) as chain:
        yield checks + chain


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="split K",
        what="matmul adds two halves of K when there are few rows",
        perturb=perturbations.split_k_for_few_rows,
        caught_by=("C1 linear", "C1 token_logprobs", "C1 chain, packed", "C1 chain, logprobs"),
    ),
    Mutant(
        name="row-dependent tile",
        what="a plain torch.mm takes over below 8 rows",
        perturb=perturbations.library_tile_for_few_rows,
        caught_by=("C1 linear",),
    ),
    Mutant(
        name="KV split by length",
        what="the key block is halved once the longest context passes 128",
        perturb=perturbations.key_block_by_length,
        caught_by=("C1 attention", "C1 paged attention", "C1 chain, paged"),
    ),
    Mutant(
        name="KV block at padding",
        what="key blocks are counted from the padded column, not the first token",
        perturb=perturbations.keys_anchored_at_padding,
        caught_by=("C1 attention", "C1 chain, packed", "C1 chain, padded"),
    ),
    Mutant(
        name="other decode order",
        what="the paged cache is read by torch's scaled_dot_product_attention",
        perturb=perturbations.stock_decode,
        caught_by=("C1 paged attention", "C1 chain, paged", "C2 rollout and training"),
    ),
    Mutant(
        name="library row sums",
        what="attention sums a row by torch.sum in large calls",
        perturb=perturbations.library_row_sums_in_large_calls,
        caught_by=("C1 attention", "C1 attention backward"),
    ),
    Mutant(
        name="stock silu",
        what="torch's silu, whose vector body and scalar tail differ",
        perturb=perturbations.library_silu,
        caught_by=("C1 glu",),
    ),
    Mutant(
        name="norm over the batch",
        what="the split of a norm's sum depends on the number of rows",
        perturb=perturbations.norm_reduced_over_the_batch,
        caught_by=("C1 rms_norm", "C1 chain, packed"),
    ),
    Mutant(
        name="rope by length",
        what="frequencies depend on the longest position",
        perturb=perturbations.rope_scaled_by_length,
        caught_by=("C1 rotary",),
    ),
    Mutant(
        name="per-call quantization",
        what="embeddings are quantized with one scale for the call",
        perturb=perturbations.embedding_quantized_per_call,
        caught_by=("C1 embedding", "C1 chain, packed", "C1 chain, padded"),
    ),
    Mutant(
        name="padding in reductions",
        what="masked values enter the tree as zeros instead of being left out",
        perturb=perturbations.padding_takes_part_in_reductions,
        caught_by=("C1 masked_reduction",),
    ),
    Mutant(
        name="norm by threads",
        what="the gradient norm follows the number of threads, on a GPU the storage",
        perturb=perturbations.norm_split_over_threads,
        caught_by=("C1 gradient_norm",),
    ),
    Mutant(
        name="gradients added up",
        what="each call's gradient is summed from zero, then added",
        perturb=gradient_perturbations.gradients_added_up_per_call,
        caught_by=("C3 rms_norm", "C3 linear", "C3 token_logprobs", "C3 chain, regrouped"),
    ),
    Mutant(
        name="atomic accumulation",
        what="the steps of a fold arrive in any order",
        perturb=gradient_perturbations.fold_steps_in_any_order,
        caught_by=("C3 linear", "C3 chain, regrouped", "C3 chain, recomputed"),
    ),
    Mutant(
        name="sequences not aligned",
        what="packed sequences do not start on a multiple of 16",
        perturb=gradient_perturbations.sequences_not_aligned,
        caught_by=("C3 chain, regrouped",),
    ),
    Mutant(
        name="embedding shuffled",
        what="repeated tokens are added in any order",
        perturb=gradient_perturbations.embedding_gradient_in_any_order,
        caught_by=("C3 embedding", "C3 chain, regrouped"),
        # In the chain so few tokens repeat that their bf16 gradients add up exactly in fp32.
        caught_on_cuda=("C3 embedding",),
    ),
    Mutant(
        name="tied buffer",
        what="embedding and LM head fold into one buffer",
        perturb=gradient_perturbations.tied_weights_share_a_buffer,
        caught_by=("C3 chain, regrouped",),
    ),
    Mutant(
        name="random stream per row",
        what="random numbers are keyed by the row of the batch",
        perturb=perturbations.random_stream_per_row,
        caught_by=("C1 rollout engine",),
    ),
    Mutant(
        name="another rounding",
        what="rollout takes logprobs of logits rounded to bf16",
        perturb=perturbations.rollout_logits_rounded,
        caught_by=("C2 rollout and training",),
    ),
    Mutant(
        name="two distributions",
        what="rollout normalizes by a logsumexp of its own",
        perturb=perturbations.rollout_has_its_own_distribution,
        caught_by=("C2 rollout and training", "C7 one function"),
    ),
    Mutant(
        name="blind fingerprint",
        what="the fingerprint leaves the orders out",
        perturb=perturbations.fingerprint_without_orders,
        caught_by=("C7 fingerprint",),
    ),
    Mutant(
        name="schedule of another order",
        what="one entry of every schedule table splits a sum or rounds it once more",
        perturb=schedule_perturbations.one_schedule_of_another_order,
        caught_by=(),
        caught_on_cuda=(
            "C1 schedules: matmul",
            "C1 schedules: fused products",
            "C1 schedules: gradient fold",
            "C1 schedules: attention",
            "C1 schedules: token_logprobs",
            "C1 schedules: glu",
            "C1 schedules: rotary",
            "C1 schedules: rms_norm",
            "C1 schedules: gradient rows",
            "C1 schedules: sampling",
        ),
    ),
    Mutant(
        name="backward in one kernel",
        what="the kernel for all three gradients reads the log-sum-exp rounded to bf16",
        perturb=schedule_perturbations.one_kernel_backward_rounds_once_more,
        caught_by=(),
        caught_on_cuda=("C1 schedules: attention",),
    ),
    Mutant(
        name="half-precision sums",
        what="sums pass through bf16",
        perturb=perturbations.sums_in_half_precision,
        caught_by=(
            "C6 linear",
            "C6 rms_norm",
            "C6 rotary",
            "C6 glu",
            "C6 embedding",
            "C6 attention",
            "C6 token_logprobs",
            "C6 masked_reduction",
            "C6 gradient_norm",
        ),
    ),
)
"""Every negative control."""
