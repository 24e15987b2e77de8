"""The suites of `python -m benchmarks distributed`, on all GPUs of this machine: optimizer
steps, whole GRPO steps."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.make_random_model import main as make_random_model
from benchmarks.models import build_model
from benchmarks.recipe import phase_medians, recipe_steps
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Choice, Suites, cases
from benchmarks.timing import Machine, peak_bytes, row_fields
from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import World
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.trainers.config.learning_sections import OptimizerSection
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.strategies.build import STRATEGIES
from rl_consistency.trainers.strategies.strategy import Strategy

ROUNDS, WARM_UP = 9, 3
"""Steps that count, and steps before them."""


def distributed_suites(choice: Choice) -> Suites:
    """Optimizer steps of every strategy, whole GRPO steps."""
    models, batch = ("qwen3-0.6b", "qwen3-1.7b"), {"sequences": 8, "length": 2048}
    work, lengths = {"groups": 16, "group": 8}, (256, 1024)
    if choice.tiny:
        models, batch = ("tiny-qwen3",), {"sequences": 2, "length": 16}
        work, lengths = {"groups": 1, "group": 2}, (4,)
    ranks = {"ranks": max(torch.cuda.device_count(), 2)}
    strategies = [name for name in STRATEGIES if name != "zero1"]  # which is not in bf16
    steps = [
        {**ranks, "model": model, "strategy": strategy, **batch}
        for model, strategy in product(models, strategies)
    ]
    grpo = [{**ranks, "model": models[0], **work, "new_tokens": tokens} for tokens in lengths]
    return {
        "distributed_step": cases("optimizer step", optimizer_step, steps),
        "distributed_grpo": cases("GRPO step", grpo_scaling, grpo),
    }


def on_ranks(bench: Machine, world_size: int, function: Callable[..., Any], *given: Any) -> Any:
    """What `function(world, *given)` returns on rank 0 of processes of one GPU each, over NCCL, or
    gloo on a CPU; ValueError without so many GPUs."""
    kind, found = bench.device.type, torch.cuda.device_count()
    if kind == "cuda" and found < world_size:
        raise ValueError(f"this takes {world_size} GPUs; here are {found}.")
    with TemporaryDirectory() as place:
        spawn(_enter, (world_size, kind, Path(place), function, given), nprocs=world_size)
        return pickle.loads((Path(place) / "found").read_bytes())


def _enter(
    rank: int, world_size: int, kind: str, place: Path, function: Any, given: tuple[Any, ...]
) -> None:
    for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ |= {name: str(number), f"LOCAL_{name}": str(number)}
    device, bound = torch.device(kind), {}
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        bound["device_id"] = device
    store = {"init_method": f"file://{place}/store", "rank": rank, "world_size": world_size}
    dist.init_process_group("nccl" if bound else "gloo", **store, **bound)
    found = function(World.join(device), *given)
    if rank == 0:
        (place / "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def by_turns(
    world: World, ways: Mapping[str, Callable[[], object]]
) -> dict[str, tuple[float, int]]:
    """Seconds and bytes of each way: the median time of its slowest rank, and what its fullest rank
    allocates at the peak beyond what it held."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(ROUNDS + WARM_UP):
        for name, run in ways.items():
            dist.barrier()
            start = finished_seconds(world.device)
            with peak_bytes(world.device) as peak:
                run()
                seconds[name].append(finished_seconds(world.device) - start)
            peaks[name] += peak
    own = {name: (median(seconds[name][WARM_UP:]), max(peaks[name][WARM_UP:])) for name in ways}
    ranks = world.gather("figures", own)
    return {n: (max(r[n][0] for r in ranks), max(r[n][1] for r in ranks)) for n in ways}


def optimizer_step(
    bench: Machine, ranks: int, model: str, strategy: str, sequences: int, length: int
) -> dict[str, Any]:
    """One part of the gradient a GPU (`sequences` of `length` tokens): forward, backward, sum and
    AdamW, against the same strategy's stock sum. Both have their own policy of the same weights."""
    found = on_ranks(bench, ranks, _steps, model, strategy, [length] * sequences)
    (ours, peak), (stock, other) = found["ours"], found["stock"]
    name = f"{strategy} with NCCL's sums of fp32 gradients"
    tokens = ranks * sequences * length
    return row_fields({"ours": ours, name: stock}, [name], tokens=tokens) | {
        "peak_bytes": {"ours": peak, "stock": other},
        "figures": {"times_stock": ours / stock, "peak_times_stock": peak / max(other, 1)},
    }


def _steps(
    world: World, model: str, strategy: str, lens: list[int]
) -> dict[str, tuple[float, int]]:
    runs: dict[str, Callable[[], object]] = {}
    for name in ("ours", "stock"):
        policy: Any = build_model(model, world.device).train()
        patch(policy, grad_dtype=torch.float32)
        order = PartOrder(world.size)
        ranks = STRATEGIES[strategy](world, order, policy, ordered=name == "ours")
        runs[name] = _step_of(ranks, policy.config.vocab_size, lens)
    return by_turns(world, runs)


def _step_of(ranks: Strategy, vocabulary: int, lens: list[int]) -> Callable[[], object]:
    """A step of random tokens, one part of the gradient for each rank."""
    world, section = ranks.world, OptimizerSection(learning_rate=1e-6)
    optimizer = PolicyOptimizer(ranks, section, total_steps=100)
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(0, vocabulary, (sum(lens),), generator=generator)
    batch, count = PackedBatch.from_tokens(ids.to(world.device), lens), world.size * len(lens)

    def backward(part: range, is_filler: bool) -> None:
        scored = token_logprobs(ranks.model, batch, prompt_lengths=[1] * len(lens))
        ranks.backward(-scored.logprobs.mean() / world.size)

    return lambda: optimizer.step(ranks.accumulate(count, None, backward))


def grpo_scaling(
    bench: Machine, ranks: int, model: str, groups: int, group: int, new_tokens: int
) -> dict[str, Any]:
    """Tokens a second of all GPUs together; `scaling` is over those of one. Each GPU has `groups`
    prompts with `group` completions. Where the time of a step goes is in the figures."""
    rates: dict[str, float] = {}
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as place:
        make_random_model(["--preset", model, "--device", bench.device.type, f"{place}/model"])
        for count in (1, ranks):
            medians = on_ranks(bench, count, _grpo_steps, place, groups, group, new_tokens)
            rates[f"on {count}"] = count * groups * group * new_tokens / medians["step"]
            figures |= {f"{name}_seconds on {count}": each for name, each in medians.items()}
    figures["scaling"] = rates[f"on {ranks}"] / rates["on 1"]
    return {"figures": figures, "tokens_per_second": rates}


def _grpo_steps(
    world: World, place: str, groups: int, group: int, new_tokens: int
) -> dict[str, float]:
    workload = Workload.equal(groups * world.size, group, 32, new_tokens)
    options = {"micro_batch": min(32, groups * group), "gradient_leaves": world.size}
    device, name = world.device.type, f"run_{world.size}"
    return phase_medians(recipe_steps(place, device, workload, name=name, **options))
