"""The prompts of a recipe: examples read or generated, through a chat template if asked; tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from rl_consistency.trainers.config.data_sections import EvalSetSection
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.examples import (
    LONGEST_LINE,
    DataError,
    DataOrder,
    Example,
    Parts,
    Split,
    encode_prompt,
    examples_of,
    mix_counts,
    problems,
)
from rl_consistency.trainers.data.foreign_files import explained, shown
from rl_consistency.trainers.data.sources import read_rows
from rl_consistency.trainers.foreign_calls import TimeIsUp, memory_limit, time_limit


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Examples and the token ids of their prompts."""

    examples: Sequence[Example]
    prompts: Sequence[list[int]]
    overlong: int = 0
    """How many were longer than the limits and so dropped or truncated."""
    parts: Parts = ()
    """Number of examples and weight of each source, where they have weights."""
    commits: Mapping[str, str] = field(default_factory=dict)
    """Data set of the hub -> the commit that was read."""

    def order(self, batch_size: int, seed: int, shuffle: bool = True) -> DataOrder:
        """Which of the examples a step sees."""
        return DataOrder(len(self.prompts), batch_size, seed, shuffle, self.parts)


def load_prompts(
    config: RunConfig, tokenizer: Any, *, context_length: int, vocab_size: int
) -> tuple[PromptSet, dict[str, PromptSet]]:
    """The prompts to train on and those of the evaluation sets by name; DataError on bad data."""
    train, evaluations = _read(config), _read_evaluations(config)
    if config.data.chat_template:
        require_template(tokenizer)
        for one in (train, *evaluations.values()):
            one.examples = [all_templated(examples, tokenizer) for examples in one.examples]
    adds = config.data.add_special_tokens and not config.data.chat_template
    encode = partial(
        encode_prompt,
        encode=_encoder(tokenizer, vocab_size),
        max_prompt_tokens=config.data.max_prompt_tokens,
        context_length=context_length,
        overlong=config.data.overlong_prompts,
        leading=leading_tokens(tokenizer, list(chain(*train.examples))) if adds else (),
    )

    def encoded(read: _Read, max_tokens: int) -> PromptSet:
        found = [[(e, *encode(e, max_tokens=max_tokens)) for e in part] for part in read.examples]
        kept = [[(e, prompt) for e, prompt, _ in part if prompt is not None] for part in found]
        parts = tuple(zip(map(len, kept), read.weights, strict=True)) if read.weights else ()
        return PromptSet(
            examples=[example for example, _ in chain(*kept)],
            prompts=[prompt for _, prompt in chain(*kept)],
            overlong=sum(overlong for _, _, overlong in chain(*found)),
            parts=parts,
            commits=read.commits,
        )

    train_set = encoded(train, config.rollout.sampling.max_tokens)
    eval_sets = {n: encoded(r, config.eval_sampling.max_tokens) for n, r in evaluations.items()}
    if len(train_set.prompts) < (batch := config.rollout.prompts_per_step):
        dropped = f", {train_set.overlong} overlong ones dropped" if train_set.overlong else ""
        places = ", ".join(str(source.path) for source in config.data.train_sources)
        found = f"the {len(train_set.prompts)} training examples of {places}{dropped}"
        raise DataError(f"rollout.prompts_per_step: {batch} exceeds {found}: lower it")
    if train_set.parts:
        for (count, weight), draws, source in zip(
            train_set.parts, mix_counts(train_set.parts), config.data.train_sources, strict=True
        ):
            if not count or not draws:
                problem = f"weight {weight:g} gives none of the {len(train_set.prompts)} prompts of"
                problem = f"{problem} an epoch to its {count} examples: raise it, or leave it out"
                raise DataError(f"data.sources: {source.path}: {problem}")
    for name, one in eval_sets.items():
        if not one.prompts:
            what = f"evaluation prompts{f' of {name}' if name else ''}"
            raise DataError(f"all {one.overlong} {what} are overlong and dropped")
    return train_set, eval_sets


def overlong_told(
    config: RunConfig, train: PromptSet, evaluations: Mapping[str, PromptSet]
) -> str | None:
    """How many prompts did not fit, and what was done to them; None where all fitted."""
    evaluated = sum(prompts.overlong for prompts in evaluations.values())
    counts = {"training": train.overlong, "evaluation": evaluated}
    found = " and ".join(f"{count} {name} prompts" for name, count in counts.items() if count)
    done = {"drop": "dropped", "truncate": "cut from the left"}.get(config.data.overlong_prompts)
    return f"{found} are too long: {done}" if found else None


def leading_tokens(tokenizer: Any, examples: Sequence[Example]) -> list[int]:
    """The special tokens that a tokenizer puts before a text, such as BOS; [] if none.

    They are read off the first prompt that has tokens of its own.
    """
    for example in examples:
        if plain := tokenizer.encode(example.prompt, add_special_tokens=False):
            whole = tokenizer.encode(example.prompt, add_special_tokens=True)
            # Where a text's own first token is special too, the longest lead is the tokenizer's.
            starts = range(len(whole) - len(plain), -1, -1)
            return next((list(whole[:i]) for i in starts if whole[i:][: len(plain)] == plain), [])
    return []


