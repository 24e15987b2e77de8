"""What sections of a recipe are built from, and those that say what a run is and reads.

They are `run`, `consistency`, `tracking`, `policy` and `tokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WrapValidator,
    model_validator,
)

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.numerics.strict import OPS, Strictness, current, strict
from rl_consistency.parity.foreign_drift import Trainer

LARGEST = 1e30
"""The largest number of a recipe: torch computes with it, and some multiples of it, in float32."""


class RecipeSection(BaseModel):
    """A frozen section: no unknown keys, finite numbers, a docstring under each field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _computable(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError(f"{value:g} is beyond {LARGEST:g}, and float32 computes with it")
    return value


def _local(value: Any, to_path: Callable[[Any], Path]) -> Path:
    if isinstance(value, str) and not value.strip():
        raise ValueError("the path is empty: name a file or directory, '.' for the current one")
    path = to_path(value)
    try:
        absolute = path.expanduser().absolute()
        str(absolute).encode("utf-8")
    except RuntimeError as error:
        raise ValueError(f"there is no user {path.parts[0]}: write the path out") from error
    except UnicodeEncodeError as error:  # libraries that write a checkpoint take no other text
        raise ValueError(f"{absolute!r} is no text in UTF-8: give an absolute path") from error
    return absolute


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_OF_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".safetensors", ".gguf")


def _source(value: Any) -> Any:
    """A path, absolute; the name of something on the hub, as it is, where no such path exists."""
    of_hub = isinstance(value, str) and _HUB_ID.fullmatch(value) is not None
    if of_hub and not (Path(value).exists() or Path(value).suffix in _OF_FILES):
        return value
    if not isinstance(value, str | Path):
        raise ValueError(f"a path or the name of a repository is needed, got {value!r:.60}")
    return _local(value, Path)


