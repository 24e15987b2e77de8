"""What `attach` does not cover, refused by name before any step."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from importlib import metadata
from typing import Any, Literal, get_args

import torch
import transformers
from packaging.specifiers import SpecifierSet
from transformers import TrainerCallback

from rl_consistency.integrations.mixed_precision import is_bf16
from rl_consistency.rollout.engine import RolloutEngine

TRL_VERSIONS = SpecifierSet(">=1.15,<1.17")
"""Versions of TRL whose seams were read; setup.cfg names the same."""

Kind = Literal["GRPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer", "Trainer"]
"""Trainer classes that `attach` covers."""

_SEAM_METHODS = (
    *("_get_per_token_logps_and_entropies", "_generate_single_turn"),
    *("compute_loss", "_compute_loss", "compute_ref_log_probs"),
)
"""Methods of TRL that call the seams; a subclass with its own may call others."""

CAUSAL_LOSS = "ForCausalLM"
_READ = "measure_only reads Hugging Face's generate or vLLM"

Covered = dict[str, tuple[object, str]]
"""What the trainer holds, by its path -> the value that is covered, or that which it has where it
is missing, and what to do about another."""

_NOT_TRAINING: Covered = {"is_in_train": (False, "call attach() before train()")}
_ALL_TRAINERS: Covered = {
    **_NOT_TRAINING,
    "args.fp16": (False, "autocast is not covered: load the model in bfloat16 and set fp16=False"),
    "args.use_liger_kernel": (False, "its kernels replace the patched ones: set it to False"),
    "args.cast_lm_head_to_fp32": (False, "the LM head already sums in fp32: set it to False"),
    "args.torch_compile": (False, "the patched forward is not compiled: set it to False"),
    "args.use_vllm": (False, "set it to False, or measure_only=True, or rollout='vllm'"),
    "args.vllm_structured_outputs_regex": (None, "the engine has no such constraint: set None"),
    "args.neftune_noise_alpha": (None, "it adds noise to training only: set it to None"),
    "model_init": (None, "it makes another model when training begins: give model= alone"),
    "model.peft_config": (None, "train the whole model, or merge_and_unload() the adapters"),
    "is_fsdp_enabled": (False, "use DeepSpeed's ZeRO, or the recipes of rl_consistency with FSDP2"),
    "aux_loss_enabled": (False, "it is no sum over sequences: set router_aux_loss_coef=0.0"),
}
_PLAIN: Covered = {
    "compute_metrics": (None, "it needs logits, which a call with labels does not make: drop it"),
    "model._loss_function": (None, "give the trainer compute_loss_func= in place of it"),
    "model.loss_type": (CAUSAL_LOSS, f"a call with labels gives {CAUSAL_LOSS}: set it to that"),
}
_DPO: Covered = {
    "args.precompute_ref_log_probs": (False, "a stock model has computed them: set it to False"),
    "use_weighting": (False, "it needs a sum over the vocabulary that no order covers: drop it"),
}
_STOPS = {"stop_strings": "stop", "stop": "stop", "stop_token_ids": "stop_token_ids"}
"""Keys of `generation_kwargs`, of transformers' and vLLM's backend -> fields of SamplingParams."""
_ROLLOUTS: Covered = {
    "repetition_penalty": (1.0, "the engine has none, set it to 1.0"),
    "rollout_func": (None, "it generates by itself: leave it out, the engine generates"),
}
_BY_VLLM: Covered = {
    "args.use_vllm": (True, "rollout='vllm' is the trainer's own vLLM: set it to True"),
    "args.vllm_tensor_parallel_size": (1, "sums over ranks have no order: set it to 1"),
}
_VLLM_KEYS = ("stop", "stop_token_ids", "ignore_eos", "seed", "skip_special_tokens")
"""Keys of `generation_kwargs` that leave vLLM's distribution as it is."""
_MEASURED: Covered = {
    **_NOT_TRAINING,
    "args.use_transformers_continuous_batching": (False, f"{_READ}: set it to False"),
    "rollout_func": (None, f"{_READ}: leave it out"),
}

