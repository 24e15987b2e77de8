"""The sections of a recipe: frozen models that check one section each.

What two sections must agree on is checked in `config.py`. Every field has its docstring below it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from rl_consistency.numerics.strict import OPS
from rl_consistency.rollout.drafter import MAX_DRAFT
from rl_consistency.rollout.sampling_params import MIN_TEMPERATURE
from rl_consistency.trainers.advantages import AdvantageKind
from rl_consistency.trainers.data.arithmetic import check_parameters
from rl_consistency.trainers.losses import WeightKind


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _known_ops(names: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := sorted(set(names) - set(OPS)):
        raise ValueError(f"unknown op {', '.join(unknown)}; the ops are {', '.join(sorted(OPS))}")
    return names


def _exactly_one(**choices: Any) -> None:
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        allowed = ", ".join(choices)
        raise ValueError(f"exactly one of {allowed} is needed, got {', '.join(given) or 'none'}")


_Number = BeforeValidator(_not_bool)
AnyInt = Annotated[int, _Number]
Count = Annotated[int, _Number, Field(ge=1)]
CountOrZero = Annotated[int, _Number, Field(ge=0)]
Positive = Annotated[float, _Number, Field(gt=0)]
PositiveOrZero = Annotated[float, _Number, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[Path, AfterValidator(Path.expanduser)]
Architecture = Literal["qwen3", "llama", "mistral", "qwen2"]


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, finite numbers, documented fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, `.`, `_`, `-`; names the output directory and the tracked run."""

    output_dir: LocalPath = Field(default_factory=lambda data: Path("runs") / data["name"])
    """Where config, metrics, summary, report and checkpoints go; default runs/<name>."""

    seed: Annotated[int, _Number, Field(ge=0, lt=2**63)] = 0
    """Seeds the data order, the sampler, the weights of a built policy and the generated task."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the run computes; cuda is one NVIDIA GPU of compute capability 8.0 or later."""

    num_threads: Count | None = None
    """CPU threads; part of the fingerprint. Tiny models run fastest on 1; null = torch's choice."""


class BuildSection(Section):
    """A policy built from scratch; its vocabulary is the tokenizer's, padded to 16s."""

    architecture: Architecture
    """Family of the Hugging Face causal language model."""

    hidden_size: Count
    """Width of the residual stream."""

    intermediate_size: Count
    """Width of the gated MLP."""

    num_hidden_layers: Count
    """Number of decoder layers."""

    num_attention_heads: Count
    """Number of query heads."""

    num_key_value_heads: Count
    """Number of key/value heads; divides num_attention_heads."""

    head_dim: Annotated[int, _Number, Field(ge=2, multiple_of=2)] | None = None
    """Width of one head, even; null = hidden_size / num_attention_heads."""

    max_position_embeddings: Count = 512
    """Longest sequence, prompt and completion together, in tokens."""

    rope_theta: Positive = 10_000.0
    """Base of the rotary position embedding."""

    tie_word_embeddings: bool = True
    """Use the input embedding as the LM head."""

    @model_validator(mode="after")
    def _heads_fit(self) -> BuildSection:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim is None and self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} "
                "heads of even width: set head_dim"
            )
        return self


class PolicySection(Section):
    """The model that is trained: exactly one of `path`, `hub` and `build`."""

    path: LocalPath | None = None
    """Local Hugging Face model directory (config.json, safetensors); nothing is downloaded."""

    hub: Name | None = None
    """Model name on the Hugging Face hub; the only setting that may download anything."""

    build: BuildSection | None = None
    """Sizes of a policy with fresh weights drawn from run.seed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters and activations; accumulation is always float32. float16 cannot be
    trained: per-token gradients underflow without a loss scale."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; changes memory and time, not bits."""

    @model_validator(mode="after")
    def _one_source(self) -> PolicySection:
        _exactly_one(path=self.path, hub=self.hub, build=self.build)
        return self


class TokenizerSection(Section):
    """How text becomes tokens."""

    kind: Literal["byte", "auto"]
    """byte: one token per UTF-8 byte; auto: the tokenizer of policy.path or policy.hub."""