def encode_targets(
    train: PromptSet, tokenizer: Any, *, context_length: int, vocab_size: int
) -> list[list[int]]:
    """Token ids of every example's target, end token included; DataError if one does not fit."""
    targets, encode = [], _encoder(tokenizer, vocab_size)
    for example, prompt in zip(train.examples, train.prompts, strict=True):
        targets.append([*encode(example.target), tokenizer.eos_token_id])
        if (length := len(prompt) + len(targets[-1])) > context_length:
            raise DataError(
                f"{example.place}: prompt and answer have {length} tokens, the model's context is "
                f"{context_length}: remove the example, or set warm_start.steps to 0"
            )
    return targets


def _encoder(tokenizer: Any, vocab_size: int) -> Callable[[str], list[int]]:
    """Takes a text to its token ids; DataError for one that the model has no embedding of."""

    def encode(text: str) -> list[int]:
        token_ids = list(tokenizer.encode(text, add_special_tokens=False))
        if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
            raise DataError(
                f"the tokenizer gives {shown(text):.60} the token id {outside[0]}, outside the "
                f"model's vocabulary of {vocab_size}: tokenizer.kind auto takes the model's own"
            )
        return token_ids

    return encode


@dataclass
class _Read:
    """The examples of each source of a set, the sources' weights if they have any, and commits."""

    examples: list[list[Example]]
    weights: list[float] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)


def _sums(config: RunConfig, split: Split, size: int) -> _Read:
    assert config.data.task is not None
    sizes = config.data.task.model_dump(exclude={"name", "train_size", "eval_size"})
    made = problems(config.run.seed, split, size, **sizes)
    texts = [config.data.prompt_template.replace("{prompt}", example.prompt) for example in made]
    return _Read([[replace(e, prompt=text) for e, text in zip(made, texts, strict=True)]])


def _read(config: RunConfig) -> _Read:
    """The training set."""
    data = config.data
    if data.task is not None:
        return _sums(config, "train", min(data.task.train_size, data.limit or data.task.train_size))
    read = _Read([])
    for source in data.train_sources:
        _read_into(read, source, config)
        read.weights += [source.weight] if source.weight is not None else []
    return read


def _read_evaluations(config: RunConfig) -> dict[str, _Read]:
    """The evaluation sets by name."""
    found: dict[str, _Read] = {}
    if config.data.task is not None and config.data.task.eval_size:
        found[""] = _sums(config, "eval", config.data.task.eval_size)
    for name, source in config.data.evaluation_sources.items():
        _read_into(found.setdefault(name, _Read([])), source, config)
    return found


def _read_into(read: _Read, source: EvalSetSection, config: RunConfig) -> None:
    rows, commit = read_rows(source)
    fields = source.model_dump(include={"prompt_field", "answer_field", "prompt_template"})
    first = sum(map(len, read.examples))
    given = {**fields, "conversations": config.data.chat_template, "first_id": first}
    if not (examples := examples_of(rows, **given)):
        raise DataError(f"{source.path} is empty: it needs one example at least")
    read.examples.append(examples)
    if commit is not None:
        read.commits[str(source.path)] = commit


def require_template(tokenizer: Any) -> None:
    """DataError where the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        remedy = "set it to false and write the turns into data.prompt_template"
        raise DataError(f"data.chat_template: the tokenizer has no chat template: {remedy}")


TEMPLATE_SECONDS = 10.0
"""That a chat template may take for `AT_ONCE` prompts; a timer of each would take longer."""
AT_ONCE = 64
TEMPLATE_BYTES = 2**31
"""Memory that a chat template may take."""


def all_templated(examples: Sequence[Example], tokenizer: Any) -> list[Example]:
    """`templated` of all. The template is a program of its author: DataError, which names it,
    where it does not end in time, takes too much memory or makes a text longer than a line of data
    may be. (Outside the main thread, which alone can be interrupted, time has no limit.)"""
    found: list[Example] = []
    main = threading.current_thread() is threading.main_thread()
    for begin in range(0, len(examples), AT_ONCE):
        try:
            with time_limit(TEMPLATE_SECONDS if main else None), memory_limit(TEMPLATE_BYTES):
                found += [templated(e, tokenizer) for e in examples[begin : begin + AT_ONCE]]
        except TimeIsUp as error:
            limit = f"takes more than {TEMPLATE_SECONDS:g} s for {AT_ONCE} prompts"
            place = f"{examples[begin].place} and those that follow"
            raise DataError(f"{_template(tokenizer)} {limit} ({place}): {_NO_TEMPLATE}") from error
    return found


_NO_TEMPLATE = "mend it, or set data.chat_template to false and write data.prompt_template"


def _template(tokenizer: Any) -> str:
    return f"the chat template of the tokenizer {tokenizer.name_or_path!r}"


def templated(example: Example, tokenizer: Any) -> Example:
    """The example with the text that the model reads: its messages, and the start of an answer.

    A prompt that is text is one message of the user.
    """
    messages = example.messages or ({"role": "user", "content": example.prompt},)
    what = f"{example.place}: {_template(tokenizer)} does not take the messages"
    with explained(DataError, what):
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    if len(text) > LONGEST_LINE:
        made = f"makes {len(text):,} characters, more than {LONGEST_LINE:,}"
        raise DataError(f"{example.place}: {_template(tokenizer)} {made}: {_NO_TEMPLATE}")
    return replace(example, prompt=text, messages=messages)
