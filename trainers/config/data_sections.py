"""The sections `data` and `reward`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from rl_consistency.trainers.config.sections import (
    BelowOne,
    Count,
    CountOrZero,
    Float,
    Int,
    LocalPath,
    Name,
    Positive,
    RecipeSection,
    Source,
    require_one,
)
from rl_consistency.trainers.data.examples import OverlongPrompts

Settings = TypeVar("Settings", bound="EvalSetSection")
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ArithmeticSection(RecipeSection):
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
    spaces: bool = False
    """Write 3 + 5 = in place of 3+5=."""

    @model_validator(mode="after")
    def _enough_sums(self) -> ArithmeticSection:
        if (sums := self.max_value**self.num_terms) < 64:
            found = f"{self.num_terms} terms up to {self.max_value} make only {sums} sums"
            raise ValueError(f"{found}, too few for two disjoint splits: raise one of them")
        return self


class EvalSetSection(RecipeSection):
    """One data set."""

    path: Source
    """What `data.path` may be."""
    name: Name | None = None
    """Configuration of a data set of the hub."""
    split: Name | None = None
    """Split of a hub data set or of a directory; null = train, in an evaluation set test."""
    revision: Name | None = None
    """Branch, tag or commit of a hub data set; null = its main branch."""
    limit: Count | None = None
    """Use only the first this many examples; null = all."""
    prompt_field: Name | None = None
    """Field that holds the prompt; null = data.prompt_field."""
    answer_field: Name | None = None
    """Field that holds the answer; null = data.answer_field."""
    prompt_template: str | None = None
    """The text given to the model; null = data.prompt_template."""


class SourceSection(EvalSetSection):
    """One of several data sets to train on."""

    weight: Positive | None = None
    """Share of the prompts of an epoch that come from here, against the weights of the others; all
    sources have one or none. An epoch is as many prompts as all sources have examples; each source
    visits all of its examples before one a second time. null = one visit of each an epoch."""


class DataSection(RecipeSection):
    """The prompts: exactly one of `task` (generated), `path` and `sources` (several data sets)."""

    task: ArithmeticSection | None = None
    """A generated, verifiable task."""
    path: Source | None = None
    """The training examples: a file of JSON lines, JSON (a list of objects), CSV or Parquet; a
    directory that `datasets` saved or can load; or a data set of the hub, such as openai/gsm8k,
    where there is no such directory. All but JSON and CSV need `rl-consistency[data]`."""
    name: Name | None = None
    """Configuration of a data set of the hub, such as main."""
    split: Name | None = None
    """Split of a hub data set or of a directory; null = train."""
    revision: Name | None = None
    """Branch, tag or commit of a hub data set; null = its main branch."""
    sources: tuple[SourceSection, ...] | None = None
    """Several data sets to train on, with weights or without."""
    eval_path: Source | None = None
    """The evaluation examples, of which eval/reward is the mean reward; what `path` may be."""
    eval_split: Name | None = None
    """Split of eval_path; without eval_path, of the data set that `path` names."""
    eval_sets: dict[SetName, EvalSetSection] = Field(default={})
    """Further evaluation sets by name, each with metrics of its own: eval/NAME/reward."""
    prompt_field: Name = "question"
    """Field that holds the prompt; a dotted name goes into objects."""
    answer_field: Name | None = "answer"
    """Field that holds the reference answer, which is also the warm start's target: text or a
    number; a dotted name (reward_model.ground_truth) goes into objects; null = there is none."""
    prompt_template: str = "{prompt}"
    """The text given to the model; `{prompt}` stands for the prompt field, or a task's prompt."""
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

    @property
    def train_sources(self) -> tuple[SourceSection, ...]:
        """The data sets to train on, with the settings that hold for each; () for a task."""
        if self.path is not None:
            given = ("path", "name", "split", "revision", "limit")
            one = SourceSection.model_validate({key: getattr(self, key) for key in given})
            return (self._filled(one, "train"),)
        return tuple(self._filled(source, "train") for source in self.sources or ())

    @property
    def evaluation_sources(self) -> dict[str, EvalSetSection]:
        """The evaluation sets that are read, by name; that of eval_path is the one named ""."""
        found = {name: self._filled(given, "test") for name, given in self.eval_sets.items()}
        if (path := self.eval_path or (self.path if self.eval_split else None)) is not None:
            same = path == self.path
            one = EvalSetSection(
                path=path,
                name=self.name if same else None,
                revision=self.revision if same else None,
                split=self.eval_split,
            )
            found = {"": self._filled(one, "test")} | found
        return found

    @property
    def is_evaluable(self) -> bool:
        """Whether there is an evaluation set."""
        return bool(self.evaluation_sources) or bool(self.task and self.task.eval_size)

    def _filled(self, given: Settings, split: str) -> Settings:
        """The data set with what it leaves to this section."""
        changes = {
            key: getattr(self, key)
            for key in ("prompt_field", "answer_field", "prompt_template")
            if getattr(given, key) is None
        }
        in_file = isinstance(given.path, Path) and not given.path.is_dir()
        if given.split is None and not in_file:
            changes["split"] = split
        return given.model_copy(update=changes)

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        require_one(task=self.task, path=self.path, sources=self.sources)
        if self.task is not None and self.eval_path is not None:
            raise ValueError("eval_path goes with path; a task generates its own evaluation set")
        if self.eval_split is not None and self.eval_path is None and self.path is None:
            raise ValueError("eval_split goes with path or eval_path")
        templates = [s.prompt_template for s in (*(self.sources or ()), *self.eval_sets.values())]
        if any("{prompt}" not in text for text in (self.prompt_template, *templates) if text):
            raise ValueError("prompt_template must contain {prompt}")
        of_path = [key for key in ("name", "split", "revision") if getattr(self, key) is not None]
        if of_path and self.path is None:
            raise ValueError(f"{', '.join(of_path)} goes with path; each source has its own")
        if self.sources is not None:
            self._check_sources(self.sources)
        return self

    def _check_sources(self, sources: tuple[SourceSection, ...]) -> None:
        if not sources:
            raise ValueError("sources must name at least one data set")
        if self.limit is not None:
            raise ValueError("limit goes with path or task; each source has its own")
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            without = sources[weighted.index(False)].path
            problem = f"sources: {without} has no weight and others have one"
            raise ValueError(f"{problem}: give all of them one, or none")


