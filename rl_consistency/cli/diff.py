"""`rl-consistency diff RUN_A RUN_B`: the first step, and what in it, where two runs part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_consistency.cli.outputs import Outputs, outputs
from rl_consistency.numerics.files import unseal
from rl_consistency.trainers.config.strict_yaml import read
from rl_consistency.trainers.run_directory.checkpoint import STATE, list_checkpoints
from rl_consistency.trainers.run_directory.directory import CHECKPOINTS, CONFIG, DIGESTS
from rl_consistency.trainers.run_directory.inputs import flat
from rl_consistency.trainers.run_directory.step_files import (
    load_rows,
    read_changes,
    read_digests,
    run_file,
)

OWN = ("run.name", "run.output_dir")
"""Keys of a recipe that say which run it is."""
MOST_LINES = 12
"""Most differing values of a recipe or a fingerprint that are printed; `--json` has all."""


@dataclass(frozen=True)
class Run:
    """What a run directory says of its run."""

    directory: Path
    recipe: dict[str, str]
    """Values of the recipe as JSON, by dotted key."""
    fingerprint: dict[str, str] | None
    """Fingerprint of the newest checkpoint; None without one."""
    metrics: dict[int, Mapping[str, Any]]
    digests: dict[int, Mapping[str, Any]]
    """Digests by step; a run of an older version has none."""
    changes: list[tuple[int, str, Any, Any]]
    """Of the recipe, where the run was resumed: step, key, old and new value."""

    @property
    def updates(self) -> int:
        """Optimizer steps on one rollout."""
        names = ("updates_per_rollout", "epochs_per_rollout")
        updates, epochs = (json.loads(self.recipe.get(f"algorithm.{n}", "1")) for n in names)
        return updates * epochs


@dataclass(frozen=True)
class Quantity:
    """One thing that a step of both runs made, compared part by part."""

    name: str
    parts: int
    differing: list[str]
    """Names of parts, in the order of the model; "" is a thing without parts."""

    def __str__(self) -> str:
        if not self.differing:
            return "equal"
        if self.differing == [""]:
            return "differ"
        return f"{len(self.differing)} of {self.parts} differ, first {self.differing[0]}"


def run(args: argparse.Namespace) -> int:
    """Compare; 0 where all common steps are equal, 1 where one is not."""
    with outputs(args, "diff", "json") as written:
        return _compare(args, written)


def _compare(args: argparse.Namespace, written: Outputs) -> int:
    a, b = load_run(args.run_a), load_run(args.run_b)
    common = {step: compare(a, b, step) for step in sorted(a.metrics.keys() & b.metrics.keys())}
    common = {step: found for step, found in common.items() if found}
    if not common:
        raise ValueError(f"{a.directory} and {b.directory} have no training step in common.")
    parted = next((s for s, found in common.items() if any(q.differing for q in found)), None)
    print(f"A  {a.directory}\nB  {b.directory}")
    settings = _settings(a, b)
    for what, differing in settings.items():
        if differing is None:
            print(f"{what}  not compared: a run without a checkpoint does not tell it")
            continue
        for name, values in list(differing.items())[:MOST_LINES]:
            texts = ("absent" if value is None else value for value in values)
            x, y = (text if len(text) <= 60 else f"{text:.57}..." for text in texts)
            print(f"{what}  {name}: {x} != {y}")
        if len(differing) > MOST_LINES:
            print(f"{what}  and {len(differing) - MOST_LINES} more, which --json FILE lists")
    for name, run_ in (("A", a), ("B", b)):
        for step, key, old, new in run_.changes:
            print(f"{name}  {key}: {old} before step {step}, {new} from it on (--resume)")
    undigested = [step for step in common if step not in a.digests or step not in b.digests]
    if undigested:
        without = [str(r.directory) for r in (a, b) if not r.digests.keys() >= set(undigested)]
        print(
            f"{' and '.join(without)}: {DIGESTS} has no row of {len(undigested)} steps, the first "
            f"of them {undigested[0]}. There gradients and weights are compared as a whole, tokens "
            "and logprobs not."
        )
    print(*_verdict(a, b, common, parted), sep="\n")
    if "json" in written:
        record = {
            "a": str(a.directory),
            "b": str(b.directory),
            **settings,
            "changes": {"a": a.changes, "b": b.changes},
            "steps": list(common),
            "steps_without_digests": undigested,
            "first_step_that_differs": parted,
            "quantities": [asdict(q) for q in common[parted]] if parted is not None else [],
        }
        written["json"](record)
    return 0 if parted is None else 1


def load_run(directory: Path) -> Run:
    """Read a run directory, whose run need not have ended.

    FileNotFoundError on a missing file, ValueError, naming the file, on a damaged one.
    """
    rows, file = load_rows(directory), run_file(directory, CONFIG)
    if not isinstance(recipe := read(file), dict):
        raise ValueError(f"{file} is no recipe: it must be a mapping of sections.")
    checkpoints = list_checkpoints(directory / CHECKPOINTS)
    entries = unseal(checkpoints[-1] / STATE).get("fingerprint") if checkpoints else None
    digests = read_digests(file) if (file := directory / DIGESTS).exists() else []
    metrics, made = ({row["step"]: row for row in each} for each in (rows, digests))
    return Run(directory, dict(flat(recipe)), entries, metrics, made, read_changes(directory))


def compare(a: Run, b: Run, step: int) -> list[Quantity]:
    """What both runs kept of a step, in causal order."""
    digested = step in a.digests and step in b.digests
    several = max(a.updates, b.updates) > 1
    ours, theirs = (
        _made(run.metrics[step], run.digests[step] if digested else None, several=several)
        for run in (a, b)
    )
    found = []
    for name, x in ours.items():
        if x and (y := theirs[name]):
            parts = list({**x, **y})
            # By text, which tells 0.0 from -0.0 and takes NaN for equal.
            differing = [part for part in parts if repr(x.get(part)) != repr(y.get(part))]
            found.append(Quantity(name, len(parts), differing))
    return found


def _made(
    metrics: Mapping[str, Any], digests: Mapping[str, Any] | None, *, several: bool
) -> dict[str, Mapping[str, Any]]:
    """What one step made, in causal order: quantity -> part -> value; no parts where not kept.

    With several optimizer steps on a rollout, the gradients are those of the first, and the loss is
    a mean over all.
    """

    def measured(*prefixes: str) -> dict[str, Any]:
        return {name: value for name, value in metrics.items() if name.startswith(prefixes)}

    whole = {"gradients": "consistency/gradient_digest", "weights": "rollout/weights_digest"}
    if digests is None:
        digests = {k: metrics[name] for k, name in whole.items() if name in metrics}
    digests = {**digests, "critic": metrics.get("consistency/critic_digest", {})}

    def kept(name: str) -> Mapping[str, Any]:
        found = digests.get(name, {})
        return {"": found} if isinstance(found, str) else found

    loss, gradients = {"loss": measured("loss", "policy/")}, {"gradients": kept("gradients")}
    return {
        "initial weights": kept("initial_weights"),
        "tokens of the rollout": kept("tokens"),
        "logprobs of the rollout": kept("logprobs"),
        "rewards": measured("reward/"),
        "values of the critic": kept("values"),
        "logprobs in training": kept("training_logprobs"),
        **(gradients | loss if several else loss | gradients),
        "norm of the gradients": measured("gradient_norm"),
        "learning rate": measured("learning_rate"),
        "weights": kept("weights"),
        "weights of the critic": kept("critic"),
    }


def _settings(a: Run, b: Run) -> dict[str, dict[str, list[str | None]] | None]:
    """Both values of the recipe's keys and the fingerprint's entries that differ; None where one
    is unknown."""

    def differing(x: Mapping[str, str] | None, y: Mapping[str, str] | None, *left_out: str):
        if x is None or y is None:
            return None
        x, y = _folded(x, y), _folded(y, x)
        pairs = {name: [x.get(name), y.get(name)] for name in {**x, **y} if name not in left_out}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    recipe = differing(a.recipe, b.recipe, *OWN)
    entries = differing(a.fingerprint, b.fingerprint, *a.recipe, *b.recipe)
    return {"recipe": recipe, "fingerprint": entries}


def _folded(values: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """The values, with a section as one value where the other side has null in its place."""
    found: dict[str, str] = {}
    for name, value in values.items():
        parts = name.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts))]
        if (whole := next((key for key in above if others.get(key) == "null"), None)) is None:
            found[name] = value
        else:
            inner = f"{name.removeprefix(f'{whole}.')}: {value}"
            found[whole] = f"{found[whole][:-1]}, {inner}}}" if whole in found else f"{{{inner}}}"
    return found


def _verdict(
    a: Run, b: Run, common: Mapping[int, list[Quantity]], parted: int | None
) -> Iterator[str]:
    steps = list(common)
    if parted is None:
        last = {"A": max(a.metrics), "B": max(b.metrics)}
        longer = [f"; {name} goes on to step {n}" for name, n in last.items() if n > steps[-1]]
        yield f"equal in all {len(steps)} common steps, {steps[0]} to {steps[-1]}{''.join(longer)}"
        return
    before = [step for step in steps if step < parted]
    until = f"equal up to step {before[-1]}" if before else "no step is equal"
    first = next(quantity for quantity in common[parted] if quantity.differing)
    yield f"{until}; step {parted} differs, first in: {first.name}"
    for quantity in common[parted]:
        yield f"  {quantity.name:<25}{quantity}"