Int = Annotated[int, BeforeValidator(_not_bool), Field(ge=-(2**63), lt=2**63)]
Float = Annotated[float, BeforeValidator(_not_bool), AfterValidator(_computable)]
Count = Annotated[Int, Field(ge=1)]
CountOrZero = Annotated[Int, Field(ge=0)]
Positive = Annotated[Float, Field(gt=0)]
PositiveOrZero = Annotated[Float, Field(ge=0)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]
Share = Annotated[Float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[Path, WrapValidator(_local)]
Source = Annotated[Path | str, BeforeValidator(_source)]
"""A path, or text: the name of a repository of the hub, `owner/name` or `owner/name@revision`."""


def nearest_key(key: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """What an unknown key may have been meant to be, of the keys here and `elsewhere`."""
    near = get_close_matches(key, known, n=1, cutoff=0.8) or elsewhere
    if near := near or get_close_matches(key, known, n=1):
        return f"did you mean {' or '.join(near[:2])}?"
    return f"the keys here are {', '.join(known)}"


def require_one(**choices: Any) -> None:
    """ValueError unless exactly one of the choices is not None."""
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        got = ", ".join(given) or "none"
        remedy = "; set the others to null" if len(given) > 1 else ""
        raise ValueError(f"exactly one of {', '.join(choices)} is needed, got {got}{remedy}")


class RunSection(RecipeSection):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, `.`, `_`, `-`; names the output directory and the tracked run."""
    output_dir: LocalPath = Field(
        default_factory=lambda data: Path("runs") / data.get("name", ""), validate_default=True
    )
    """Where config, metrics, summary, report and checkpoints go; default runs/<name>."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seeds the data order, the sampler, the weights of a built policy and the generated task."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where a process computes; cuda is an NVIDIA GPU of compute capability 8.0 or later."""
    num_threads: Annotated[Count, Field(le=1024)] | None = None
    """CPU threads; part of the fingerprint. Tiny models run fastest on 1; null = torch's choice."""
    collective_timeout: Annotated[Count, Field(le=86_400)] = 600
    """Seconds that a process waits for the others before it gives up."""


def _known_ops(names: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := sorted(set(names) - set(OPS)):
        raise ValueError(f"unknown op {', '.join(unknown)}; the ops are {', '.join(sorted(OPS))}")
    return names


def _part_order(value: Any) -> Any:
    if isinstance(value, PartOrder):
        return value
    numbers = value if isinstance(value, list | tuple) else [value]
    if len(numbers) not in (1, 2) or not all(type(n) is int and n > 0 for n in numbers):
        raise ValueError(f"a positive number, or two: [in a group, groups]; got {value!r}")
    return PartOrder(*numbers)


class ConsistencySection(RecipeSection):
    """What is checked while training, and what happens when a check fails."""

    strict: bool | None = None
    """Canonical reduction orders; false runs the stock ops and promises nothing; null = canonical,
    unless the environment variable RL_CONSISTENCY_STRICT says otherwise."""
    strict_except: Annotated[tuple[str, ...], AfterValidator(_known_ops)] = ()
    """Ops that run stock although strict is on (for ablations)."""
    gradient_leaves: Annotated[
        PartOrder,
        BeforeValidator(_part_order, json_schema_input_type=int | list[int]),
        PlainSerializer(lambda p: p.inner if p.outer == 1 else [p.inner, p.outer]),
    ] = PartOrder(1)
    """Parts into which the sequences of an optimizer step are cut; their gradients are added in
    order, on 1 to as many processes with the same bits. [B, A]: A groups of B, for several nodes.
    Another number is another order, with other bits."""
    ordered: bool = True
    """Whether gradients are added in one order. false leaves several processes to the strategy's
    stock sum: rollout still equals training, but the weights depend on their number."""
    gradient_check_every: CountOrZero = 0
    """Recompute the gradients under other groupings every this many steps; 0 = never."""
    gradient_check_sequences: Count | None = 8
    """Completions regrouped in such a check, the first of the step; null = all, which is slow."""
    value_check_every: CountOrZero = 0
    """Recompute the critic's values under another grouping every this many steps; 0 = never. Only
    in PPO."""
    shadow_every: CountOrZero = 0
    """Measure the drift of the stock path on the same tokens every this many steps; 0 = never."""
    shadow_budget: Count | None = 256
    """Most tokens that the stock path decodes one after another in a step, 64 completions at a
    time: as many batches of the step's first completions as that allows, of longer completions the
    beginning; null = all, which takes minutes."""
    on_drift: Literal["raise", "warn", "record"] = "raise"
    """What happens when a logprob, a gradient or a sampled library product differs. Differing
    tokens are saved for replay in every case; the rollout engine also warns of a product."""

    def strictness(self) -> AbstractContextManager[Strictness]:
        """What the section says of strictness, else what holds outside the block."""
        if self.strict is None and not self.strict_except:
            return strict(except_=current().stock)
        return strict(self.strict is not False, except_=self.strict_except)


class WandbSection(RecipeSection):
    """Weights & Biases."""

    project: Name
    """Project the run is logged to."""
    name: Name | None = None
    """Name of the run there; null = run.name."""
    mode: Literal["offline", "online"] = "offline"
    """offline needs neither key nor network."""
    entity: Name | None = None
    """User or team that the run belongs to; null = wandb's own default."""
    group: Name | None = None
    """Group of the run, such as that of its seeds."""
    tags: tuple[Name, ...] = ()
    """Tags of the run."""


def _on_or_off(value: Any) -> Any:
    """true is a section of defaults, false none."""
    return ({} if value else None) if isinstance(value, bool) else value


class TensorBoardSection(RecipeSection):
    """TensorBoard."""

    dir: LocalPath | None = None
    """Folder of runs, of which each has one of its name and id; null = tensorboard in the run's
    directory."""


class MLflowSection(RecipeSection):
    """MLflow."""

    experiment: Name = "rl_consistency"
    """Experiment that the run belongs to; made where there is none."""
    name: Name | None = None
    """Name of the run there; null = run.name."""
    tracking_uri: Name | None = None
    """Where it is kept: a server, a folder or a database; null = MLflow's own default."""
    tags: dict[str, str] = Field(default={})
    """Tags of the run."""


class TrackingSection(RecipeSection):
    """Where metrics go, in addition to metrics.jsonl."""

    console: bool = True
    """Show the live progress table."""
    samples: CountOrZero = 2
    """Completions of each step that samples.jsonl, the report and wandb show: the best and the
    worst by reward of the step's first prompt, then of its second, and so on; 0 = none."""
    wandb: WandbSection | None = None
    """Log to Weights & Biases; null = do not."""
    tensorboard: Annotated[TensorBoardSection | None, BeforeValidator(_on_or_off)] = None
    """Log to TensorBoard (`rl-consistency[tensorboard]`); true = with its defaults."""
    mlflow: Annotated[MLflowSection | None, BeforeValidator(_on_or_off)] = None
    """Log to MLflow (`rl-consistency[mlflow]`); true = with its defaults."""
    metrics_of: tuple[Trainer, ...] = ()
    """Trainers whose drift metrics are logged too, by their own names and definitions."""


SPARSE = ("qwen3_moe", "olmoe", "mixtral")
"""Families whose layers are mixtures of experts."""
HEAD_STEP, WIDEST_HEAD = 16, 256
"""Widths of heads that attention takes."""
HeadWidth = Annotated[Int, Field(ge=HEAD_STEP, le=WIDEST_HEAD, multiple_of=HEAD_STEP)]


class ExpertsSection(RecipeSection):
    """What a mixture of experts has and a dense model has not."""

    count: Count
    """Experts of each layer, all of width intermediate_size."""
    per_token: Count
    """Experts that a token meets in each layer."""

    @model_validator(mode="after")
    def _fits(self) -> ExpertsSection:
        if self.per_token > self.count:
            raise ValueError(f"per_token {self.per_token} is more than the {self.count} experts")
        return self


class BuildSection(RecipeSection):
    """A policy built from scratch; its vocabulary is the tokenizer's, padded to 16s."""

    architecture: Literal["qwen3", "llama", "mistral", "qwen2", "qwen3_moe", "olmoe", "mixtral"]
    """Family of the Hugging Face causal language model."""
    hidden_size: Count
    """Width of the residual stream."""
    intermediate_size: Count
    """Width of the gated MLP, of each expert's in a mixture of experts."""
    num_hidden_layers: Count
    """Number of decoder layers."""
    num_attention_heads: Count
    """Number of query heads."""
    num_key_value_heads: Count
    """Number of key/value heads; divides num_attention_heads."""
    head_dim: HeadWidth | None = None
    """Width of one head, a multiple of 16 up to 256; null = hidden_size / num_attention_heads."""
    max_position_embeddings: Count = 512
    """Longest sequence, prompt and completion together, in tokens."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Use the input embedding as the LM head."""
    experts: ExpertsSection | None = None
    """Experts of qwen3_moe, olmoe and mixtral; null in the dense families."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> BuildSection:
        heads, shared, size = self.num_attention_heads, self.num_key_value_heads, self.hidden_size
        if heads % shared:
            multiple = f"no multiple of num_key_value_heads {shared}"
            raise ValueError(f"num_attention_heads {heads} is {multiple}")
        if self.head_dim is None and (size % (HEAD_STEP * heads) or size > WIDEST_HEAD * heads):
            wanted = f"a multiple of {HEAD_STEP} up to {WIDEST_HEAD}: set head_dim"
            raise ValueError(f"hidden_size {size} gives {heads} heads no width that is {wanted}")
        if self.architecture == "olmoe" and self.head_dim not in (None, size // heads):
            raise ValueError("olmoe norms whole projections: leave head_dim out")
        if (self.experts is not None) != (self.architecture in SPARSE):
            wanted = "set experts" if self.experts is None else "leave experts out"
            raise ValueError(f"architecture {self.architecture}: {wanted}")
        return self


class PolicySection(RecipeSection):
    """The model that is trained: exactly one of `path`, `hub` and `build`."""

    path: Source | None = None
    """Hugging Face model directory (config.json, safetensors), from which nothing is downloaded;
    or the name of a model of the hub, owner/name or owner/name@revision, where there is no such
    directory. The commit is kept in manifest.json. Code of a model's author is never run."""
    hub: Name | None = None
    """A name of the hub, also where there is a directory of that name."""
    build: BuildSection | None = None
    """Sizes of a policy with fresh weights drawn from run.seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters and activations; accumulation is always float32. float16 cannot be
    trained: per-token gradients underflow without a loss scale."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; changes memory and time, not bits."""

    @property
    def source(self) -> Path | str | None:
        """The directory or the name on the hub; None for a policy that is built."""
        return self.path or self.hub

    @model_validator(mode="after")
    def _one_source(self) -> PolicySection:
        require_one(path=self.path, hub=self.hub, build=self.build)
        return self


class TokenizerSection(RecipeSection):
    """How text becomes tokens."""

    kind: Literal["byte", "auto"]
    """byte: one token per UTF-8 byte; auto: the tokenizer of policy.path."""
