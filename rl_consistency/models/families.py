"""Which Hugging Face module becomes which of ours, and which configurations are covered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import Linear
from torch.nn.modules.sparse import Embedding
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_consistency.kernels.attention.op import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from rl_consistency.kernels.core.operand import DTYPES
from rl_consistency.models import decoder, installed_code, modules, moe
from rl_consistency.models.installed_code import EVERY, Difference, described, home, origin
from rl_consistency.models.modules import (
    STOCK_CLASS,
    CanonicalEmbedding,
    CanonicalLinear,
    CanonicalModule,
)
from rl_consistency.models.sharding import is_shard, unsharded_class
from rl_consistency.numerics.strict import OPS, ROUTED

SPARSE = {"qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe", "mixtral": "Mixtral"}
"""Mixture-of-experts families: model_type -> class-name prefix in transformers."""

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", **SPARSE}
"""model_type -> class-name prefix in transformers."""

HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Families that normalise queries and keys by head; OLMoE does so over whole projections."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE variants whose frequencies do not change with the length of a sequence."""

LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Hugging Face activation name -> activation of the `glu` op."""

_PARTS = {
    "RMSNorm": modules.CanonicalRMSNorm,
    "MLP": modules.CanonicalMLP,
    "Attention": modules.CanonicalAttention,
    "DecoderLayer": decoder.CanonicalDecoderLayer,
    "RotaryEmbedding": modules.CanonicalRotaryEmbedding,
    "Model": decoder.CanonicalBaseModel,
    "ForCausalLM": decoder.CanonicalCausalLM,
}
_SPARSE_PARTS = {
    "TopKRouter": moe.CanonicalRouter,
    "Experts": moe.CanonicalExperts,
    "SparseMoeBlock": moe.CanonicalMoEBlock,
}

_ZERO3_LINEAR = "deepspeed.runtime.zero.linear"
"""The module of ZeRO-3's `torch.nn.functional.linear`, which saves memory and computes the same."""


class UnsupportedModelError(ValueError):
    """A model, module or setting that no canonical order covers."""


def modeling(config: PreTrainedConfig) -> Any:
    """The transformers modeling module of a family; UnsupportedModelError for any other."""
    family = config.model_type
    if family not in FAMILIES:
        covered = ", ".join(FAMILIES)
        raise UnsupportedModelError(f"architecture {family!r} is not covered; covered: {covered}.")
    return import_module(f"transformers.models.{family}.modeling_{family}")


def _parts(config: PreTrainedConfig) -> dict[str, type[CanonicalModule]]:
    """Class name without the family prefix -> canonical mixin, for one family."""
    parts = _PARTS | (_SPARSE_PARTS if config.model_type in SPARSE else {})
    if config.model_type in ("olmoe", "mixtral"):  # which have no dense layer
        del parts["MLP"]
    return parts


def mixins(config: PreTrainedConfig) -> dict[type[nn.Module], type[CanonicalModule]]:
    """Exact module class -> canonical mixin, for one family."""
    source, prefix = modeling(config), FAMILIES[config.model_type]
    table = {getattr(source, prefix + part): mixin for part, mixin in _parts(config).items()}
    # torch's own, whatever `torch.nn` calls so now.
    return {**table, Linear: CanonicalLinear, Embedding: CanonicalEmbedding}


def ops_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """The ops of `numerics.strict.OPS` that a family's forward pass can run on its stock path."""
    return OPS if config.model_type in SPARSE else tuple(op for op in OPS if op not in ROUTED)


def module_kinds() -> dict[str, type[CanonicalModule]]:
    """Module class name without the family prefix -> canonical mixin."""
    return {"Linear": CanonicalLinear, "Embedding": CanonicalEmbedding, **_PARTS, **_SPARSE_PARTS}


