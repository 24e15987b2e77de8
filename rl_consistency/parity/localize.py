"""Where drift begins: the first op, layer and position at which two ways to run tokens part."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from rl_consistency.models.families import ops_of
from rl_consistency.models.patch import patched_session
from rl_consistency.models.scoring.scored_rows import Sampling
from rl_consistency.models.sharding import is_shard, unwrapped
from rl_consistency.numerics.files import write_whole
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.numerics.strict import OPS, Strictness
from rl_consistency.parity.bytes import bits
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.drift import compare_logprobs
from rl_consistency.parity.replay import LOCALIZATION, ReplayBundle, load_replay_bundle
from rl_consistency.parity.sides import ROLLOUT, SIDES, STOCK, Outcome, Work, run_side
from rl_consistency.parity.taps import Tap
from rl_consistency.rollout.sampling_params import SamplingParams

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class OpDrift:
    """How far two sides are apart in one tensor."""

    pass_: Pass
    op: str
    """Name of the op in `strict`, or `residual`."""
    layer: int | None
    """The decoder layer, counted from 0; None outside the stack."""
    module: str
    what: str
    """The output, or which gradient."""
    elements: int
    differing: int
    """Elements whose bytes differ."""
    max_abs: float
    rms: float
    """Root of the mean squared difference."""
    relative_rms: float
    """`rms` over the root mean square of the first side."""
    tokens: int | None
    """Tokens with a differing element; None for a parameter's gradient."""
    sequence: int | None
    position: int | None
    """The first such token: its sequence, and its place there, counted from 0. An op at token p
    takes part in the logprob of token p + 1."""

    def __str__(self) -> str:
        at = "" if self.position is None else f", sequence {self.sequence}, token {self.position}"
        return f"{Tap(self.op, self.module).place}, {self.pass_}: {self.what}{at}"


@dataclass(frozen=True, kw_only=True)
class LogprobDrift:
    """How far the logprobs of two sides are apart."""

    tokens: int
    mismatched_tokens: int
    max_abs: float
    rms: float
    argmax_flips: int
    """Tokens at which the most likely token is another."""


@dataclass(frozen=True, kw_only=True)
class AblationRow(LogprobDrift):
    """The drift with one op unlike all others."""

    op: str
    mode: Literal["stock", "canonical"]
    """The path of this op; all others take the other path."""


