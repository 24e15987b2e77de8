"""Negative controls: programs that are wrong in one known way, and the checks that must notice.

A check that no mutant can fail proves nothing. A mutant replaces public functions inside a context
manager; every check it names must turn red, on a model that is built inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_consistency.verify.mutants import gradient_perturbations as gradients
from rl_consistency.verify.mutants import perturbations as forward
from rl_consistency.verify.mutants import schedule_perturbations as schedules
from rl_consistency.verify.substitution import Perturbation


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong program."""

    name: str
    what: str
    """What is wrong with it: the docstring of `perturb`."""
    perturb: Perturbation
    caught_by: tuple[str, ...]
    """Keys of the checks that must turn red; of none where the program has no such part."""
    caught_on_cuda: tuple[str, ...] | None = None
    """The same on a GPU, where it differs."""

    def keys(self, device: torch.device) -> tuple[str, ...]:
        differs = device.type == "cuda" and self.caught_on_cuda is not None
        return self.caught_on_cuda or () if differs else self.caught_by


def mutants_on(device: torch.device) -> tuple[Mutant, ...]:
    """The mutants that a device can show."""
    return tuple(mutant for mutant in MUTANTS if mutant.keys(device))


def _mutant(name: str, perturb: Perturbation, *keys: str, cuda: str | None = None) -> Mutant:
    """Keys are `claim subject`; several subjects of one claim stand in one text, split by `; `."""
    return Mutant(
        name=name,
        what=(perturb.__doc__ or "").rstrip("."),
        perturb=perturb,
        caught_by=_keys(*keys),
        caught_on_cuda=None if cuda is None else _keys(cuda),
    )


def _keys(*texts: str) -> tuple[str, ...]:
    split = [text.partition(" ") for text in texts]
    return tuple(f"{claim} {s}" for claim, _, subjects in split for s in subjects.split("; "))


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "split K",
        forward.split_k_for_few_rows,
        "C1 linear; token_logprobs; chain, packed; chain, logprobs",
    ),
    _mutant("row-dependent tile", forward.library_tile_for_few_rows, "C1 linear"),
    _mutant(
        "KV split by length",
        forward.key_block_by_length,
        "C1 attention; paged attention; chain, paged",
    ),
    _mutant(
        "KV block at padding",
        forward.keys_anchored_at_padding,
        "C1 attention; chain, packed; chain, padded",
    ),
    _mutant(
        "other decode order",
        forward.stock_decode,
        "C1 paged attention; chain, paged",
        "C2 rollout and training",
    ),
    _mutant(
        "library row sums",
        forward.library_row_sums_in_large_calls,
        "C1 attention; attention backward",
    ),
    _mutant("stock silu", forward.library_silu, "C1 glu"),
    _mutant(
        "norm over the batch", forward.norm_reduced_over_the_batch, "C1 rms_norm; chain, packed"
    ),
    _mutant("rope by length", forward.rope_scaled_by_length, "C1 rotary"),
    _mutant(
        "per-call quantization",
        forward.embedding_quantized_per_call,
        "C1 embedding; chain, packed; chain, padded",
    ),
    _mutant(
        "padding in reductions", forward.padding_takes_part_in_reductions, "C1 masked_reduction"
    ),
    _mutant("norm by threads", forward.norm_split_over_threads, "C1 gradient_norm"),
    _mutant(
        "gradients added up",
        gradients.gradients_added_up_per_call,
        "C3 rms_norm; linear; token_logprobs; chain, regrouped",
    ),
    _mutant(
        "atomic accumulation",
        gradients.fold_steps_in_any_order,
        "C3 linear; chain, regrouped; chain, recomputed",
    ),
    _mutant("sequences not aligned", gradients.sequences_not_aligned, "C3 chain, regrouped"),
    _mutant(
        "embedding shuffled",
        gradients.embedding_gradient_in_any_order,
        "C3 embedding; chain, regrouped",
        # In the chain so few tokens repeat that their bf16 gradients add up exactly in fp32.
        cuda="C3 embedding",
    ),
    _mutant("tied buffer", gradients.tied_weights_share_a_buffer, "C3 chain, regrouped"),
    _mutant("random stream per row", forward.random_stream_per_row, "C1 rollout engine"),
    _mutant("another rounding", forward.rollout_logits_rounded, "C2 rollout and training"),
    _mutant(
        "two distributions",
        forward.rollout_has_its_own_distribution,
        "C2 rollout and training",
        "C7 one function",
    ),
    _mutant("blind fingerprint", forward.fingerprint_without_orders, "C7 fingerprint"),
    _mutant(
        "schedule of another order",
        schedules.one_schedule_of_another_order,
        cuda="C1 schedules: matmul; schedules: fused products; schedules: gradient fold; "
        "schedules: attention; schedules: token_logprobs; schedules: glu; schedules: rotary; "
        "schedules: rms_norm; schedules: gradient rows; schedules: sampling",
    ),
    _mutant(
        "backward in one kernel",
        schedules.one_kernel_backward_rounds_once_more,
        cuda="C1 schedules: attention",
    ),
    _mutant(
        "half-precision sums",
        forward.sums_in_half_precision,
        "C6 linear; rms_norm; rotary; glu; embedding; attention; token_logprobs; masked_reduction; "
        "gradient_norm",
    ),
)
"""Every negative control."""