@cache
def canonical_class(mixin: type[CanonicalModule], stock: type[nn.Module]) -> type[nn.Module]:
    """`stock` with `mixin` in front; keeps the name, which save_pretrained writes to the config.

    Modules get it when they are patched; making one of it is a TypeError.
    """

    def refuse(self: nn.Module, *_: Any, **__: Any) -> None:
        raise TypeError(
            f"this {stock.__name__} is the class of a patched module; build others with that of "
            f"transformers or torch, {stock.__module__}.{stock.__name__}."
        )

    own = {"__module__": mixin.__module__, "__init__": refuse, STOCK_CLASS: stock}
    return type(stock.__name__, (mixin, stock), own)


def stock_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `canonical_class` was given for this one, which may be sharded since; any
    other is its own."""
    cls = unsharded_class(cls)
    return vars(cls).get(STOCK_CLASS, cls)


WITHOUT_WINDOW = ("llama", "olmoe")
"""Families whose forward reads no window; OLMoE's may have none, see `_routing_problems`."""


def window_of(config: PreTrainedConfig, attention: nn.Module) -> int | None:
    """Sliding window of one attention layer, or None."""
    if config.model_type in WITHOUT_WINDOW:
        return None
    holder = config if config.model_type in ("mistral", "mixtral") else attention
    return getattr(holder, "sliding_window", None)


SIZES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"),
)
"""Settings that are positive where a family has them."""


def check_config(config: PreTrainedConfig) -> None:
    """UnsupportedModelError naming every setting whose arithmetic is not covered."""
    modeling(config)
    problems = [*_problems(config)]
    if config.model_type in SPARSE:
        problems += _routing_problems(config)
    if problems:
        raise UnsupportedModelError(f"{config.model_type} not covered: {'; '.join(problems)}.")


def _problems(config: Any) -> Iterator[str]:
    """Settings of any family's configuration that are not covered, with what is."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        yield f"rope_type {rope!r} (covered: {', '.join(ROPE_TYPES)})"
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if other := ", ".join(sorted(set(types or ()) - set(LAYER_TYPES))):
        yield f"layer types {other} (covered: {', '.join(LAYER_TYPES)})"
    for name in SIZES:
        if (size := getattr(config, name, 1)) < 1:
            yield f"{name}={size} (covered: 1 or more)"
    if types is not None and len(types) < layers:
        yield f"{len(types)} layer_types for num_hidden_layers={layers} (give each one)"
    window = getattr(config, "sliding_window", None)
    if config.model_type not in WITHOUT_WINDOW and window is not None and window < 1:
        yield f"sliding_window={window} (covered: 1 or more, or null)"
    heads = max(config.num_attention_heads, 1)
    if (kv_heads := config.num_key_value_heads) > 0 and heads % kv_heads:
        found = f"num_attention_heads={heads} for num_key_value_heads={kv_heads}"
        yield f"{found} (covered: a multiple of it)"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim % HEAD_DIM_MULTIPLE or not 0 < head_dim <= MAX_HEAD_DIM:
        covered = f"multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"
        yield f"head_dim {head_dim} (covered: {covered})"
    if getattr(config, "hidden_act", "silu") not in ACTIVATIONS:
        yield f"hidden_act {config.hidden_act!r} (covered: {', '.join(ACTIVATIONS)})"
    if (eps := getattr(config, "rms_norm_eps", 1e-6)) <= 0:
        yield f"rms_norm_eps={eps}, which makes NaN of rows of zeros (covered: above 0)"
    if not getattr(config, "is_causal", True):
        yield "is_causal=False, which makes attention bidirectional (covered: True)"
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if rate := getattr(config, name, 0.0):
            yield f"active dropout {name}={rate} (set it to 0.0)"
    for name in ("output_hidden_states", "output_attentions"):
        if asked := getattr(config, name, False):
            outside = "set it to False; inside session.stock() the stock model returns them"
            yield f"{name}={asked}, which the patched forward cannot return ({outside})"
    if getattr(config, "quantization_config", None):
        yield "quantization_config (load the model unquantized)"


def _routing_problems(config: Any) -> Iterator[str]:
    """Settings of a sparse family's configuration that are not covered, with what to do."""
    if jitter := getattr(config, "router_jitter_noise", 0.0):
        yield f"router_jitter_noise={jitter} (set it to 0.0)"
    if (clip := getattr(config, "clip_qkv", None)) is not None:
        yield f"clip_qkv={clip} (covered: None)"
    if getattr(config, "output_router_logits", False):
        yield (
            "output_router_logits=True, whose auxiliary loss is no sum over sequences: every cut "
            "of the batch changes it (set it to False; trainers know algorithm.balance_coefficient)"
        )
    if config.model_type == "olmoe" and (window := getattr(config, "sliding_window", None)):
        yield f"sliding_window={window}, which some attention functions ignore"
    if (step := getattr(config, "decoder_sparse_step", 1)) < 1:
        yield f"decoder_sparse_step={step} (covered: 1 or more)"
    if getattr(config, "mlp_only_layers", ()) is None:
        yield "mlp_only_layers=None (give the list of dense layers, which may be empty)"
    experts, chosen = num_experts(config), config.num_experts_per_tok
    # Without experts a Qwen3-MoE has dense layers alone; the others have no other layers.
    dense = not experts and config.model_type == "qwen3_moe"
    if not dense and not 1 <= chosen <= experts:
        yield f"num_experts_per_tok={chosen} of {experts} experts"