class ArithmeticSection(Section):
    """The generated task: chained sums, answered with the running totals."""

    name: Literal["arithmetic"]
    """Which generated task."""

    num_terms: Annotated[int, _Number, Field(ge=2)] = 4
    """Terms of each sum."""

    max_value: Count = 9
    """Each term is drawn from 1 to this."""

    train_size: Count = 4096
    """Number of training examples."""

    eval_size: CountOrZero = 128
    """Number of evaluation examples; their sums never occur in training."""

    incomplete_targets: Annotated[float, _Number, Field(ge=0, lt=1)] = 0.0
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
    """JSONL file of evaluation examples; only beside `path`."""

    prompt_field: Name = "question"
    """Field of a line that holds the prompt."""

    answer_field: Name = "answer"
    """Field of a line that holds the reference answer, which is also the warm start's target."""

    prompt_template: str = "{prompt}"
    """The text given to the model; `{prompt}` stands for the prompt field."""

    max_prompt_tokens: Count = 256
    """Longest prompt in tokens; a longer one is an error that names the example."""

    shuffle: bool = True
    """Visit each epoch in a new order, a pure function of run.seed and the epoch."""

    limit: Count | None = None
    """Use only the first this many training examples; null = all."""

    @model_validator(mode="after")
    def _one_source(self) -> DataSection:
        _exactly_one(task=self.task, path=self.path)
        if self.eval_path is not None and self.path is None:
            raise ValueError("eval_path goes with path; a task generates its own evaluation set")
        if "{prompt}" not in self.prompt_template:
            raise ValueError("prompt_template must contain {prompt}")
        return self


class RewardFunctionSection(Section):
    """One term of the reward."""

    name: Name
    """exact_match, gsm8k, arithmetic, or package.module:function."""

    weight: Annotated[float, _Number] = 1.0
    """Factor of this term in the sum."""


class RewardSection(Section):
    """The reward of a completion: a weighted sum of functions."""

    functions: tuple[RewardFunctionSection, ...]
    """The terms, at least one, added in this order."""

    @model_validator(mode="after")
    def _some_and_distinct(self) -> RewardSection:
        names = [function.name for function in self.functions]
        if not names:
            raise ValueError("functions must name at least one reward function")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(repeated)} stands more than once: add up the weights")
        return self


class WarmStartSection(Section):
    """Supervised steps on the reference completions, before reinforcement learning."""

    steps: CountOrZero = 0
    """Number of supervised steps; 0 = none."""

    batch_size: Count = 32
    """Examples per step."""

    learning_rate: Positive = 1e-3
    """Learning rate of these steps."""


