"""The sections `rollout`, `warm_start`, `algorithm`, `optimizer` and `training`."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, PlainSerializer, field_validator, model_validator

from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers.advantages import AdvantageKind
from rl_consistency.trainers.config.sections import (
    BelowOne,
    Count,
    CountOrZero,
    Float,
    Positive,
    PositiveOrZero,
    RecipeSection,
    Share,
    nearest_key,
)
from rl_consistency.trainers.losses import LOSSES, LossKind

_NO_KEYS = ("seed", "greedy_logprobs")
SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams) if f.name not in _NO_KEYS)
"""Keys of rollout.sampling. The seed is run.seed, and no greedy samples are drawn to learn from."""


def _sampling_problems(value: dict[Any, Any]) -> list[str]:
    """What is wrong with each key; SamplingParams checks the values itself."""
    problems: list[str] = []
    for key, given in value.items():
        if key not in SAMPLING_KEYS:
            problems.append(f"unknown key {key}; {nearest_key(str(key), SAMPLING_KEYS)}")
            continue
        try:
            SamplingParams(**{key: given})
        except (TypeError, ValueError) as error:
            problems.append(str(error))
    return problems


def _sampling(value: Any) -> Any:
    """The SamplingParams of a mapping."""
    if not isinstance(value, dict):
        return value
    problems = _sampling_problems(value)
    if value.get("temperature") == 0:
        problems.append("temperature must be above 0: greedy completions are equal")
    if missing := [key for key in ("n", "max_tokens") if key not in value]:
        problems.append(f"missing: {', '.join(missing)}")
    if problems:
        raise ValueError("; ".join(problems))
    return SamplingParams(**value)


def _eval_sampling(value: Any) -> Any:
    """What differs from rollout.sampling."""
    if not isinstance(value, dict):
        return value
    problems = _sampling_problems(value)
    if not problems and value.get("n", 1) > 1 and value.get("temperature") == 0:
        problems = ["n greedy completions are equal: leave out n, or raise the temperature"]
    if problems:
        raise ValueError("; ".join(problems))
    return value


class RolloutSection(RecipeSection):
    """How completions are sampled."""

    prompts_per_step: Count
    """Prompts of one rollout batch."""
    sampling: Annotated[
        SamplingParams,
        BeforeValidator(_sampling),
        PlainSerializer(
            lambda params: {
                key: getattr(params, key)
                for key in SAMPLING_KEYS
                if key != "stop" or params.stop  # which runs of before do not name
            }
        ),
    ]
    """The fields of `SamplingParams`, in GRPO with n at least 2; training scores with the same
    object."""
    kv_block_size: Count = 16
    """Tokens per block of the key/value cache."""
    num_kv_blocks: Count | None = None
    """Blocks of that cache; null = enough for the batch, up to 4 GiB on a CPU and 40 % of the free
    memory on a GPU (then sequences take turns; the same bits)."""
    max_batch_tokens: Count = 16384
    """Most tokens of one engine step."""
    max_num_seqs: Count = 256
    """Most sequences of one engine step."""
    prefill_chunk_size: Count | None = None
    """Prompt tokens of one sequence per engine step; null = no chunks below max_batch_tokens."""
    prefix_sharing: bool = True
    """Share the cache of common prefixes, such as the prompt within a group."""
    cuda_graphs: bool = True
    """Decode and prefill through CUDA graphs on a GPU; the same bits."""


class WarmStartSection(RecipeSection):
    """Supervised steps on the reference completions, before reinforcement learning."""

    steps: CountOrZero = 0
    """Number of supervised steps; 0 = none."""
    batch_size: Count = 32
    """Examples per step."""
    learning_rate: Positive = 1e-3
    """Learning rate of these steps."""


class PPOSection(RecipeSection):
    """What PPO has and GRPO has not."""

    gamma: Share = 1.0
    """Discount of later rewards, per token."""
    gae_lambda: Share = 0.95
    """Decay of later errors of the critic: 1 = the whole return, 0 = the next value only."""
    value_clip: Positive | None = 0.2
    """A value moves no further than this from the old one in the critic's loss; null = any way."""
    whiten_advantages: bool = True
    """Advantages of a rollout have mean 0 and standard deviation 1."""
    critic_learning_rate: Positive | None = None
    """Learning rate of the critic; null = the policy's. Its optimizer shares the other settings."""


class DynamicSamplingSection(RecipeSection):
    """Groups whose rewards are all equal are drawn again, from further prompts (DAPO)."""

    max_rounds: Count = 10
    """Most rollout batches drawn for a step. What is missing after the last is filled up with
    groups that were left out, whose advantages are 0; verl ends the run there."""