@dataclass(frozen=True, kw_only=True)
class Localization:
    """What `localize` found."""

    between: tuple[str, str]
    of_two_runs: bool
    """Whether the second side ran on the model of another run."""
    first: OpDrift | None
    """Where the sides part, in the forward pass or, if that is equal, in the backward pass."""
    logprobs: LogprobDrift
    ops: list[OpDrift]
    """Every op that both sides have, in order of execution, the backward pass last."""
    ablation: list[AblationRow]
    """One op stock, then one op canonical, each by drift, the largest first; empty if not asked."""

    @property
    def equal(self) -> bool:
        return self.first is None

    @property
    def promised(self) -> bool:
        """Whether the sides promise equal bytes: the stock path does not."""
        return STOCK not in self.between

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON; a number that is not finite is its name."""
        return _plain(asdict(self) | {"equal": self.equal, "promised": self.promised})


def localize(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    *,
    prompt_lengths: Sequence[int],
    between: tuple[str, str] = (ROLLOUT, "training"),
    sampling: Sampling | None = None,
    gradients: bool = True,
    ablation: bool = True,
    other: nn.Module | None = None,
) -> Localization:
    """Run tokens in two ways and name the first op, layer and position whose bytes differ.

    Every op is tapped in the forward pass and, where both sides train, in the backward pass of a
    weighted sum of logprobs. Weights and gradients stay. Outputs of all ops are kept on the CPU: a
    few sequences are enough.

    Args:
        model: patched causal LM, or a wrapper around it.
        sequences: prompt and completion ids.
        prompt_lengths: prompt tokens of each sequence.
        between: two of `parity.sides.SIDES`.
        sampling: what the tokens were sampled with; None is temperature 1 without truncation.
        gradients: also compare the backward pass, if neither side is the rollout.
        ablation: also measure the drift with one op stock and the rest canonical, and the reverse.
        other: the patched model of another run, with the same parameters by name and shape, on
            which the second side runs. The sides may then be of one name.

    Raises:
        ValueError: unknown sides, tokens that do not fit each other or the model, a model that is
            not patched, one whose parameters are shards, or two that are not alike.
    """
    check_sides(between)
    policy = _policy(model)
    policies = policy, policy if other is None else _policy(other)
    ours, theirs = ({n: (*p.shape,) for n, p in each.named_parameters()} for each in policies)
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"the models of the two runs are not alike: {name} has shape {ours.get(name)} in "
                f"the first, {theirs.get(name)} in the other (None: it is missing)."
            )
    work = Work(sequences=sequences, prompt_lengths=prompt_lengths, sampling=sampling)
    _check(policy, work)
    backward = gradients and ROLLOUT not in between
    a, b = (
        run_side(each, side, work, gradients=backward)
        for each, side in zip(policies, between, strict=True)
    )
    ops = [*_drifts("forward", a.forward, b.forward, work)]
    ops += _drifts("backward", a.backward, b.backward, work)
    return Localization(
        between=(between[0], between[1]),
        of_two_runs=other is not None,
        first=next((op for op in ops if op.differing), None),
        logprobs=LogprobDrift(**_measured(a, b)),
        ops=ops,
        ablation=_ablation(policies, between, work) if ablation else [],
    )


def localize_bundle(model: nn.Module, bundle: ReplayBundle, **options: Any) -> Localization:
    """`localize` of a bundle's tokens, with its sampling; `options` are those of `localize`.

    ValueError, naming what differs, for another fingerprint or other weights than the bundle's.
    """
    check_bundle(model, bundle)
    sampling = bundle.config.get("rollout", {}).get("sampling", {})
    return localize(
        model,
        bundle.sequences,
        prompt_lengths=bundle.prompt_lengths,
        sampling=SamplingParams(**sampling),
        **options,
    )


def localized(model: nn.Module, path: Path, sampling: Sampling) -> str:
    """Localize the first sequence of a bundle that has just been saved, and write what was found
    beside it; a sentence for the message of the drift, which matters more than an error here."""
    try:
        bundle = load_replay_bundle(path)
        found = localize(
            model,
            bundle.sequences[:1],
            prompt_lengths=bundle.prompt_lengths[:1],
            sampling=sampling,
            ablation=False,
        )
        write_whole(path / LOCALIZATION, json.dumps(found.as_record(), indent=1))
    except (ValueError, RuntimeError, OSError) as error:  # shards, no memory, a full disk
        return f"It was not localized ({error}). "
    index = bundle.sequence_indices[0]
    if found.first is None:
        return f"Run again, both sides of sequence {index} are equal. "
    return f"Sequence {index} differs first in: {found.first} ({path / LOCALIZATION}). "


def check_bundle(model: nn.Module, bundle: ReplayBundle) -> None:
    """ValueError, naming what differs, for another fingerprint or weights than the bundle's."""
    device = next(model.parameters()).device
    here, stock = fingerprint(device), bundle.fingerprint.get("stock_ops", "none")
    if difference := here.difference(Fingerprint(bundle.fingerprint)):
        remedy = ""
        if here.entries["stock_ops"] != stock:
            names = ",".join(f"-{op}" for op in stock.split(",")) if stock != "none" else "1"
            remedy = f"; for its ops set RL_CONSISTENCY_STRICT={names}"
        raise ValueError(
            f"the bundle was written under another fingerprint: {'; '.join(difference)} (here != "
            f"then). Use the versions, device and settings it was written with{remedy}."
        )
    if (digest := parameter_digest(model)) != bundle.parameter_digest:
        raise ValueError(
            f"the bundle belongs to weights {bundle.parameter_digest[:16]}, these are "
            f"{digest[:16]} (SHA-256): another model, or another step of the run."
        )


def check_sides(between: Sequence[str]) -> None:
    """ValueError, naming the sides there are, for anything but two of them."""
    if len(between) != 2 or not set(between) <= set(SIDES):
        raise ValueError(f"sides {', '.join(between)}; give two of {', '.join(SIDES)}.")