def num_experts(config: Any) -> int:
    """Experts of a sparse layer; Mixtral has a name of its own for it."""
    return config.num_local_experts if config.model_type == "mixtral" else config.num_experts


def normalizes(config: Any) -> bool:
    """Whether routers divide the chosen weights by their sum; Mixtral's always do, unasked."""
    return config.model_type == "mixtral" or config.norm_topk_prob


_OF_FUNCTIONAL = ("linear", "silu", "gelu", "softmax", "embedding", "one_hot", "grouped_mm")
_OF_TORCH = ("matmul", "bmm", "mm", "rsqrt", "pow", "tanh", "topk", "cat")
_TORCH: dict[str, tuple[Any, Any]] = {
    **{name: (F, getattr(F, name)) for name in _OF_FUNCTIONAL},
    "scaled_dot_product_attention": (F, F.scaled_dot_product_attention),
    **{name: (torch, getattr(torch, name)) for name in _OF_TORCH},
}
"""Functions of torch that stock forwards call: their module, and what they were at import."""
_METHODS = {name: f for name, f in vars(torch.Tensor).items() if hasattr(torch._C.TensorBase, name)}
"""Methods in Python that hide a tensor's own, as they were at import."""

_STANDS_ON: dict[str, tuple[str, ...]] = {
    "torch.nn.functional": _OF_FUNCTIONAL,
    "torch.nn.modules.module": ("Module",),
    "torch.nn.modules.linear": ("Linear",),
    "torch.nn.modules.sparse": ("Embedding",),
    "torch.nn.modules.container": ("ModuleList",),
    "torch.nn.modules.activation": ("SiLU", "GELU"),
    "transformers.activations": (
        *("SiLUActivation", "GELUActivation", "GELUTanh", "NewGELUActivation"),
        EVERY,
    ),
    "transformers.modeling_layers": ("GradientCheckpointingLayer",),
    "transformers.modeling_utils": ("AttentionInterface",),
    "transformers.masking_utils": ("AttentionMaskInterface", EVERY),
    "transformers.integrations.moe": ("ExpertsInterface", EVERY),
    "transformers.utils.generic": ("GeneralInterface", EVERY),
    "transformers.modeling_rope_utils": (EVERY,),
    "transformers.utils.output_capturing": (EVERY,),
}
"""Module -> what the forwards of all families call of it; see `installed_code.differences`."""


def stands_on(config: PreTrainedConfig) -> dict[str, tuple[str, ...]]:
    """Module -> functions and classes that a stock forward is made of and calls. An entry here is
    compared by `patch`, by each rollout and by each training forward, and `report` lists it."""
    source, prefix = modeling(config), FAMILIES[config.model_type]
    parts = (*(prefix + part for part in _parts(config)), f"{prefix}PreTrainedModel")
    chosen = map(origin, _registered(config).values())
    called = dict.fromkeys(filter(None, chosen), (EVERY,))
    return {**called, **_STANDS_ON, source.__name__: (*parts, EVERY)}