class RolloutSection(Section):
    """How completions are sampled."""

    prompts_per_step: Count
    """Prompts of one rollout batch."""

    samples_per_prompt: Annotated[int, _Number, Field(ge=2)]
    """Completions per prompt: the group that advantages are computed within."""

    max_new_tokens: Count
    """Longest completion in tokens."""

    temperature: Annotated[float, _Number, Field(ge=MIN_TEMPERATURE)] = 1.0
    """Sampling temperature; training scores the tokens at the same one."""

    top_k: CountOrZero = 0
    """Sample among the k most likely tokens; 0 = all."""

    top_p: Annotated[float, _Number, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens that reaches this mass; 1 = all."""

    min_p: Annotated[float, _Number, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 = none."""

    kv_block_size: Count = 16
    """Tokens per block of the key/value cache."""

    num_kv_blocks: Count | None = None
    """Blocks of the key/value cache; null = enough for the whole batch, up to 4 GiB on a CPU and
    40 % of the free memory on a GPU (then sequences take turns; the same bits)."""

    max_batch_tokens: Count = 2048
    """Most tokens of one engine step."""

    max_num_seqs: Count = 256
    """Most sequences of one engine step."""

    prefill_chunk_size: Count | None = None
    """Prompt tokens of one sequence per engine step; null = no chunks below max_batch_tokens."""

    prefix_sharing: bool = True
    """Share the cache of common prefixes, such as the prompt within a group."""

    speculation: Annotated[int, _Number, Field(ge=0, le=MAX_DRAFT)] = 0
    """Longest draft, looked up in the text itself, that one engine step verifies; 0 = none. The
    same bits: it pays where completions copy and few sequences run."""

    cuda_graphs: bool = True
    """Decode through CUDA graphs on a GPU; the same bits."""


class AlgorithmSection(Section):
    """What is optimised."""

    name: Literal["grpo"] = "grpo"
    """The algorithm."""

    advantage: AdvantageKind = "grpo"
    """grpo: centred by group mean, scaled by group deviation; dr_grpo: centred only."""

    loss: WeightKind = "grpo"
    """grpo: mean over sequences of token means; dr_grpo: constant length; dapo: token mean."""

    clip_low: Annotated[float, _Number, Field(ge=0, lt=1)] = 0.2
    """The importance ratio is clipped below at 1 - clip_low."""

    clip_high: PositiveOrZero = 0.2
    """And above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""

    kl_coefficient: PositiveOrZero = 0.0
    """Weight of the KL divergence to the initial policy; 0 = no reference model is kept."""

    kl_estimator: Literal["k3"] = "k3"
    """Estimator of that divergence per token."""

    entropy_coefficient: PositiveOrZero = 0.0
    """Weight of the entropy bonus."""

    updates_per_rollout: Count = 1
    """Optimizer steps per epoch over a rollout batch, which is split into as many equal parts."""

    epochs_per_rollout: Count = 1
    """Passes over each rollout batch."""

    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Completions cut at max_new_tokens: kept, given no weight in the loss (they still count in its
    denominators and in the group's mean), or penalised by length."""

    overlong_buffer: CountOrZero = 0
    """Tokens before max_new_tokens over which the penalty grows; only with overlong: penalty."""


class OptimizerSection(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: Positive
    """Peak learning rate."""

    betas: tuple[
        Annotated[float, _Number, Field(ge=0, lt=1)], Annotated[float, _Number, Field(ge=0, lt=1)]
    ] = (0.9, 0.999)
    """Decay rates of the two moments."""

    eps: Positive = 1e-8
    """Added to the denominator."""

    weight_decay: PositiveOrZero = 0.0
    """Decoupled weight decay."""

    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; null = no clipping."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine end at 0."""

    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises from 0."""


class TrainingSection(Section):
    """The loop."""

    steps: Count
    """Rollout batches."""

    micro_batch_size: Count = 8
    """Completions per forward and backward pass; changes memory and time, not bits."""

    layout: Literal["packed", "padded"] = "packed"
    """How sequences share a call: end to end, or padded to the longest; the same bits."""

    eval_every: CountOrZero = 0
    """Evaluate every this many steps; 0 = never."""

    eval_samples: Count | None = None
    """Evaluation examples used, one greedy completion each; null = all."""

    save_every: CountOrZero = 0
    """Write a checkpoint every this many steps; 0 = only at the end."""

    keep_checkpoints: Count = 2
    """How many of the newest checkpoints stay."""


class ConsistencySection(Section):
    """What is checked while training, and what happens when it fails."""

    strict: bool | None = None
    """Canonical reduction orders; false runs the stock ops and promises nothing; null = canonical,
    unless the environment variable RL_CONSISTENCY_STRICT says otherwise."""

    strict_except: Annotated[tuple[str, ...], AfterValidator(_known_ops)] = ()
    """Ops that run stock although strict is on (for ablations)."""

    gradient_check_every: CountOrZero = 0
    """Recompute the gradients under other groupings every this many steps; 0 = never."""

    gradient_check_sequences: Count | None = None
    """Completions regrouped in such a check, the first of the step; null = all, which is slow."""

    shadow_every: CountOrZero = 0
    """Measure the drift of the stock path on the same tokens every this many steps; 0 = never."""

    on_drift: Literal["raise", "warn", "record"] = "raise"
    """What a differing logprob, gradient or sampled library product does; differing tokens are
    saved for replay first, and the rollout engine warns of a product besides."""


class WandbSection(Section):
    """Weights & Biases."""

    project: Name
    """Project the run is logged to."""

    name: Name | None = None
    """Name of the run there; null = run.name."""

    mode: Literal["offline", "online"] = "offline"
    """offline needs neither key nor network."""


class TrackingSection(Section):
    """Where metrics go besides metrics.jsonl."""

    console: bool = True
    """Show the live progress table."""

    wandb: WandbSection | None = None
    """Log to Weights & Biases; null = do not."""