def _policy(model: nn.Module) -> nn.Module:
    patched_session(model)
    policy = unwrapped(model)
    if any(is_shard(parameter) for parameter in policy.parameters()):
        raise ValueError("the parameters are shards; load the weights in one process.")
    return policy


def _check(model: Any, work: Work) -> None:
    """ValueError for what the rollout side would not notice; `token_logprobs` checks the same."""
    if not work.sequences or len(work.sequences) != len(work.prompt_lengths):
        raise ValueError(
            f"{len(work.sequences)} sequences and {len(work.prompt_lengths)} prompt lengths; give "
            "at least one sequence, and one prompt length for each."
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    context = model.config.max_position_embeddings
    for i, (ids, prompt) in enumerate(zip(work.sequences, work.prompt_lengths, strict=True)):
        if not 1 <= prompt < len(ids) <= context:
            raise ValueError(
                f"sequence {i} has {prompt} prompt tokens of {len(ids)}; allowed: 1 or more, and a "
                f"completion, within the model's context of {context}."
            )
        if not all(0 <= token < vocabulary for token in ids):
            raise ValueError(f"sequence {i} has a token outside the vocabulary of {vocabulary}.")


def _drifts(
    pass_: Pass, a: dict[Tap, Tensor], b: dict[Tap, Tensor], work: Work
) -> Iterator[OpDrift]:
    """The drift of what both sides have: a fused op does not show the parts it is made of."""
    ends = list(accumulate(map(len, work.sequences)))
    for tap, x in a.items():
        if (y := b.get(tap)) is None:
            continue
        differs, d = _difference(x, y)
        rms, size = (v.square().mean().sqrt().item() for v in (d, x.double()))
        tokens = sequence = position = None
        if x.dim() > 1:
            rows = differs.any(dim=1).nonzero().flatten().tolist()
            tokens = len(rows)
            if rows:
                row = work.scored[rows[0]] if len(x) != ends[-1] else rows[0]
                sequence = bisect_right(ends, row)
                position = row - [0, *ends][sequence]
        yield OpDrift(
            pass_=pass_,
            layer=tap.layer,
            **tap._asdict(),
            elements=x.numel(),
            differing=int(differs.sum()),
            max_abs=d.abs().max().item(),
            rms=rms,
            relative_rms=rms / size if size else math.inf if rms else 0.0,
            tokens=tokens,
            sequence=sequence,
            position=position,
        )


def _measured(a: Outcome, b: Outcome) -> dict[str, Any]:
    report = compare_logprobs(a.logprobs, b.logprobs)
    _, d = _difference(a.logprobs, b.logprobs)
    return {
        "tokens": report.tokens,
        "mismatched_tokens": report.mismatched_tokens,
        "max_abs": d.abs().max().item(),
        "rms": d.square().mean().sqrt().item(),
        "argmax_flips": int((a.choices != b.choices).sum()),
    }


def _difference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where the bytes differ, and the fp64 difference there."""
    differs = bits(x) != bits(y) if x.dtype == y.dtype else x != y
    return differs, (x.double() - y.double()).masked_fill(~differs, 0.0)


def _ablation(policies: Sequence[Any], between: Sequence[str], work: Work) -> list[AblationRow]:
    """How the sides differ where one op runs unlike the others, op by op.

    Both sides run so; if one side is stock, only that one does.
    """

    def row(op: str, how: Literal["stock", "canonical"]) -> AblationRow:
        mixed = Strictness(frozenset((op,)) if how == "stock" else frozenset(OPS) - {op})
        own = (None if STOCK in between and side != STOCK else mixed for side in between)
        a, b = (
            run_side(each, side, work, taps=False, gradients=False, choice=choice)
            for each, side, choice in zip(policies, between, own, strict=True)
        )
        return AblationRow(op=op, mode=how, **_measured(a, b))

    def rank(row: AblationRow) -> tuple[bool, float, float]:
        # The root mean square comes first: largest differences of a few ULP are often equal.
        rms, largest = (math.inf if math.isnan(v) else v for v in (row.rms, row.max_abs))
        return row.mode == "stock", rms, largest

    ops = ops_of(policies[0].config)
    return sorted(
        (*(row(op, "stock") for op in ops), *(row(op, "canonical") for op in ops)),
        key=rank,
        reverse=True,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.rstrip("_"): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