NAMED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"advantage": "dr_grpo", "loss": "dr_grpo"},
    "dapo": {"loss": "dapo", "clip_high": 0.28, "dynamic_sampling": {}},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "rloo": {"advantage": "rloo", "loss": "dr_grpo", "use_kl_in_reward": True},
    "reinforce_plus_plus": {
        **{"advantage": "reinforce_plus_plus", "loss": "dapo", "use_kl_in_reward": True}
    },
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "loss": "dapo"},
}
"""What stands for a name in `algorithm.name` that is none of a trainer: grpo, with these keys."""


_OfGroups = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
_Reinforce = Literal["reinforce_plus_plus", "reinforce_plus_plus_baseline"]
AlgorithmName = Literal[_OfGroups, _Reinforce, "ppo"]


class AlgorithmSection(RecipeSection):
    """What is optimised."""

    name: AlgorithmName = "grpo"
    """grpo: rewards are compared within a group; ppo: a critic says what reward was expected. The
    others stand for grpo with the keys that the table above gives."""
    ppo: PPOSection | None = None
    """Settings of name: ppo; null = their defaults."""
    advantage: AdvantageKind = "grpo"
    """grpo: centred by group mean, scaled by group deviation; dr_grpo: centred only; rloo: against
    the mean of the others of the group; reinforce_plus_plus: rewards to go, normalised over the
    tokens of the rollout; reinforce_plus_plus_baseline: centred by group mean, then so normalised.
    Not in PPO."""
    loss: LossKind = "grpo"
    """grpo: mean over sequences of token means; dr_grpo: constant length; dapo: token mean; gspo:
    as grpo, with the ratio of the sequence; cispo: token mean of logprobs, weighted by clipped
    ratios."""
    clip_low: Share = 0.2
    """The importance ratio is clipped below at 1 - clip_low; in gspo 0.0003 by default, in cispo 1,
    which is no bound."""
    clip_high: PositiveOrZero = 0.2
    """The importance ratio is clipped above at 1 + clip_high; larger than clip_low is DAPO's
    clip-higher. In gspo 0.0004 by default, in cispo 4, which is epsilon_high 5 in TRL."""
    kl_coefficient: PositiveOrZero = 0.0
    """Weight of the KL to the initial policy: of its k3 estimate in the loss, or of the log-ratio
    in the reward; 0 keeps no reference model."""
    use_kl_in_reward: bool = False
    """Take the KL from the reward, of each token in reinforce_plus_plus and of each completion in
    other advantages, and not into the loss. PPO always takes it from each token's reward."""
    dynamic_sampling: DynamicSamplingSection | None = None
    """Draw further prompts until no group of the step has equal rewards; null = never."""
    entropy_coefficient: PositiveOrZero = 0.0
    """Weight of the entropy bonus."""
    balance_coefficient: PositiveOrZero = 0.0
    """Weight of the load-balancing loss of a mixture of experts, mean over sequences; 0 = none."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """What loads are counted over. batch is refused: it is no sum over sequences, so every cut of
    the batch into micro-batches or leaves would change it."""
    updates_per_rollout: Count = 1
    """Optimizer steps per epoch over a rollout batch, which is split into as many equal parts."""
    epochs_per_rollout: Count = 1
    """Passes over each rollout batch."""
    overlong: Literal["keep", "mask", "mask_counted", "penalty"] = "keep"
    """Completions cut at max_tokens: kept; mask: given no weight in the loss and left out of the
    token mean of dapo, as TRL does, but not of the group's mean and the number of sequences;
    mask_counted: their tokens count in that mean; or penalised by length. An update in which all
    are masked is skipped."""
    overlong_buffer: CountOrZero = 0
    """Tokens before max_tokens over which the penalty grows; only with overlong: penalty."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """Write out a name that stands for other keys, and the clip of the loss."""
        if not isinstance(given, dict):
            return given
        name = given.get("name")
        named = NAMED.get(name, {}) if isinstance(name, str) else {}
        for key in ("advantage", "loss"):
            if key in named and given.get(key, named[key]) != named[key]:
                remedy = f"set {key} to {named[key]} too, or leave the name out"
                stands = f"name {name} stands for {key}: {named[key]}"
                raise ValueError(f"{stands}, but {key} is {given[key]}: {remedy}")
        given = {**named, **given, **({"name": "grpo"} if named else {})}
        loss = given.get("loss")
        if form := LOSSES.get(loss) if isinstance(loss, str) else None:  # pyright: ignore[reportArgumentType]
            given = {"clip_low": form.clip_low, "clip_high": form.clip_high, **given}
        return given

    @field_validator("balance_over")
    @classmethod
    def _is_a_sum(cls, value: str) -> str:
        if value == "batch":
            product = "over the batch the loss is a product of two means, no sum over sequences"
            raise ValueError(f"batch: {product}: every cut changes it; use sequence")
        return value

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL is part of the reward, and not of the loss."""
        return self.use_kl_in_reward or self.name == "ppo"

    @property
    def of_ppo(self) -> PPOSection | None:
        """The settings of PPO; None for another algorithm."""
        return (self.ppo or PPOSection()) if self.name == "ppo" else None


