"""What a recipe names, looked at before anything large is read: files, first rows, functions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from rl_consistency.trainers.config.data_sections import DataSection, EvalSetSection, RewardSection
from rl_consistency.trainers.config.sections import PolicySection
from rl_consistency.trainers.data.examples import DataError, examples_of
from rl_consistency.trainers.data.sources import of_datasets, read_rows
from rl_consistency.trainers.reward_functions import RewardError, resolve

FIRST = 64
"""Rows of a file that are looked at."""


class Inputs(NamedTuple):
    """What was found of the inputs of a recipe."""

    problems: list[str]
    """`key: problem`."""
    errors: list[ValueError]
    """Those that are to be raised where there is one alone: of a missing policy its reader says
    more."""
    functions: dict[str, Callable[..., Any]]
    """Reward functions by name."""


def inputs_of(policy: PolicySection, data: DataSection, reward: RewardSection) -> dict[str, Path]:
    """The directories and files that sections name, by key."""
    named: dict[str, Any] = {"policy.path": policy.path}
    named |= {key: source.path for key, source in _sources(data).items()}
    named |= {f"reward.functions.{i}.model": f.model for i, f in enumerate(reward.functions)}
    return {key: path for key, path in named.items() if isinstance(path, Path)}


def _sources(data: DataSection) -> dict[str, EvalSetSection]:
    """The data sets that are read, by key."""
    key = "data.path" if data.path is not None else "data.sources.{}.path"
    found: dict[str, EvalSetSection] = {}
    found |= {key.format(i): source for i, source in enumerate(data.train_sources)}
    for name, source in data.evaluation_sources.items():
        key = "data.eval_path" if data.eval_path is not None else "data.eval_split"
        found |= {f"data.eval_sets.{name}.path" if name else key: source}
    return found


def look_up(
    policy: PolicySection,
    data: DataSection,
    reward: RewardSection,
    *,
    folder: Path | None = None,
    given: Collection[str] = (),
) -> Inputs:
    """Look whether paths are there, at the first rows of data files, and at reward functions by
    name, but for those that are `given`. `folder` is that of the recipe."""
    inputs = inputs_of(policy, data, reward)
    missing = {k: f"{k}: there is no {path}" for k, path in inputs.items() if not path.exists()}
    errors: list[ValueError] = [DataError(missing[key]) for key in missing if key != "policy.path"]
    found = Inputs([*missing.values()], errors, {})
    for key, source in _sources(data).items():
        if key not in missing and not of_datasets(source):
            few = source.model_copy(update={"limit": min(FIRST, source.limit or FIRST)})
            fields = source.model_dump(include={"prompt_field", "answer_field", "prompt_template"})
            try:
                examples_of(read_rows(few)[0], **fields, conversations=data.chat_template)
            except DataError as error:
                found.problems.append(f"{key}: {error}")
                found.errors.append(error)
    for i, term in enumerate(reward.functions):
        if term.name is not None and term.name not in given:
            try:
                found.functions[term.name] = resolve(term.name, reward.folder or folder)
            except RewardError as error:
                found.problems.append(f"reward.functions.{i}: {error}")
                found.errors.append(error)
    return found
