"""The policy: a Hugging Face causal language model, loaded or built, before anything is patched."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from rl_consistency.models.families import FAMILIES, mixins
from rl_consistency.models.moe import CanonicalMoEBlock
from rl_consistency.rollout.tokenizer import eos_token_ids, require_fit
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.config.sections import BuildSection, PolicySection, TokenizerSection
from rl_consistency.trainers.data.foreign_files import explained
from rl_consistency.trainers.data.tokenizer import byte_tokenizer, load_tokenizer
from rl_consistency.trainers.hub import model_directory
from rl_consistency.trainers.policy_files import (
    PolicyError,
    check_config_file,
    check_tensors,
    check_weights,
    refuse_quantised,
)

VOCABULARY_MULTIPLE = 16
"""A built policy's vocabulary is padded to a multiple of this."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_NO_RULES = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "use_cache"),
    *("transformers_version", "_from_model_config", "max_length"),
)
"""Fields of a generation config that are read, or draw no token."""
_NOT_LOADED = "cannot be loaded as a causal language model"


def load_policy(
    policy: PolicySection, tokenizer: TokenizerSection, *, seed: int, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a recipe, on `device` in `policy.dtype`, and its tokenizer.

    A built model's weights are a function of its sizes and `seed`. The global random state stays as
    it was. Only a name of the hub downloads anything, and code that comes with a model is never
    run. PolicyError or ValueError where model or tokenizer cannot be loaded.
    """
    source = None if policy.source is None else model_directory(policy.source)[0]
    if source is not None:
        read_config(source)  # first: the tokenizer reads the same file, and would be blamed
    if tokenizer.kind == "byte":
        loaded = byte_tokenizer()
    elif source is None:
        raise PolicyError("tokenizer.kind auto needs policy.path: use byte")
    else:
        loaded = load_tokenizer(source)
    dtype = DTYPES[policy.dtype]
    if policy.build is not None:
        model = build_model(policy.build, loaded, seed=seed, dtype=dtype)
    else:
        assert source is not None
        model = read_model(source, dtype)
    try:
        require_fit(model, loaded)
        eos_token_ids(model, loaded)
    except ValueError as error:
        raise PolicyError(f"{error}; tokenizer.kind auto takes the model's own") from error
    what = f"{source or 'policy.build'}: a checkpoint could not hold its config.json"
    with TemporaryDirectory() as place, explained(PolicyError, what):
        model.config.save_pretrained(place)
    if policy.gradient_checkpointing:
        new = "activation_checkpointing_enable"  # older transformers know the old name alone
        name = new if hasattr(model, new) else "gradient_checkpointing_enable"
        getattr(model, name)({"use_reentrant": False})
    model.to(torch.device(device))  # type: ignore[arg-type]
    return model, loaded


def build_model(
    build: BuildSection, tokenizer: Any, *, seed: int, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model of these sizes with fresh weights, drawn in float32 and then rounded to `dtype`."""
    family = FAMILIES[build.architecture]
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    sizes = build.model_dump(exclude={"architecture", "rope_theta", "head_dim", "experts"})
    if build.experts is not None:
        count = "num_local_experts" if build.architecture == "mixtral" else "num_experts"
        sizes |= {count: build.experts.count, "num_experts_per_tok": build.experts.per_token}
    if build.architecture == "qwen3_moe":
        sizes |= {"moe_intermediate_size": build.intermediate_size, "norm_topk_prob": True}
    if build.architecture == "mistral":
        sizes["sliding_window"] = None
    config = config_class(
        **sizes,
        head_dim=build.head_dim or build.hidden_size // build.num_attention_heads,
        rope_parameters={"rope_type": "default", "rope_theta": build.rope_theta},
        vocab_size=-(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    too_large = "policy.build: the model cannot be made on this machine: choose smaller sizes"
    with explained(PolicyError, too_large), torch.random.fork_rng(devices=[]):
        # The CPU draws for every device; torch.manual_seed would seed the GPUs too.
        torch.default_generator.manual_seed(seed)
        model = model_class(config).to(dtype)
        _require_finite(model, "policy.build")
    return model


def check_policy(config: RunConfig, model: PreTrainedModel) -> None:
    """PolicyError where a recipe has a stop token that is none of the model's, or balances the load
    of experts in a model without a sparse layer."""
    vocab_size, coefficient = model.config.vocab_size, config.algorithm.balance_coefficient
    if outside := [token for token in config.sampling.stop_token_ids if token >= vocab_size]:
        problem = f"{outside[0]} is outside the policy's vocabulary of {vocab_size}"
        raise PolicyError(f"rollout.sampling.stop_token_ids: {problem}")
    classes = mixins(model.config)
    if coefficient and all(classes.get(type(m)) is not CanonicalMoEBlock for m in model.modules()):
        problem = (
            f"this {model.config.model_type} policy has no sparse layer, no experts to balance"
        )
        raise PolicyError(f"algorithm.balance_coefficient {coefficient}: {problem}: set it to 0")


def unread_sampling(model: PreTrainedModel) -> str | None:
    """What is said of a generation config's rules, which `rollout.sampling` stands in place of."""
    config = model.generation_config
    given = config.to_diff_dict().items() if config is not None else ()
    rules = [f"{n}={v!r}" for n, v in given if n not in _NO_RULES and v not in (None, False)]
    told = f"not read: generation_config.json's {', '.join(rules)}; see rollout.sampling"
    return told if rules else None


def read_config(directory: Path) -> PreTrainedConfig:
    """The configuration of a model directory; PolicyError where there is none that can be used."""
    check_config_file(directory)
    file = directory / "config.json"
    with explained(PolicyError, f"{file} {_NOT_LOADED}"):
        return AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )


def read_model(
    source: Path, dtype: torch.dtype, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """The model of a directory, on the CPU; `kind` is the auto class that knows its head.

    PolicyError where its weights are damaged, do not fit its configuration, or are not finite.
    """
    with ExitStack() as stack:
        stack.enter_context(explained(PolicyError, f"{source}, by its config.json, {_NOT_LOADED}"))
        if logging.is_progress_bar_enabled():  # before the first line of a run
            logging.disable_progress_bar()
            stack.callback(logging.enable_progress_bar)
        try:
            files = check_weights(source)
            loaded: Any = kind.from_pretrained(
                str(source),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, with the tensor's name
            )
        except SafetensorError as error:
            problem = f"its weights are truncated or damaged ({error}): copy or download them again"
            raise PolicyError(f"{source}: {problem}") from error
    model, report = loaded
    refuse_quantised(model.config.to_dict(), str(source))
    # Hugging Face would fill a missing tensor with random numbers and go on.
    for problem in ("missing", "mismatched", "unexpected"):
        if keys := sorted(map(str, report.get(f"{problem}_keys") or ())):
            found = f"{len(keys)} {problem} keys, the first is {keys[0]}"
            raise PolicyError(f"{source}: its weights do not fit its config.json: {found}")
    check_tensors(files, model)
    made, named = type(model).__name__, model.config.architectures
    if named and made not in named:
        problem = f"config.json's architectures are {named}, its model_type makes a {made}"
        raise PolicyError(f"{source}: {problem}: mend one of them")
    _require_finite(model, f"{source}/config.json")
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise PolicyError(f"{source}: {name} holds NaN or infinity: its training diverged")
    return model


def _require_finite(model: PreTrainedModel, source: str) -> None:
    """PolicyError where a setting of its config makes numbers NaN or infinite under any weights."""
    config: Any = model.config
    if (eps := getattr(config, "rms_norm_eps", 0.0)) < 0:
        raise PolicyError(f"{source}: rms_norm_eps {eps} is negative; give 0 or more")
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            frequencies: Any = module.inv_freq
            scaled = frequencies * getattr(module, "attention_scaling", 1.0)
            if not scaled.isfinite().all():
                given = f"rope_parameters {config.rope_parameters}"
                raise PolicyError(f"{source}: {given} give angles that are not finite")