def is_listed(cls: type, places: dict[str, tuple[str, ...]]) -> bool:
    """Whether a class is one of these places, whose code is compared."""
    names = places.get(cls.__module__, ())
    return cls.__name__ in names and getattr(sys.modules[cls.__module__], cls.__name__) is cls


def stock_rotary(config: PreTrainedConfig) -> Callable[..., Any]:
    """The family's function that turns queries and keys."""
    function = modeling(config).apply_rotary_pos_emb
    return getattr(function, "forward", function)  # Hugging Face's kernels makes modules of some


def _registered(config: PreTrainedConfig) -> dict[str, Any]:
    """The functions that a config chooses by name, by what they are called."""
    source, attention = modeling(config), config._attn_implementation
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    own = source.eager_attention_forward
    found = {
        f"attn implementation {attention!r}": _entry(ALL_ATTENTION_FUNCTIONS, attention, own),
        f"the mask of attention {attention!r}": _entry(
            ALL_MASK_ATTENTION_FUNCTIONS, attention, None
        ),
        f"rope_type {rope!r}": ROPE_INIT_FUNCTIONS.get(rope),
    }
    if config.model_type in SPARSE:
        experts, cls = config._experts_implementation, f"{SPARSE[config.model_type]}Experts"
        found[f"experts implementation {experts!r}"] = _entry(ALL_EXPERTS_FUNCTIONS, experts, None)
        if f"{cls}._apply_gate" not in installed_code.installed(source.__name__).functions:
            gate = getattr(getattr(source, cls), "_apply_gate", None)
            found[f"{source.__name__}.{cls}._apply_gate"] = gate
    return {place: function for place, function in found.items() if function is not None}


def _entry(table: Any, name: str | None, eager: Any) -> Any:
    """What a table of transformers holds under a name, or the name itself where it holds nothing.
    It is read without the table's methods, which are compared."""
    known = {**type(table)._global_mapping, **table._local_mapping}
    return known.get(name, eager if name in (None, "eager") else name)


class CodeWatch:
    """The code that a model's forward stands on, to be read in some microseconds."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._watch = installed_code.Watch(stands_on(config))

    def read(self, config: PreTrainedConfig) -> tuple[object, ...]:
        """What is called now; equal for equal states."""
        torchs = (getattr(module, function) for function, (module, _) in _TORCH.items())
        methods = vars(torch.Tensor).values()
        return *torchs, *methods, *_registered(config).values(), *self._watch.read()


_SOUND: dict[tuple[Any, ...], tuple[CodeWatch, tuple[object, ...]]] = {}
"""What a forward stands on -> its watch, and the last state in which nothing differed."""


def check_code(config: PreTrainedConfig) -> None:
    """UnsupportedModelError naming a class or function of `stands_on` that is not what the
    installed files say."""
    check_implementations(config)
    key = tuple(stands_on(config).items())
    watch, sound = _SOUND.get(key, (None, None))
    if watch is not None and watch.read(config) == sound:
        return
    for different in _differences(config):
        raise UnsupportedModelError(
            f"{different}; the canonical ops would run in its place. Undo that (was it a kernel "
            "library, or an edit?), and build the model after it."
        )
    watch = CodeWatch(config)
    _SOUND[key] = watch, watch.read(config)


def code_watch(config: PreTrainedConfig) -> CodeWatch:
    """The watch of a config whose code was found to be sound; a new one for any other."""
    found = _SOUND.get(tuple(stands_on(config).items()))
    return CodeWatch(config) if found is None else found[0]


def _differences(config: PreTrainedConfig) -> Iterator[Difference]:
    in_python = installed_code.installed(F.__name__).functions  # compared below
    for name, (module, right) in _TORCH.items():
        now = getattr(module, name)
        is_own = now is right and installed_code.is_builtin(now, name)
        is_own = is_own or (module is F and name in in_python) or _is_linear_of_zero_3(now)
        if not is_own:
            yield Difference(f"{module.__name__}.{name}", described(now))
    for name, method in vars(torch.Tensor).items():
        in_python = not isinstance(method, FunctionType) or home(method).startswith("torch.")
        is_own = method is _METHODS.get(name) and in_python
        if hasattr(torch._C.TensorBase, name) and not is_own:
            yield Difference(f"torch.Tensor.{name}", described(method))
    for module, names in stands_on(config).items():
        yield from installed_code.differences(module, names)


def _is_linear_of_zero_3(function: Any) -> bool:
    name = "zero3_linear_wrap"
    module = sys.modules.get(_ZERO3_LINEAR)
    own = module is not None and function is getattr(module, name)
    return own and not [*installed_code.differences(_ZERO3_LINEAR, (name,))]


def check_implementations(config: PreTrainedConfig) -> None:
    """UnsupportedModelError for a function that the config chooses by name and that is not plainly
    transformers' own; a part may take them from a config of its own."""
    known = (modeling(config).__name__, *_STANDS_ON)
    for place, function in _registered(config).items():
        of = origin(function)
        if of not in known and not of.startswith("transformers.integrations."):
            found = "not registered" if isinstance(function, str) else described(function)
            raise UnsupportedModelError(
                f"{place} is {found}; the canonical order would run in its "
                "place. Undo what registered it, or call model.set_attn_implementation('sdpa') or "
                "model.set_experts_implementation('eager')."
            )