class MuonSection(RecipeSection):
    """What Muon has and AdamW has not."""

    momentum: BelowOne = 0.95
    """Decay rate of the momentum, which is Nesterov's."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How a matrix's rate follows from learning_rate and its shape, as in torch.optim.Muon:
    match_rms_adamw takes rates and decay of AdamW, original those of Muon's author."""
    adamw_learning_rate: Positive | None = None
    """Peak rate of what AdamW updates; null = learning_rate."""


Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]


class OptimizerSection(RecipeSection):
    """The optimizer and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """adamw: torch's; adamw_8bit: that of bitsandbytes, whose moments are 8-bit in blocks of 256;
    muon: torch's, for the matrices of the layers, and AdamW for embeddings, LM head, norms and
    biases. The last two need whole tensors: strategy replicated."""
    muon: MuonSection | None = None
    """Settings of name: muon; null = their defaults."""
    learning_rate: Positive
    """Peak learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: PositiveOrZero = 0.0
    """Decoupled weight decay, of all weights but those of norms and biases."""
    decay_norms: bool = False
    """Whether norms' weights and biases decay too; transformers' Trainer and TRL leave them out."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; null = no clipping."""
    schedule: Schedule = "constant"
    """Shape of the learning rate after the warm-up, as transformers names it; linear and cosine
    end at min_lr, else at 0. constant_with_warmup is constant; cosine_with_min_lr needs a min_lr.
    """
    min_lr: Positive | None = None
    """Where linear and cosine end, other rates at the same share; null = at min_lr_ratio."""
    min_lr_ratio: BelowOne = 0.0
    """The same as a share of learning_rate, of each rate where there are several."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises from 0."""

    @property
    def of_muon(self) -> MuonSection | None:
        """The settings of Muon; None for another optimizer."""
        return (self.muon or MuonSection()) if self.name == "muon" else None

    @property
    def ends_at(self) -> float:
        """Share of the peak at which a schedule that ends does so."""
        return self.min_lr / self.learning_rate if self.min_lr else self.min_lr_ratio


StrategyName = Literal["replicated", "fsdp2", "zero1", "zero2", "zero3"]


class TrainingSection(RecipeSection):
    """The loop."""

    steps: Count
    """Rollout batches."""
    micro_batch_size: Count = 8
    """Completions per forward and backward pass; changes memory and time, not bits."""
    strategy: StrategyName | None = None
    """How several processes share the policy. replicated: each holds all of it; fsdp2: each holds
    a shard of weights, moments and gradients; zero1, zero2, zero3: DeepSpeed's stages; null = what
    accelerate launch is told, else replicated."""
    layout: Literal["packed", "padded"] = "packed"
    """How sequences share a call: end to end, or padded to the longest; the same bits."""
    cuda_graphs: bool = True
    """The layers of small models, or of small micro-batches, through CUDA graphs on a GPU; the same
    bits. Activations and gradients then keep their memory between steps."""
    eval_every: CountOrZero = 0
    """Evaluate every this many steps; 0 = never."""
    eval_samples: Count | None = None
    """Evaluation examples used of each set; null = all. How many completions each gets says
    eval_sampling.n."""
    eval_sampling: Annotated[dict[str, Any], BeforeValidator(_eval_sampling)] | None = None
    """Keys of rollout.sampling that are others in an evaluation: n, temperature, max_tokens, ...
    Without n there is one completion; one completion is greedy unless temperature is given. null =
    one greedy completion of each example."""
    eval_pass_at: tuple[Count, ...] | None = None
    """The k of the metrics eval/pass_at_k: the chance that one of k completions is correct, without
    bias from n completions (arXiv 2107.03374); null = 1, 2, 4, ... and n where n is above 1."""
    eval_pass_reward: Float = 1.0
    """A completion is correct where its reward is at least this."""
    save_every: CountOrZero | None = 0
    """Write a checkpoint every this many steps; 0 = only at the end, null = none. Both write one
    where a signal, failing rewards or, in one process, drift end the run, and 0 after a warm start;
    a run that is resumed writes one at its end."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints stay."""

    @property
    def patch(self) -> dict[str, Any]:
        """The options of `patch` for a model that is trained: with fp32 master weights."""
        return {"grad_dtype": torch.float32, "cuda_graphs": self.cuda_graphs}