RewardSignature = Literal["ours", "trl", "verl"]
Per = Literal["batch", "sample"]
BUILT_IN = ("exact_match", "gsm8k", "arithmetic")
"""Names of functions that come with the package."""


class RewardFunctionSection(RecipeSection):
    """One term of the reward: exactly one of `name` (a function) and `model`."""

    name: Name | None = None
    """exact_match, gsm8k, arithmetic, package.module:function, or rewards/my.py:function, a file
    relative to the recipe's folder or, if it is not there, to the working directory."""
    model: Source | None = None
    """A reward model, as `policy.path` names a model: a sequence classifier with one label. It
    scores the conversation by its own chat template, or prompt and completion as one text, in its
    own dtype with transformers' stock ops, one sequence at a time: a score depends on no other
    completion, and may be another on another GPU or version."""
    weight: Float = 1.0
    """Factor of this term in the sum."""
    per: Per | None = None
    """sample: the function is called with one completion at a time, as prompt, completion, answer
    and the data's further fields (those that it names), and returns a number; batch: with lists;
    null = sample where it has an argument `completion` and none `completions`."""
    signature: RewardSignature = "ours"
    """What the function is called with, all by name, beside the data's further fields. ours:
    prompts, completions, answers, and completion_ids (token ids, special ones too) where it takes
    them; trl: prompts, completions, completion_ids and the answer under data.answer_field, as TRL's
    trainers do (no trainer_state). verl: data_source, solution_str, ground_truth and extra_info of
    one completion, and it may return a dict with score. Fields have the type that they have in the
    data, which is text in CSV; an answer that is a number is its decimal text in ours. A function
    returns a number, or None where it does not apply, for each completion, and may be async."""

    @property
    def key(self) -> str:
        """Its name in metrics and messages."""
        if self.name is not None:
            return self.name
        return self.model.name if isinstance(self.model, Path) else str(self.model)

    @model_validator(mode="after")
    def _one_kind(self) -> RewardFunctionSection:
        require_one(name=self.name, model=self.model)
        if self.model is not None and (self.signature != "ours" or self.per is not None):
            raise ValueError("signature and per are of functions: leave them out for a model")
        if self.signature != "ours" and self.per is not None:
            raise ValueError(f"signature {self.signature} says how it is called: leave per out")
        return self


class RewardSection(RecipeSection):
    """The reward of a completion: a weighted sum of functions."""

    functions: tuple[RewardFunctionSection, ...]
    """The terms, at least one, added in this order."""
    skip_special_tokens: bool = True
    """Leave special tokens (the end token, a model's <think>) out of the text of completions, which
    reward functions and samples have; false keeps them."""
    timeout: Positive | None = None
    """Seconds that one call of a function may take, for all completions; null = any time."""
    folder: LocalPath | None = None
    """Where the files of functions are looked for first; null = the folder of the recipe."""
    accept_changed: bool = False
    """Whether --resume goes on where the files of reward functions have changed since."""

    @model_validator(mode="after")
    def _some_and_distinct(self) -> RewardSection:
        if not (names := [function.key for function in self.functions]):
            raise ValueError("functions must name at least one reward function")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(repeated)} stands more than once: add up the weights")
        of_ours = [f for f in self.functions if f.key in BUILT_IN]
        if wrong := [f for f in of_ours if f.signature != "ours"]:
            raise ValueError(f"{wrong[0].key} is built in, of signature ours: leave signature out")
        return self
