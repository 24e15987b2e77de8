"""A recipe as data: one frozen model per section, checked as a whole before anything starts.

`load_config(path, overrides)` reads a recipe; `dump_config(config)` writes the resolved one, which
loads back to an equal config. Every problem of a recipe is reported at once as a `ConfigError`, by
dotted path, with the nearest known name beside an unknown one. Paths are relative to the current
directory; `~` is the home directory.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from rl_consistency.trainers.config.sections import (
    AlgorithmSection,
    ConsistencySection,
    DataSection,
    OptimizerSection,
    PolicySection,
    RewardSection,
    RolloutSection,
    RunSection,
    Section,
    TokenizerSection,
    TrackingSection,
    TrainingSection,
    WarmStartSection,
)
from rl_consistency.trainers.config.strict_yaml import RecipeSyntaxError, apply_overrides, parse


class ConfigError(ValueError):
    """A recipe that cannot be run; the message lists every problem and its remedy."""


class RunConfig(Section):
    """A whole recipe."""

    run: RunSection
    """The run as a whole."""

    policy: PolicySection
    """The model that is trained."""

    tokenizer: TokenizerSection
    """How text becomes tokens."""

    data: DataSection
    """The prompts."""

    reward: RewardSection
    """The reward of a completion."""

    warm_start: WarmStartSection = WarmStartSection()
    """Supervised steps before reinforcement learning."""

    rollout: RolloutSection
    """How completions are sampled."""

    algorithm: AlgorithmSection = AlgorithmSection()
    """What is optimised."""

    optimizer: OptimizerSection
    """The optimizer and its schedule."""

    training: TrainingSection
    """The loop."""

    consistency: ConsistencySection = ConsistencySection()
    """What is checked while training."""

    tracking: TrackingSection = TrackingSection()
    """Where metrics go."""

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        if problems := list(_disagreements(self)):
            raise ValueError("\n".join(problems))
        return self


def _disagreements(config: RunConfig) -> Iterator[str]:
    """`path: problem and remedy` for each rule between two sections that does not hold."""
    policy, data, rollout = config.policy, config.data, config.rollout
    algorithm, training = config.algorithm, config.training

    if policy.build is not None and config.tokenizer.kind == "auto":
        yield "tokenizer.kind: a built policy has no tokenizer of its own: use byte"

    longest = data.max_prompt_tokens + rollout.max_new_tokens
    needs = (
        f"data.max_prompt_tokens {data.max_prompt_tokens} + rollout.max_new_tokens "
        f"{rollout.max_new_tokens} = {longest}"
    )
    if policy.build is not None and longest > policy.build.max_position_embeddings:
        yield (
            f"policy.build.max_position_embeddings: {policy.build.max_position_embeddings} "
            f"positions are fewer than {needs}"
        )
    if rollout.num_kv_blocks is not None:
        slots = rollout.num_kv_blocks * rollout.kv_block_size
        if slots < longest:
            yield (
                f"rollout.num_kv_blocks: {rollout.num_kv_blocks} blocks of "
                f"{rollout.kv_block_size} cannot hold one sequence: {needs} tokens"
            )
    chunk = rollout.prefill_chunk_size
    if chunk is not None and chunk > rollout.max_batch_tokens:
        yield (
            f"rollout.prefill_chunk_size: {chunk} exceeds rollout.max_batch_tokens "
            f"{rollout.max_batch_tokens}"
        )

    batch = rollout.prompts_per_step * rollout.samples_per_prompt
    if batch % algorithm.updates_per_rollout:
        yield (
            f"algorithm.updates_per_rollout: {algorithm.updates_per_rollout} does not divide the "
            f"rollout batch of {batch} (prompts_per_step x samples_per_prompt)"
        )
    if data.task is not None:
        size = min(data.task.train_size, data.limit or data.task.train_size)
        if size < rollout.prompts_per_step:
            yield (
                f"rollout.prompts_per_step: {rollout.prompts_per_step} exceeds the {size} "
                "training examples"
            )
    truncated = [
        name
        for name, value, off in (
            ("top_k", rollout.top_k, 0),
            ("top_p", rollout.top_p, 1.0),
            ("min_p", rollout.min_p, 0.0),
        )
        if value != off
    ]
    if truncated and algorithm.kl_coefficient:
        yield (
            f"algorithm.kl_coefficient: a KL to the reference needs untruncated sampling, but "
            f"rollout.{', rollout.'.join(truncated)} is set: the reference may give a sampled "
            "token probability 0"
        )
    if (algorithm.overlong == "penalty") != (algorithm.overlong_buffer > 0):
        yield "algorithm.overlong_buffer: must be positive with overlong: penalty, else 0"
    if algorithm.overlong_buffer > rollout.max_new_tokens:
        yield (
            f"algorithm.overlong_buffer: {algorithm.overlong_buffer} exceeds "
            f"rollout.max_new_tokens {rollout.max_new_tokens}"
        )

    updates = training.steps * algorithm.updates_per_rollout * algorithm.epochs_per_rollout
    if config.optimizer.warmup_steps > updates:
        yield (
            f"optimizer.warmup_steps: {config.optimizer.warmup_steps} exceeds the run's {updates} "
            "optimizer steps"
        )
    evaluable = data.eval_path is not None or (data.task is not None and data.task.eval_size > 0)
    if training.eval_every and not evaluable:
        yield "training.eval_every: there is no evaluation set: give data.eval_path or set it to 0"
    if config.consistency.strict_except and config.consistency.strict is False:
        yield "consistency.strict_except: has no meaning when strict is false"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked config of the recipe at `path` after `overrides` (`section.key=value`).

    Raises ConfigError, with all problems of the recipe in one message.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from error
    try:
        tree = parse(text, str(path))
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} must be a mapping of sections, got {_shown(tree)}")
        apply_overrides(tree, overrides)
    except RecipeSyntaxError as error:
        raise ConfigError(str(error)) from error
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = _problems(error)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{path}: {count}\n" + "\n".join(f"  {p}" for p in problems)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML: every field, defaults included, in the order of the models."""
    tree = config.model_dump(mode="json")
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def _problems(error: ValidationError) -> list[str]:
    problems: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "default_factory_not_called":
            continue  # only says that a field named in another problem is wrong
        if item["type"] == "extra_forbidden":
            problems.append(f"{path}: unknown key{_hint(item['loc'])}")
        elif item["type"] == "missing":
            problems.append(f"{path}: missing, has to be given")
        elif item["type"] == "value_error":
            message = str(item.get("ctx", {}).get("error", item["msg"]))
            problems += [f"{path}: {message}"] if path else message.splitlines()
        else:
            problems.append(f"{path}: {item['msg']}, got {_shown(item['input'])}")
    return problems


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(location: tuple[int | str, ...]) -> str:
    """What the unknown key at `location` may have been meant to be."""
    key = str(location[-1])
    siblings = _fields(location[:-1])
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f"; did you mean {near[0]}?"
    elsewhere = [path for path in _all_paths(RunConfig) if path.split(".")[-1] == key]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; the keys here are {', '.join(siblings)}"


def _fields(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location:
        if isinstance(part, str):
            model = _models_in(model.model_fields[part].annotation)[0]
    return list(model.model_fields)


def _all_paths(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for inner in _models_in(field.annotation):
            yield from (f"{name}.{path}" for path in _all_paths(inner))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The section models an annotation such as `A | None` or `tuple[A, ...]` contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
