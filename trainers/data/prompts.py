"""The prompts of a recipe: examples read or generated, and their token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.arithmetic import problems
from rl_consistency.trainers.data.examples import DataError, Example, encode_prompt, read_jsonl
from rl_consistency.trainers.data.foreign_files import shown


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Examples and the token ids of their prompts."""

    examples: Sequence[Example]
    prompts: Sequence[list[int]]


def load_prompts(
    config: RunConfig, tokenizer: Any, *, context_length: int, vocab_size: int
) -> tuple[PromptSet, PromptSet | None]:
    """The prompts to train on and those of the evaluation set, if any; DataError on bad data."""
    train, evaluation = _examples(config)
    if len(train) < (batch := config.rollout.prompts_per_step):
        raise DataError(
            f"rollout.prompts_per_step: {batch} exceeds the {len(train)} training examples of "
            f"{config.data.path}: lower it, or give more data"
        )

    encode = partial(
        encode_prompt,
        encode=_encoder(tokenizer, vocab_size),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.rollout.sampling.max_tokens,
        context_length=context_length,
    )

    def encoded(examples: list[Example]) -> PromptSet:
        return PromptSet(examples=examples, prompts=[encode(example) for example in examples])

    return encoded(train), encoded(evaluation) if evaluation else None


def encode_targets(
    train: PromptSet, tokenizer: Any, *, context_length: int, vocab_size: int
) -> list[list[int]]:
    """Token ids of every example's target, end token included; DataError if one does not fit."""
    targets, encode = [], _encoder(tokenizer, vocab_size)
    for example, prompt in zip(train.examples, train.prompts, strict=True):
        targets.append([*encode(example.target), tokenizer.eos_token_id])
        length = len(prompt) + len(targets[-1])
        if length > context_length:
            raise DataError(
                f"{example.place}: prompt and answer have {length} tokens, the model's "
                f"context is {context_length}: remove the example, or set warm_start.steps to 0"
            )
    return targets


def _encoder(tokenizer: Any, vocab_size: int) -> Callable[[str], list[int]]:
    """Takes a text to its token ids; DataError for one that the model has no embedding of."""

    def encode(text: str) -> list[int]:
        token_ids = list(tokenizer.encode(text, add_special_tokens=False))
        if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
            raise DataError(
                f"the tokenizer gives {shown(text):.60} the token id {outside[0]}, outside the "
                f"model's vocabulary of {vocab_size}: they do not belong together (tokenizer.kind "
                "auto takes the model's own)"
            )
        return token_ids

    return encode


def _examples(config: RunConfig) -> tuple[list[Example], list[Example]]:
    data = config.data
    if data.task is not None:
        sizes = data.task.model_dump(include={"num_terms", "max_value", "incomplete_targets"})
        make = partial(problems, config.run.seed, **sizes)
        return make("train", data.task.train_size)[: data.limit], make("eval", data.task.eval_size)
    assert data.path is not None
    fields = data.model_dump(include={"prompt_field", "answer_field", "prompt_template"})
    read = partial(read_jsonl, **fields)
    return read(data.path, limit=data.limit), read(data.eval_path) if data.eval_path else []
