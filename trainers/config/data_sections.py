"""The sections `data` and `reward`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rl_consistency.trainers.config.section import (
    BelowOne,
    Count,
    CountOrZero,
    Float,
    Int,
    LocalPath,
    Name,
    Positive,
    Section,
    require_one,
)
from rl_consistency.trainers.data.arithmetic import check_parameters
from rl_consistency.trainers.data.examples import OverlongPrompts


class ArithmeticSection(Section):
    """The generated task: chained sums, answered with the running totals."""

    name: Literal["arithmetic"]
    """Which generated task."""
    num_terms: Annotated[Int, Field(ge=2, le=64)] = 4
    """Terms of each sum."""
    max_value: Count = 9
    """Each term is drawn from 1 to this."""
    train_size: Count = 4096
    """Number of training examples."""
    eval_size: CountOrZero = 128
    """Number of evaluation examples; their sums never occur in training."""
    incomplete_targets: BelowOne = 0.0
    """Share of the worked examples that stop too early in what the warm start imitates."""

    @model_validator(mode="after")
    def _enough_sums(self) -> ArithmeticSection:
        check_parameters(self.num_terms, self.max_value)
        return self


class DataSection(Section):
    """The prompts: exactly one of `task` (generated) and `path` (JSONL)."""

    task: ArithmeticSection | None = None
    """A generated, verifiable task."""
    path: LocalPath | None = None
    """JSONL file, one training example per line."""
    eval_path: LocalPath | None = None
    """JSONL file of evaluation examples; only together with `path`."""
    prompt_field: Name = "question"
    """Field of a line that holds the prompt."""
    answer_field: Name = "answer"
    """Field of a line that holds the reference answer, which is also the warm start's target."""
    prompt_template: str = "{prompt}"
    """The text given to the model; `{prompt}` stands for the prompt field."""
    chat_template: bool = False
    """Give the model the text of the tokenizer's chat template: of a prompt that is a list of
    messages (objects with role and content), or of the text as one message of the user."""
    add_special_tokens: bool = True
    """Begin a prompt with the special tokens (BOS) that the tokenizer puts before a text, as TRL
    does, unless the text has them itself. A chat template writes its own: it gets none."""
    max_prompt_tokens: Count = 256
    """Longest prompt in tokens, chat template and special tokens included."""
    overlong_prompts: OverlongPrompts = "error"
    """A prompt longer than that, or too long for the model's context with max_tokens: error names
    the example; drop leaves it out; truncate keeps its last tokens. The number is printed and
    logged."""
    shuffle: bool = True
    """Visit each epoch in a new order, a pure function of run.seed and the epoch."""
    limit: Count | None = None
    """Use only the first this many training examples; null = all."""

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        require_one(task=self.task, path=self.path)
        if self.eval_path is not None and self.path is None:
            raise ValueError("eval_path goes with path; a task generates its own evaluation set")
        if "{prompt}" not in self.prompt_template:
            raise ValueError("prompt_template must contain {prompt}")
        return self


RewardSignature = Literal["ours", "trl"]


class RewardFunctionSection(Section):
    """One term of the reward."""

    name: Name
    """exact_match, gsm8k, arithmetic, or package.module:function."""
    weight: Float = 1.0
    """Factor of this term in the sum."""
    signature: RewardSignature = "ours"
    """What the function is called with, all by name, beside the data's further fields. ours:
    prompts, completions, answers; trl: prompts, completions, completion_ids and the answer under
    data.answer_field, as TRL's trainers do (no trainer_state, no None for a score)."""


class RewardSection(Section):
    """The reward of a completion: a weighted sum of functions."""

    functions: tuple[RewardFunctionSection, ...]
    """The terms, at least one, added in this order."""
    timeout: Positive | None = None
    """Seconds that one call of a function may take, for all completions; null = any time."""
    accept_changed: bool = False
    """Whether --resume goes on where the files of reward functions have changed since."""

    @model_validator(mode="after")
    def _some_and_distinct(self) -> RewardSection:
        names = [function.name for function in self.functions]
        if not names:
            raise ValueError("functions must name at least one reward function")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(repeated)} stands more than once: add up the weights")
        if wrong := [f.name for f in self.functions if f.signature == "trl" and ":" not in f.name]:
            raise ValueError(f"{wrong[0]} is built in, of signature ours: leave signature out")
        return self