_UNREAD = (
    *("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),  # the trainer's own hold
    *("max_length", "max_new_tokens", "max_cache_len", "num_return_sequences", "low_memory"),
    *("use_cache", "cache_implementation", "cache_config", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config", "early_stopping"),
    *("length_penalty", "return_dict_in_generate", "is_assistant", "prompt_lookup_num_tokens"),
)
_UNREAD_KINDS = ("_", "output_", "assistant_", "num_assistant_")
"""Fields of a generation_config, and beginnings of their names, that change no token here."""
_IDLE = {
    **{"num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1, "typical_p": 1},
    **{"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "min_length": 0},
    **{"min_new_tokens": 0, "no_repeat_ngram_size": 0, "diversity_penalty": 0},
    **{"epsilon_cutoff": 0, "eta_cutoff": 0},
}
"""Other fields -> the value that changes no token."""


def trainer_kind(trainer: object) -> Kind:
    """Which of the covered classes the trainer is of, or made from.

    TypeError for another class; ImportError for a version of TRL that was not read.
    """
    for cls in type(trainer).__mro__:
        of_trl = cls.__module__.partition(".")[0] == "trl"
        covered = cls.__name__ in get_args(Kind) and not cls.__module__.startswith("trl.exp")
        if of_trl and covered:
            _check_seams(trainer, cls)
            return cls.__name__  # pyright: ignore[reportReturnType]
        if cls is transformers.Trainer:
            return "Trainer"
        if of_trl:
            break
    raise TypeError(
        f"attach() got a {type(trainer).__module__}.{type(trainer).__qualname__}; it covers "
        f"{', '.join(get_args(Kind))}. For a loop of your own call rl_consistency.patch, "
        "RolloutEngine and token_logprobs."
    )


def _check_seams(trainer: object, covered: type) -> None:
    if (found := metadata.version("trl")) not in TRL_VERSIONS:
        raise ImportError(
            f"trl is {found}, and attach() covers {TRL_VERSIONS}: install one of these "
            f"(pip install 'trl{TRL_VERSIONS}')."
        )
    cls = type(trainer)
    for name in _SEAM_METHODS:
        of_class = getattr(cls, name, None) is not getattr(covered, name, None)
        if of_class or name in vars(trainer):
            raise TypeError(
                f"{cls.__qualname__} has a {name} of its own, which may pass by what attach() "
                f"puts in; remove it, or use {covered.__name__} itself."
            )


def check_trainer(trainer: Any, kind: Kind, *, measure_only: bool, by_vllm: bool) -> None:
    """ValueError naming an argument that is not covered, and what to do."""
    faults = _uncovered(trainer, _MEASURED) if measure_only else _faults(trainer, kind, by_vllm)
    for fault in faults:
        raise ValueError(f"attach() cannot cover this {kind}: {fault}.")


def check_same_model(trainer: Any, policy: object) -> None:
    """ValueError if the trainer has another model than the one that was attached."""
    if trainer.model is not policy:
        raise ValueError(
            "trainer.model is another model than at attach(); do not swap it in a callback, "
            "or detach() first and attach() again."
        )


class SameModel(TrainerCallback):
    """`check_same_model` at each step, before its update too, and at each step of an evaluation."""

    def __init__(self, trainer: Any, policy: object) -> None:
        self._trainer, self._policy = trainer, policy

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_same_model(self._trainer, self._policy)

    on_pre_optimizer_step = on_step_end = on_prediction_step = on_step_begin


def check_engine_options(options: dict[str, Any]) -> None:
    """TypeError for an option that RolloutEngine does not take, or that the trainer gives it."""
    given_by_us = {"model", "eos_token_id", "tokenizer"}
    allowed = inspect.signature(RolloutEngine).parameters.keys() - given_by_us
    if unknown := sorted(options.keys() - allowed):
        raise TypeError(
            f"attach() got {', '.join(unknown)}; allowed for the engine: "
            f"{', '.join(sorted(allowed))}."
        )


def check_gradient_options(trainer: Any, every: object, seconds: object) -> None:
    """ValueError for a value that no gradient check of this trainer can have."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        raise ValueError(f"check_gradients_every={every!r}; give a number of steps, 0 for never.")
    smooths = getattr(trainer.args, "label_smoothing_factor", 0.0)
    if every and (smooths or getattr(trainer, "compute_loss_func", None) is not None):
        raise ValueError(
            "check_gradients_every reads scores of calls with labels, which label_smoothing_factor "
            "and compute_loss_func leave out; set it to 0."
        )
    if seconds is not None and (not isinstance(seconds, int | float) or not seconds > 0):
        raise ValueError(f"check_gradients_seconds={seconds!r}; give seconds above 0, or None.")
    if seconds is not None and not every:
        raise ValueError(
            "check_gradients_seconds limits a check that check_gradients_every=0 never makes; set "
            "that to a number of steps."
        )


def stops_of(trainer: Any) -> dict[str, Any]:
    """What ends a completion beside eos, as `SamplingParams` takes it; ValueError for a wrong value
    or the same thing by two names."""
    found: dict[str, Any] = {}
    for key, value in (trainer.args.generation_kwargs or {}).items():
        if key not in _STOPS:  # one of vLLM's
            continue
        if (name := _STOPS[key]) in found:
            raise ValueError("generation_kwargs has stop_strings and stop; give one of them.")
        if value is not None:
            found[name] = (value,) if isinstance(value, str | int) else tuple(value)
    return found


def setting(config: Any, path: str) -> Any:
    """What a config, of objects or mappings, has at a dotted path; None where it is missing."""
    for name in path.split("."):
        config = config.get(name) if hasattr(config, "get") else getattr(config, name, None)
    return config


def _uncovered(trainer: Any, covered: Covered) -> Iterator[str]:
    for path, (allowed, remedy) in covered.items():
        owner, _, name = path.rpartition(".")
        value = getattr(getattr(trainer, owner) if owner else trainer, name, allowed)
        if value != allowed:
            yield f"{path.removeprefix('args.')}={value!r}; {remedy}"


def _faults(trainer: Any, kind: Kind, by_vllm: bool) -> Iterator[str]:
    yield from _uncovered(trainer, _ALL_TRAINERS | (_BY_VLLM if by_vllm else {}))
    if (count := trainer.args.n_gpu) > 1:
        yield f"{count} GPUs in one process (DataParallel); start it by accelerate launch"
    found = {parameter.dtype for parameter in trainer.model.parameters()}
    if is_bf16(trainer):
        remedy = "load the model in bfloat16 and set bf16=False"
        if trainer.is_deepspeed_enabled:
            yield f"bf16=True with DeepSpeed; {remedy}"
        if trainer.optimizer is not None and torch.float32 in found:
            yield f"bf16=True with an optimizer of your own, which knows no masters; {remedy}"
    elif (precision := trainer.accelerator.mixed_precision) != "no":
        yield f"mixed_precision={precision!r} (accelerate); set it to bf16 or no"
    if torch.float16 in found:
        yield "the model is in float16, whose gradients overflow; load it in bfloat16"
    if kind in ("Trainer", "DPOTrainer"):
        yield from _uncovered(trainer, _PLAIN if kind == "Trainer" else _DPO)
    if kind in ("GRPOTrainer", "RLOOTrainer"):
        yield from _rollout_faults(trainer, _VLLM_KEYS if by_vllm else _STOPS.keys())


def _rollout_faults(trainer: Any, keys: Collection[str]) -> Iterator[str]:
    args, tokenizer = trainer.args, trainer.processing_class
    if not trainer.temperature > 0:
        yield f"temperature={trainer.temperature!r}; greedy completions are equal, set it above 0"
    if trainer.max_completion_length is None:
        yield "max_completion_length=None; the engine needs a number of tokens"
    elif (context := trainer.model.config.max_position_embeddings) <= trainer.max_completion_length:
        given = f"max_completion_length={trainer.max_completion_length}"
        yield f"{given}; with a prompt it exceeds the model's context of {context} tokens, lower it"
    config = trainer.model.generation_config
    for name, value in (config.to_diff_dict() if config is not None else {}).items():
        idle = value in (None, False, [], {}) or value == _IDLE.get(name)
        if not idle and name not in _UNREAD and not name.startswith(_UNREAD_KINDS):
            rule = f"model.generation_config.{name}={value!r}"
            yield f"{rule}; the engine has no such rule, set it to None"
    if getattr(tokenizer, "eos_token_id", None) is None:
        yield "the tokenizer (processing_class) has no eos_token, so no sample would end; set one"
    yield from _uncovered(trainer, _ROLLOUTS)
    if others := sorted((args.generation_kwargs or {}).keys() - set(keys)):
        known = ", ".join(keys)
        yield f"generation_kwargs={', '.join(others)}; the engine takes {known} only"
    truncates = bool(trainer.top_k) or (trainer.top_p or 1) < 1 or bool(trainer.min_p)
    passes = args.steps_per_generation * trainer.num_iterations
    each = args.gradient_accumulation_steps
    found = f"top_k={trainer.top_k}, top_p={trainer.top_p}, min_p={trainer.min_p}"
    if truncates and (trainer.beta != 0 or each % passes):
        yield (
            f"{found} with beta={trainer.beta}, and {passes} passes over a rollout "
            f"(steps_per_generation x num_iterations) for {each} of an update: a sampled token may "
            "leave the support of other weights. Sample without truncation, or set beta=0, "
            "num_iterations=1 and gradient_accumulation_steps to a multiple of steps_per_generation"
        )
    if truncates and getattr(trainer, "tools", None):
        yield (
            f"{found} with tools: what a tool wrote is scored too, and may lie outside the "
            "support. Sample without truncation"
        )
