"""The section `rollout`: how completions are sampled, and what the engine may use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers.config.section import Count, Section

SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams) if f.name not in ("seed", "stop"))
"""Keys of rollout.sampling. The seed is run.seed; the trainer's engine takes no stop strings."""
_KEYS = ", ".join(SAMPLING_KEYS)


def _sampling(value: Any) -> Any:
    """The SamplingParams of a mapping; SamplingParams checks the values itself."""
    if not isinstance(value, dict):
        return value
    if problems := list(_problems(value)):
        raise ValueError("; ".join(problems))
    return SamplingParams(**value)


def _problems(value: dict[Any, Any]) -> Iterator[str]:
    for key in value:
        if key not in SAMPLING_KEYS:
            near = get_close_matches(str(key), SAMPLING_KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys here are {_KEYS}"
            yield f"unknown key {key}; {hint}"
            continue
        try:
            params = SamplingParams(**{key: value[key]})
        except (TypeError, ValueError) as error:
            yield str(error)
        else:
            if params.temperature == 0:
                yield "temperature must be above 0: greedy completions of a prompt are equal"
    if missing := [key for key in ("n", "max_tokens") if key not in value]:
        yield f"missing: {', '.join(missing)}"


class RolloutSection(Section):
    """How completions are sampled."""

    prompts_per_step: Count
    """Prompts of one rollout batch."""
    sampling: Annotated[
        SamplingParams,
        BeforeValidator(_sampling),
        PlainSerializer(lambda params: {key: getattr(params, key) for key in SAMPLING_KEYS}),
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