def check_model(model: Any, *, sharded: bool = False) -> None:
    """All checks of a model but the comparison with what its config makes, see `inventory`;
    `sharded`: its parameters may be shards."""
    check_config(model.config)
    check_code(model.config)
    _check_plans(model)
    check_parameters(model, sharded=sharded)


def check_head(model: nn.Module) -> None:
    """UnsupportedModelError for a bare decoder, a wrapper, or the head of another task."""
    config: Any = model.config
    expected = getattr(modeling(config), FAMILIES[config.model_type] + "ForCausalLM")
    if type(model) is not expected:
        raise UnsupportedModelError(
            f"the model is a {type(model).__name__}; patch takes the {expected.__name__} itself, "
            "with its LM head and without wrappers."
        )


def _check_plans(model: nn.Module) -> None:
    """UnsupportedModelError for experts or other parts that a plan of transformers has split."""
    planned = (getattr(model, "_tp_size", None) or 1) > 1
    for name, module in model.named_modules():
        own = vars(module)
        if planned or own.get("_is_expert_parallel") or own.get("_hf_tp_plan"):
            raise UnsupportedModelError(
                f"module {name or 'root'} is split over ranks by a plan of transformers; expert "
                "parallelism and tensor parallelism are not covered. Load the model without "
                "tp_plan and distributed_config, and shard it by training.strategy."
            )


def check_parameters(model: nn.Module, *, sharded: bool = False) -> None:
    """UnsupportedModelError naming a parameter that is no plain one (quantized, or a shard unless
    `sharded`), that has no values, whose dtype is not the first's, or has no order."""
    first: torch.dtype | None = None
    for name, parameter in model.named_parameters():
        if sharded and is_shard(parameter):
            continue
        if type(parameter) is not nn.Parameter:
            raise UnsupportedModelError(
                f"parameter {name} is a {type(parameter).__name__}; it has to be a plain "
                "nn.Parameter: load the model without quantization, and patch it before sharding."
            )
        if parameter.is_meta:
            raise UnsupportedModelError(
                f"parameter {name} is on the meta device, which holds no values; load the weights "
                "before patching (from_pretrained, or to_empty and load_state_dict)."
            )
        if parameter.layout != torch.strided or parameter.is_neg() or parameter.is_conj():
            kind = "is sparse" if parameter.layout != torch.strided else "is a lazily negated view"
            raise UnsupportedModelError(
                f"parameter {name} {kind}, whose memory does not hold its values; make it plain: "
                "nn.Parameter(weight.detach().to_dense().resolve_neg().clone())."
            )
        first = first or parameter.dtype
        if parameter.dtype not in DTYPES or parameter.dtype != first:
            raise UnsupportedModelError(
                f"parameter {name} is {parameter.dtype}, the first is {first}; a model has one "
                f"dtype of {', '.join(map(str, DTYPES))} (fp8 is not covered); use model.to(dtype)."
            )
