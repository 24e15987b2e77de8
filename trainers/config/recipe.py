"""A recipe as data: one frozen model per section, checked as a whole before anything starts.

`load_config` reads a recipe; `dump_config` writes the resolved one, which loads back to an equal
config. Paths in it are relative to the directory in which it is loaded, and absolute from then on;
`~` is the home directory.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError, model_validator

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers.config.data_sections import DataSection, RewardSection
from rl_consistency.trainers.config.inputs import Inputs, look_up
from rl_consistency.trainers.config.learning_sections import (
    SAMPLING_KEYS,
    AlgorithmName,
    AlgorithmSection,
    OptimizerSection,
    RolloutSection,
    StrategyName,
    TrainingSection,
    WarmStartSection,
)
from rl_consistency.trainers.config.mistakes import OTHER_NAMES, every_error
from rl_consistency.trainers.config.sections import (
    ConsistencySection,
    Name,
    PolicySection,
    RecipeSection,
    RunSection,
    TokenizerSection,
    TrackingSection,
    nearest_key,
)
from rl_consistency.trainers.config.strict_yaml import (
    RecipeSyntaxError,
    apply_overrides,
    dump,
    read,
)
from rl_consistency.trainers.data.foreign_files import shown
from rl_consistency.trainers.reward_files import FILE

GSPO_WIDEST = 0.1
"""Widest clip of gspo that is no mistake; that of its paper is 0.0004."""


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
"""Recipes that come with the package."""


class ConfigError(ValueError):
    """A recipe that cannot be run; the message lists every problem and its remedy."""


class RunConfig(RecipeSection):
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

    @property
    def sampling(self) -> SamplingParams:
        """rollout.sampling, seeded by run.seed."""
        return replace(self.rollout.sampling, seed=self.run.seed)

    @property
    def eval_sampling(self) -> SamplingParams:
        """How evaluation samples: as rollouts do but for training.eval_sampling, or greedily."""
        given = {"n": 1} | (self.training.eval_sampling or {})
        greedy = {"temperature": 0.0} if given["n"] == 1 else {}
        return replace(self.sampling, **greedy | given)

    @property
    def pass_at(self) -> tuple[int, ...]:
        """The k of the metrics pass@k."""
        if (given := self.training.eval_pass_at) is not None:
            return given
        n = self.eval_sampling.n
        powers = (2**i for i in range(n.bit_length()))
        return tuple(dict.fromkeys((*powers, n))) if n > 1 else ()

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its completion together."""
        longest = max(self.sampling.max_tokens, self.eval_sampling.max_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        updates = self.algorithm.updates_per_rollout * self.algorithm.epochs_per_rollout
        return self.training.steps * updates

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        if problems := list(_disagreements(self)):
            raise ValueError("\n".join(problems))
        return self


def _disagreements(config: RunConfig) -> Iterator[str]:
    """`path: problem and remedy` for each rule between two sections that does not hold."""
    data, rollout, algorithm = config.data, config.rollout, config.algorithm
    consistency, sampling, build = config.consistency, config.sampling, config.policy.build
    longest, evaluated = config.longest_sequence, config.eval_sampling
    most, of_most = sampling.max_tokens, "rollout.sampling.max_tokens"
    if evaluated.max_tokens > most:
        most, of_most = evaluated.max_tokens, "training.eval_sampling.max_tokens"
    needs = f"data.max_prompt_tokens {data.max_prompt_tokens} + {of_most} {most} = {longest} tokens"
    blocks, size = rollout.num_kv_blocks, rollout.kv_block_size
    if build is not None and longest > (positions := build.max_position_embeddings):
        yield f"policy.build.max_position_embeddings: {positions} positions are fewer than {needs}"
    if blocks is not None and blocks * size < longest:
        yield f"rollout.num_kv_blocks: {blocks} blocks of {size} cannot hold one sequence: {needs}"
    batch, parts = rollout.prompts_per_step * sampling.n, algorithm.updates_per_rollout
    if batch % parts:
        whole = f"the rollout batch of {batch} (prompts_per_step x sampling.n)"
        yield f"algorithm.updates_per_rollout: {parts} does not divide {whole}"
    examples = math.inf
    if data.task is not None:
        examples = min(data.task.train_size, data.limit or data.task.train_size)
    chunk, of_chunk = rollout.prefill_chunk_size or 0, "rollout.max_batch_tokens"
    buffer, of_buffer = algorithm.overlong_buffer, "rollout.sampling.max_tokens"
    steps, warmup = config.optimizer_steps, config.optimizer.warmup_steps
    for path, value, limit, of in (
        ("rollout.prefill_chunk_size", chunk, rollout.max_batch_tokens, of_chunk),
        ("algorithm.overlong_buffer", buffer, sampling.max_tokens, of_buffer),
        ("rollout.prompts_per_step", rollout.prompts_per_step, examples, "training examples"),
        ("optimizer.warmup_steps", warmup, steps, "optimizer steps"),
    ):
        if value > limit:
            yield f"{path}: {value} exceeds the {limit} {of}"
    if build is not None and config.tokenizer.kind == "auto":
        yield "tokenizer.kind: a built policy has no tokenizer of its own: use byte"
    if algorithm.balance_coefficient and build is not None and build.experts is None:
        problem = f"{build.architecture} has no experts to balance: set it to 0"
        yield f"algorithm.balance_coefficient: {problem}"
    if data.chat_template and config.tokenizer.kind == "byte":
        yield "data.chat_template: the byte tokenizer has none: use tokenizer.kind auto, or false"
    names, plain = ("top_k", "top_p", "min_p"), SamplingParams()
    truncated = [name for name in names if getattr(sampling, name) != getattr(plain, name)]
    if truncated and algorithm.kl_coefficient:
        yield (
            "algorithm.kl_coefficient: a KL to the reference needs untruncated sampling, but "
            f"rollout.sampling sets {', '.join(truncated)}: the reference may give a token 0"
        )
    if truncated and (updates := parts * algorithm.epochs_per_rollout) > 1:
        yield (
            f"rollout.sampling: {', '.join(truncated)} with {updates} updates on a rollout "
            "(algorithm.updates_per_rollout x epochs_per_rollout): after the first a sampled token "
            "may be outside the support, with ratio 0. Sample without, or take one update"
        )
    grouped = algorithm.advantage != "reinforce_plus_plus" or algorithm.dynamic_sampling
    if algorithm.name == "grpo" and grouped and sampling.n < 2:
        yield f"rollout.sampling: n must be at least 2, the group of an advantage, got {sampling.n}"
    widest = max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.loss == "gspo" and widest > GSPO_WIDEST:
        yield (
            f"algorithm.clip_high: gspo clips the ratio of a sequence, a mean over its tokens: "
            f"{widest} is a range of single tokens. Leave clip_low and clip_high out (0.0003 and "
            f"0.0004), or give at most {GSPO_WIDEST}"
        )
    if algorithm.clip_low == 1 and algorithm.loss != "cispo":
        yield f"algorithm.clip_low: must be below 1 with loss {algorithm.loss}"
    if algorithm.name == "ppo" and algorithm.loss == "gspo":
        yield "algorithm.loss: gspo needs one advantage a sequence, ppo has one a token: use grpo"
    if algorithm.name == "ppo" and algorithm.dynamic_sampling:
        yield "algorithm.dynamic_sampling: compares groups, which ppo has not; leave it out"
    if algorithm.name != "ppo" and algorithm.ppo is not None:
        yield f"algorithm.ppo: has no meaning with name: {algorithm.name}; leave it out"
    if algorithm.name == "ppo" and algorithm.advantage != "grpo":
        yield "algorithm.advantage: ppo takes advantages from its critic; leave it out"
    yield from (f"optimizer.{problem}" for problem in _optimizer_problems(config.optimizer))
    if consistency.value_check_every and algorithm.name != "ppo":
        yield f"consistency.value_check_every: {algorithm.name} has no values; set it to 0"
    if (algorithm.overlong == "penalty") != (algorithm.overlong_buffer > 0):
        yield "algorithm.overlong_buffer: must be positive with overlong: penalty, else 0"
    if config.training.eval_every and not data.is_evaluable:
        yield "training.eval_every: there is no evaluation set: give data.eval_path or set it to 0"
    if too_large := [k for k in config.pass_at if k > evaluated.n]:
        found = f"{too_large[0]} is more than the {evaluated.n} completions of an example"
        yield f"training.eval_pass_at: {found}: raise training.eval_sampling.n"
    if data.answer_field is None and (warm := config.warm_start.steps):
        yield f"warm_start.steps: {warm} steps imitate answers, and data.answer_field is null"
    if consistency.strict_except and consistency.strict is False:
        yield "consistency.strict_except: has no meaning when strict is false"
    order, stock = consistency.gradient_leaves, consistency.strict is False
    if (order.count > 1 or not consistency.ordered) and (stock or consistency.strict_except):
        key = "gradient_leaves" if consistency.ordered else "ordered"
        yield f"consistency.{key}: needs canonical ops: leave out strict, strict_except"
    if order.count > 1 and not consistency.ordered:
        yield "consistency.ordered: false gives each process one leaf: leave out gradient_leaves"
    elif order.count > 1:
        yield from (f"consistency.gradient_leaves: {p}" for p in part_problems(config, order))
    if config.training.strategy is not None:
        yield from strategy_problems(config, config.training.strategy)


def _optimizer_problems(section: OptimizerSection) -> Iterator[str]:
    """`key: problem and remedy`."""
    schedule, low, share = section.schedule, section.min_lr, section.min_lr_ratio
    if section.muon is not None and section.name != "muon":
        yield f"muon: has no meaning with name: {section.name}; leave it out"
    if low is not None and share:
        yield "min_lr_ratio: min_lr says the same; give one of them"
    if low is not None and low >= section.learning_rate:
        yield f"min_lr: {low:g} must be below learning_rate, {section.learning_rate:g}"
    key = "min_lr" if low is not None else "min_lr_ratio"
    if (low or share) and schedule.startswith("constant"):
        yield f"{key}: schedule {schedule} does not end; use cosine or linear, or leave it out"
    if not (low or share) and schedule == "cosine_with_min_lr":
        yield "schedule: cosine_with_min_lr needs min_lr or min_lr_ratio"


def part_problems(config: RunConfig, order: PartOrder) -> Iterator[str]:
    """Why the sequences of an optimizer step cannot be cut into these parts; nothing if so."""
    if order.count == 1:
        return
    rollout, algorithm = config.rollout, config.algorithm
    update = rollout.prompts_per_step * config.sampling.n // algorithm.updates_per_rollout
    try:
        order.micro_batches(update, 0, config.training.micro_batch_size)
        if config.warm_start.steps:
            order.parts(config.warm_start.batch_size)
    except ValueError as error:
        yield str(error)


def strategy_problems(config: RunConfig, strategy: StrategyName) -> Iterator[str]:
    """What the recipe asks for that this strategy does not do."""
    if config.algorithm.name == "ppo" and strategy != "replicated":
        remedy = "use replicated, with any number of processes, or algorithm.name grpo"
        yield f"training.strategy: {strategy} shards no critic, which ppo needs: {remedy}"
    if config.optimizer.name != "adamw" and strategy != "replicated":
        problem = f"{config.optimizer.name} needs whole tensors, and {strategy} keeps parts of them"
        yield f"optimizer.name: {problem}: use adamw, or training.strategy replicated"
    if strategy == "zero1" and config.policy.dtype == "bfloat16":
        problem = "zero1 has no fp32 gradients of a bfloat16 policy in DeepSpeed"
        yield f"training.strategy: {problem}: use zero2"
    if strategy in ("zero2", "zero3") and config.consistency.shadow_every:
        yield (
            f"consistency.shadow_every: under {strategy} DeepSpeed takes every gradient, that of a "
            "stock training pass too: set it to 0, or training.strategy to replicated or fsdp2"
        )
    checked = config.consistency.gradient_check_every
    if strategy.startswith("zero") and checked and not config.consistency.ordered:
        yield (
            f"consistency.gradient_check_every: the stock sums of {strategy} add each micro-batch, "
            "so gradients depend on how a batch is cut: set it to 0, or ordered to true"
        )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked config of the recipe at `path` after `overrides` (`section.key=value`).

    Raises ConfigError with all problems, each by dotted path, unknown keys with the nearest name.
    """
    path = Path(path)
    return checked(recipe_tree(path), str(path), path.parent, overrides=overrides)


def recipe_tree(path: Path) -> dict[str, Any]:
    """The sections of a recipe's file as they stand there; ConfigError where it is none."""
    try:
        tree = read(path)
    except RecipeSyntaxError as error:
        raise ConfigError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping of sections, got {shown(tree):.60}")
    return tree


def find_recipe(name: str) -> Path:
    """The file of a path or of a shipped recipe's name; ValueError, with the names, if neither."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or (path.exists() and not path.is_dir()):
        return path
    files = sorted(f for pattern in ("*.yaml", "ci/*.yaml") for f in RECIPES.glob(pattern))
    shipped = {file.stem: file for file in files}
    if name not in shipped:
        names = ", ".join(shipped) or "none"
        raise ValueError(f"no recipe {name!r}: give a YAML file, or one of {names}")
    return shipped[name]


def checked(
    tree: Any, source: str, folder: Path, given: Collection[str] = (), overrides: Sequence[str] = ()
) -> RunConfig:
    """The config of a recipe's tree after `overrides`; errors name `source`. Reward functions in
    files are looked for in `folder` where no other is named, those that are `given` nowhere."""
    or_null = ((str, NoneType), (Name, NoneType))
    texts = {path for path, k in _fields(RunConfig) if k is str or get_args(k) in or_null}
    try:
        apply_overrides(tree, overrides, texts)
        config = RunConfig.model_validate(tree)
    except RecipeSyntaxError as error:
        raise ConfigError(str(error)) from error
    except ValidationError as error:
        items, rest = every_error(RunConfig, tree, error)
        problems = _problems(items, tree)
        with suppress(ValidationError, KeyError):
            kinds = {"policy": PolicySection, "data": DataSection, "reward": RewardSection}
            read: dict[str, Any] = {k: kind.model_validate(rest[k]) for k, kind in kinds.items()}
            problems += look_up(**read, folder=folder, given=given).problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"{source}: {count}\n{listed}") from error
    reward = config.reward
    if reward.folder is None and any(FILE.fullmatch(term.key) for term in reward.functions):
        placed = reward.model_copy(update={"folder": folder.expanduser().absolute()})
        config = config.model_copy(update={"reward": placed})
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML: every field, defaults included, in the order of the models."""
    return dump(config.model_dump(mode="json"))


def require_inputs(config: RunConfig, given: Collection[str] = ()) -> Inputs:
    """What the recipe names, but for reward functions that are `given`. ConfigError where several
    of its inputs cannot be used; of one its own error."""
    found = look_up(config.policy, config.data, config.reward, given=given)
    if len(found.problems) > 1:
        listed = "\n".join(f"  {problem}" for problem in found.problems)
        raise ConfigError(f"{len(found.problems)} inputs of the recipe are wrong\n{listed}")
    if found.errors:
        raise found.errors[0]
    return found


def _problems(items: Sequence[Any], tree: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    for item in items:
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "default_factory_not_called":
            continue  # says only that another problem left run.output_dir without its default
        if item["type"] == "extra_forbidden":
            problems.append(f"{path}: unknown key; {_hint(item['loc'])}")
        elif item["type"] == "missing":
            problems.append(f"{path}: missing, has to be given")
        elif item["type"] == "value_error":
            message = str(item.get("ctx", {}).get("error", item["msg"]))
            problems += [f"{path}: {message}"] if path else message.splitlines()
        else:
            problems.append(f"{path}: {_told(item, path, tree)}")
    return problems


_FULL_NAMES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def _told(item: dict[str, Any], path: str, tree: dict[str, Any]) -> str:
    """What pydantic says was wanted, in words of a recipe, and what was given."""
    kind, given, wanted, more = item["type"], item["input"], item["msg"], ""
    if kind == "model_type":
        wanted = "a section, {key: value, ...}, is wanted"
    if kind in ("tuple_type", "list_type") and isinstance(given, str):
        wanted = "a list is wanted"
        texts = (f"[{given}]", f"[{{name: {given}}}]", f"[{{path: {given}}}]")
        if (text := next((t for t in texts if _is_right(tree, path, t)), None)) is not None:
            more = f": write {text}"
    if kind == "string_type" and given is not None:
        more = ": put a text in quotes, 'Q: {prompt}'"
    if kind == "literal_error" and isinstance(given, str):
        allowed = re.findall(r"'([^']+)'", item["ctx"]["expected"])
        name = _FULL_NAMES.get(given, given).lower().replace("++", "_plus_plus")
        near = get_close_matches(name, allowed, n=1)
        if path in ("algorithm.loss", "algorithm.advantage") and name in get_args(AlgorithmName):
            near = [f"algorithm.name: {name}"]
        more = "".join(f"; did you mean {name}?" for name in near)
    return f"{wanted}, got {shown(given):.60}{more}"


def _is_right(tree: dict[str, Any], path: str, text: str) -> bool:
    """Whether a recipe with this value at `path` has no mistake of a field there."""
    tried = copy.deepcopy(tree)
    try:
        apply_overrides(tried, [f"{path}={text}"])
        RunConfig.model_validate(tried)
    except RecipeSyntaxError:
        return False
    except ValidationError as error:
        keys = path.split(".")
        return all([*map(str, e["loc"])][: len(keys)] != keys for e in error.errors())
    return True


def _hint(location: tuple[int | str, ...]) -> str:
    """What the unknown key at `location` may have been meant to be."""
    *section, key = (part for part in location if isinstance(part, str))
    siblings, by_name = list[str](), dict[str, list[str]]()
    for path in all_paths():
        *above, name = path.split(".")
        by_name.setdefault(name, []).append(path)
        if above in (section, section[:-1] if section[:2] == ["data", "eval_sets"] else section):
            siblings.append(name)
    if (other := OTHER_NAMES.get(key)) and key not in by_name:
        return f"did you mean {other}?"
    near = [] if key in by_name else get_close_matches(key, by_name, n=1, cutoff=0.8)
    found = by_name.get(near[0] if near else key, [])
    own = [path for path in found if path.split(".")[:1] == section[:1]]
    # A run's name is meant nowhere else, and the policy's rate more often than the warm start's.
    others = sorted(found, key=lambda path: not path.startswith("optimizer."))
    elsewhere = own or [path for path in others if not path.startswith("run.")]
    return nearest_key(key, siblings, [_written(path) for path in elsewhere])


def _written(path: str) -> str:
    """A key as it is written; one of a list's sections with all that is around it."""
    for of_list in ("reward.functions", "data.sources"):
        if path.startswith(f"{of_list}."):
            section, name = of_list.split(".")
            return f"{section}: {{{name}: [{{{path.removeprefix(f'{of_list}.')}: ...}}]}}"
    return path


def all_paths() -> list[str]:
    """Every section and key of a recipe, dotted."""
    paths = [path for path, _ in _fields(RunConfig)]
    return [*paths, *(f"rollout.sampling.{key}" for key in SAMPLING_KEYS)]


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """The dotted path and the annotation of each section and key."""
    for name, field in model.model_fields.items():
        yield name, field.annotation
        for inner in _models_in(field.annotation):
            yield from ((f"{name}.{path}", kind) for path, kind in _fields(inner))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The section models an annotation such as `A | None` or `tuple[A, ...]` contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
