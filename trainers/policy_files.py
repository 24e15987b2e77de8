"""The files of a model directory, checked before transformers reads them: it casts, and skips."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_consistency.trainers.data.foreign_files import parse_json_object

DTYPES = ("F32", "BF16", "F16")
"""Of tensors in a file; `policy.dtype` is what they are rounded to."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_CHECKPOINT = ("optimizer", "critic", "critic_optimizer")
"""Files of a checkpoint of ours beside its weights."""
_PASSED_OVER = {
    "adapter_*": "an adapter, which would be left out: save the weights with the adapter merged",
    "pytorch_model*.bin*": f"would not be read: remove it, or convert it to {_SINGLE}",
}
_UNREAD = {
    "auto_map": "code of its own would not run: remove it if transformers' class is meant",
    "transformers_weights": "other weights than model.safetensors would be read: rename that file",
    "fusion_config": "fused modules are not covered: remove it",
}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "sliding_window"),
    *("max_position_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok"),
    "decoder_sparse_step",
)

_NO_NUMBERS = ("short_factor", "long_factor", "mrope_section", "truncate")
_OF_DEFAULT = ("rope_theta", "partial_rotary_factor")
"""Settings of RoPE: what is no number, and all that the kind default reads."""


class PolicyError(ValueError):
    """A policy that cannot be loaded or built; the message names what is wrong and the remedy."""


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory."""
    try:
        return parse_json_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file}: {error}") from error


def check_config_file(directory: Path) -> None:
    """Refuse a directory without a config.json, and one whose numbers mean nothing."""
    if not directory.is_dir():
        raise PolicyError(
            f"no model directory {directory}: give one that save_pretrained or import-gguf wrote"
        )
    file = directory / "config.json"
    if not file.is_file():
        raise PolicyError(f"{directory} has no config.json: it is no model directory")
    for path in directory.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise PolicyError(f"{path} is no regular file: a pipe would be waited for")
    config = json_object(file)
    refuse_quantised(config, str(directory))
    for key, why in _UNREAD.items():
        if config.get(key):
            raise PolicyError(f"{file}: {key} is {config[key]!r}: {why}")
    for key in _SIZES:
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise PolicyError(f"{file}: {key} is {value!r}: give an integer of at least 1")
    heads, kv_heads = (config.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    if heads and kv_heads and heads % kv_heads:
        found = f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        raise PolicyError(f"{file}: {found}")
    experts, chosen = (
        config.get("num_experts") or config.get("num_local_experts"),
        config.get("num_experts_per_tok"),
    )
    if experts and chosen and chosen > experts:
        raise PolicyError(f"{file}: num_experts_per_tok {chosen} exceeds the {experts} experts")
    rope = config.get("rope_parameters")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(config.get(key), f"{file}: {key}")
    for key in ("rope_theta", "rope_scaling"):
        given, read = config.get(key), rope.get(key) if isinstance(rope, dict) else None
        if isinstance(rope, dict) and given is not None and given not in (read, rope):
            raise PolicyError(f"{file}: {key} {given!r} contradicts rope_parameters; remove one")


def _check_rope(rope: Any, where: str) -> None:
    given = rope if isinstance(rope, dict) else {}
    kinds = {given[key] for key in ("rope_type", "type") if isinstance(given.get(key), str)}
    if len(kinds) > 1:
        raise PolicyError(f"{where}: type and rope_type differ: remove one of them")
    for key, value in given.items():
        if isinstance(value, dict):
            _check_rope(value, f"{where}.{key}")
        elif key in ("rope_type", "type"):
            if value not in (known := ("default", *ROPE_INIT_FUNCTIONS)):
                allowed = ", ".join(map(str, known))
                raise PolicyError(f"{where}: {key} is {value!r}: give one of {allowed}")
        elif kinds == {"default"} and key not in _OF_DEFAULT:
            raise PolicyError(f"{where}: {key} has no meaning with rope_type default: remove it")
        elif key in _NO_NUMBERS or (value is None and key != "rope_theta"):
            continue  # what is None has a default
        elif not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise PolicyError(f"{where}: {key} is {value!r}: give a number above 0")


def refuse_quantised(config: dict[str, Any], source: str) -> None:
    """Refuse a configuration of quantised weights."""
    kind = config.get("quantization_config", config.get("compression_config"))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    if kind is None and "float8" not in dtype:
        return
    if isinstance(kind, dict):
        kind = kind.get("quant_method", kind)
    found = f"quantised weights ({kind or dtype}), which are not supported"
    raise PolicyError(f"{source} holds {found}: use a model saved as float32 or bfloat16")


def check_weights(directory: Path) -> dict[str, Path]:
    """The file of each tensor of a model directory.

    PolicyError where weights are missing, lie outside of it or are of a dtype that would lose its
    meaning, and where files beside them would be passed over.
    """
    if (generation := directory / "generation_config.json").exists():
        json_object(generation)  # transformers would pass over a damaged one, and its end tokens
    for pattern, what in _PASSED_OVER.items():
        for file in sorted(directory.glob(pattern)):
            raise PolicyError(f"{file}: {what}")
    single, index = directory / _SINGLE, directory / _INDEX
    if not (single.is_file() or index.is_file()):
        raise PolicyError(f"{directory} has no weights: {_SINGLE} or {_INDEX} is needed")
    if single.is_file() and index.is_file():
        raise PolicyError(f"{index}: {_SINGLE} lies beside it, and one of them is not read")
    named = _shards(index) if index.is_file() else {}
    files = sorted({directory / name for name in named.values()} or {single})
    for file in sorted(directory.glob("*.safetensors")):
        if file not in files and file.stem not in _OF_CHECKPOINT:
            raise PolicyError(f"{file}: would not be read beside the others: remove it")
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            for tensor in names:
                if tensor in found:
                    other = found[tensor].name
                    raise PolicyError(f"{file}: {tensor} lies in {other} too: remove one")
                found[tensor] = file
                if (dtype := opened.get_slice(tensor).get_dtype()) not in DTYPES:
                    problem = f"{tensor} is {dtype}, and would be cast without a word"
                    raise PolicyError(f"{file}: {problem}: save it as {', '.join(DTYPES)}")
    for tensor in sorted(found.keys() | named.keys()) if named else ():
        held = found[tensor].name if tensor in found else "no file"
        if (said := named.get(tensor, "no file")) != held:
            raise PolicyError(f"{index}: {tensor}: weight_map says {said}, it lies in {held}")
    return found


def _shards(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says."""
    content = json_object(index)
    shards = content.get("weight_map")
    if not isinstance(content.get("metadata"), dict):
        raise PolicyError(f"{index}: metadata must be a JSON object; it may be empty")
    if not isinstance(shards, dict) or not shards:
        raise PolicyError(f"{index}: weight_map must map tensors to files")
    for tensor, name in shards.items():
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise PolicyError(f"{index}: {tensor}: {name!r} is no file beside it")
        if not (index.parent / name).is_file():
            raise PolicyError(f"{index}: {tensor}: there is no file {name}")
    return shards


def check_tensors(files: dict[str, Path], model: Any) -> None:
    """Refuse tensors of these files that transformers passed over when it made the model: of two
    names of one parameter all but one, and angles of RoPE, which follow from the configuration."""
    first: dict[str, str] = {}
    for tensor, file in files.items():
        name = re.sub(r"^(model\.)+", "", tensor)
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            name = "embed_tokens.weight"
        if "rotary_emb.inv_freq" in name:  # as transformers looks for them
            given, own = _read(file, tensor), model.base_model.rotary_emb.inv_freq.cpu()
            digits = 1e-5 if given.dtype == torch.float32 else 1e-2
            if given.shape != own.shape or not torch.allclose(given.float(), own, digits, 0.0):
                problem = f"{tensor} has other angles than config.json's rope_parameters give"
                raise PolicyError(f"{file}: {problem}: mend one of them")
        elif (other := first.setdefault(name, tensor)) != tensor:
            one, two = _read(files[other], other), _read(file, tensor)
            if one.dtype != two.dtype or not one.equal(two):
                problem = f"{other} and {tensor} are one parameter, and their values differ"
                raise PolicyError(f"{file}: {problem}: remove one of them")


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)
