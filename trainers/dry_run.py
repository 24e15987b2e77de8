"""A recipe tried out: all of it is built and checked, and one small step is taken of it.

From that step the memory is estimated that the whole recipe needs on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from rl_consistency.models.layer_graphs import layers_op_by_op
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.trainers.algorithms.rollout_engine import cache_bytes_of
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.reward_model import RewardModel
from rl_consistency.trainers.services import missing_services

MOST_TOKENS = 16
"""Most tokens of a completion."""


def rehearse(run: Any, announce: Callable[[str], None]) -> dict[str, Any]:
    """Take one small step with the parts of a run, and tell what was seen; the step's metrics.

    Its files lie in a temporary folder and go with it. The run is of no use afterwards.
    """
    with TemporaryDirectory(prefix="rl_consistency-dry-run-") as directory:
        recipe = run.config
        run.config, run.directory = reduced(recipe, Path(directory)), Path(directory)
        run.no_signal.warn = lambda line: None  # of two samples that is no news
        run.begin(overwrite=False)
        kv_cache = cache_bytes_of(recipe, run.model)  # by what is free where a run allocates it
        run.progress.starts("taking a small step")
        metrics = run.step(1)
    parts, available = resident(run, kv_cache), available_bytes(run.model.device)
    if available is not None:
        parts |= activations(run, recipe)
    told = [
        *_told(run, metrics),
        *memory_told(parts, available),
        *missing_services(recipe).values(),
    ]
    run.progress.starts("")
    for line in [*told, "A dry run writes no run directory and saves no weights."]:
        announce(line)
    return metrics


def reduced(config: RunConfig, directory: Path) -> RunConfig:
    """The recipe with one step, as few prompts as its other settings allow, short completions, and
    its files in `directory`."""
    most = min(config.sampling.max_tokens, MOST_TOKENS)
    buffer = min(config.algorithm.overlong_buffer, most)
    evaluated = config.training.eval_sampling
    if evaluated is not None:
        evaluated = {**evaluated, "max_tokens": min(config.eval_sampling.max_tokens, MOST_TOKENS)}
    changes: dict[str, dict[str, Any]] = {
        "run": {"output_dir": directory},
        "warm_start": {"steps": min(config.warm_start.steps, 1)},
        "rollout": {"sampling": replace(config.rollout.sampling, max_tokens=most)},
        "algorithm": {
            **{"epochs_per_rollout": 1, "overlong_buffer": buffer, "dynamic_sampling": None}
        },
        "optimizer": {"warmup_steps": 0},
        "training": {"steps": 1, "eval_samples": 1, "eval_sampling": evaluated},
    }
    tree = config.model_dump()
    for name, values in changes.items():
        tree[name] |= values
    for prompts in range(1, config.rollout.prompts_per_step + 1):
        tree["rollout"]["prompts_per_step"] = prompts
        with suppress(ValidationError):  # the batch is cut into updates and parts
            return RunConfig.model_validate(tree)
    raise AssertionError("the recipe's own number of prompts is valid")


def _told(run: Any, metrics: dict[str, Any]) -> list[str]:
    config: RunConfig = run.config
    prompts, evaluated = run.train_set.prompts, [s.prompts for s in run.eval_sets.values()]
    samples = config.rollout.prompts_per_step * config.sampling.n
    scores = {term.name: metrics.get(f"reward/{term.name}") for term in run.rewards}
    rewards = [
        f"{name} {'did not apply' if score is None else format(score, '.4g')}"
        for name, score in scores.items()
    ]
    rollout, training = (metrics[f"time/{name}_seconds"] for name in ("rollout", "training"))
    return [
        f"data      {len(prompts)} prompts, the longest {max(map(len, prompts))} tokens; "
        f"{sum(map(len, evaluated))} for evaluation",
        f"a step    {samples} completions of at most {config.sampling.max_tokens} tokens: rollout "
        f"{rollout:.1f} s, training {training:.1f} s",
        f"tokens    {metrics['consistency/mismatched_tokens']} of {metrics['consistency/tokens']} "
        "differ",
        f"rewards   {', '.join(rewards)}",
    ]


REMEDY = (
    "lower training.micro_batch_size, give rollout.num_kv_blocks a smaller number, or set "
    "policy.gradient_checkpointing; no bit depends on them"
)


def memory_told(parts: Mapping[str, int], available: int | None) -> list[str]:
    """Lines about bytes by what takes them, and their sum against what a process may have.

    `available` is None where that is not known; the activations are then not among the parts.
    """
    total = sum(parts.values())
    each = ", ".join(f"{name} {shown(count)}" for name, count in parts.items() if count)
    lines = [f"memory    of the whole recipe on one process, estimated: {each}"]
    if available is None:
        return [*lines, f"          together {shown(total)}, and activations"]
    lines.append(f"          together {shown(total)} of {shown(available)} that the GPU has for it")
    return lines if total <= available else [*lines, f"WARNING: that does not fit: {REMEDY}"]


def resident(run: Any, kv_cache: int) -> dict[str, int]:
    """Bytes by what stays from step to step, after a step of `run`; and the gradients."""
    parts = {
        "weights": sum_bytes(run.model.parameters()),
        "fp32 gradients": 4 * sum(run.ranks.numels.values()),
        "optimizer": sum_bytes(run.optimizer.tensors().values()),
    }
    if run.reference is not None:
        parts["reference"] = sum_bytes(run.reference.parameters())
    models = [term.function.model for term in run.rewards if isinstance(term.function, RewardModel)]
    parts["reward models"] = sum(sum_bytes(model.parameters()) for model in models)
    if run.critic is not None:
        kept = run.critic.saved().values()
        parts["critic and its optimizer"] = sum(sum_bytes(part.values()) for part in kept)
    return parts | {"KV cache": kv_cache}


def activations(run: Any, recipe: RunConfig) -> dict[str, int]:
    """Bytes of a training pass on a GPU over the most and longest sequences of `recipe`.

    Passes over an eighth and a quarter of the tokens are measured: a part of the memory does not
    grow. ValueError where there is no room for these.
    """
    size, length = largest_pass(recipe)
    share = recipe.data.max_prompt_tokens / length
    small, large = max(length // 8, 2), max(length // 4, 3)
    try:
        low, high = (_peak(run, size, n, max(int(n * share), 1)) for n in (small, large))
    except torch.OutOfMemoryError as error:
        problem = f"a quarter of a pass over {size} sequences of {length} tokens does not fit"
        raise ValueError(f"{problem} into the GPU's memory: {REMEDY}.") from error
    slope = max(high - low, 0) / (large - small)
    whole = max(round(high + slope * (length - large)), 0)
    return {f"activations of {size * length:,} tokens": whole}


def largest_pass(recipe: RunConfig) -> tuple[int, int]:
    """Most sequences of a training pass, and the most tokens of one."""
    sampling, updates = recipe.sampling, recipe.algorithm.updates_per_rollout
    update = recipe.rollout.prompts_per_step * sampling.n // updates
    part = -(-update // recipe.consistency.gradient_leaves.count)
    length = recipe.data.max_prompt_tokens + sampling.max_tokens
    return min(recipe.training.micro_batch_size, part), length


def _peak(run: Any, size: int, length: int, prompt: int) -> int:
    """Bytes that passes of `size` sequences allocate beside one gradient of each parameter."""
    device, ranks = run.model.device, run.ranks
    token = run.train_set.prompts[0][0]

    def backward(batch: range, is_filler: bool) -> None:
        given = {"prompt_lengths": [prompt] * size, "sampling": run.config.sampling}
        sequences = [[token] * length] * size
        scored = token_logprobs(ranks.model, sequences, **given, check_support=False)
        ranks.backward(scored.logprobs.sum())

    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    # Two passes a part: in the second one the gradients are there as well. Replayed layers allocate
    # nothing: their activations lie in memory of the graphs.
    with layers_op_by_op():
        ranks.accumulate(2 * size * ranks.order.count, size, backward)
    peak = torch.cuda.max_memory_allocated(device) - before
    ranks.drop_gradients()
    return peak - 4 * sum(ranks.numels.values())


def available_bytes(device: torch.device) -> int | None:
    """What this process has of a GPU and may still get; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def sum_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def shown(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
