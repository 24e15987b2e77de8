"""The hash table of training: cells, one tiny run each; all of an algorithm must end alike.

In its negative controls every wrong program must have several hashes. One group of processes runs
all cells of one number of them.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from rl_consistency.numerics.files import write_whole
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run import train
from rl_consistency.trainers.run_directory.step_files import read_metrics
from rl_consistency.trainers.strategies import zero
from rl_consistency.trainers.strategies.build import STRATEGIES
from rl_consistency.verify.claims import Result, Tally
from rl_consistency.verify.mutants.run import MutantResult
from rl_consistency.verify.mutants.world import WORLD_MUTANTS
from rl_consistency.verify.processes import end_with_parent, start_method

LEAVES = 4
"""`consistency.gradient_leaves` of every cell, so the most processes there can be."""
WORLDS = (1, 2, 3, 4)
MICRO_BATCHES = (1, 2, 4)
LARGEST_MICRO_BATCH = 4
"""A leaf: 15 sequences make one of three and three of four."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
STEPS = 20
LIBRARIES = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}
"""What a strategy needs that is not always installed."""
REFUSED = {("zero1", "bfloat16"): "refused by design; zero2 takes it"}
"""What a strategy does not train."""
ALGORITHMS = {"grpo": tuple(STRATEGIES), "ppo": ("replicated",)}
"""The strategies of each: no rank keeps a shard of a critic."""
RELEASED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
"""Settings of DeepSpeed by which ZeRO-3 frees each weight at once, however small."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    dtype: str
    strategy: str
    micro_batch: int
    world_size: int
    algorithm: str = "grpo"
    mutant: str = ""
    """Name of the wrong program that runs; empty is the program as it is."""

    @property
    def name(self) -> str:
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        run = f"{processes}, {self.strategy}, micro-batch {self.micro_batch}, {self.kind}"
        return f"{run}, {self.mutant}" if self.mutant else run

    @property
    def kind(self) -> str:
        """Runs of one kind and program must end alike."""
        dtype = DTYPES[self.dtype]
        return dtype if self.algorithm == "grpo" else f"{dtype} {self.algorithm}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell's run ended with."""

    cell: Cell
    digest: str = ""
    """SHA-256 of the final parameters, in PPO of the critic's too."""
    tokens: int = 0
    """Tokens compared between rollout and training."""
    mismatched_tokens: int = 0
    seconds: float = 0.0
    error: str = ""
    """Why there is no result: all that is known of it."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Metrics step by step, without what a clock decides."""

    @property
    def failure(self) -> str:
        """What is wrong with this run alone; empty if nothing is."""
        if self.error:
            return self.error.strip().splitlines()[-1]
        if self.mismatched_tokens or not self.tokens:
            return f"{self.mismatched_tokens} of {self.tokens} tokens differ from the rollout's"
        idle = [row["step"] for row in self.rows if row.get("gradient_norm") == 0]
        return f"step {idle[0]} has no gradient, so nothing was trained" if idle else ""

    def parting(self, other: Outcome) -> str:
        """The first step and metric in which another run differs; empty if it is the same run."""
        for own, found in zip(self.rows, other.rows, strict=True):
            for key in {**own, **found}:
                # As text: a NaN is equal to a NaN.
                if repr(own.get(key)) != repr(found.get(key)):
                    return f"step {own['step']}, {key}"
        return "" if self.digest == other.digest else "the final parameters"


def left_out(strategy: str, dtype: str) -> str:
    """Why such cells cannot be run here; empty if they can."""
    library = LIBRARIES.get(strategy)
    if library is not None and find_spec(library) is None:
        return f"{library} is not installed"
    return REFUSED.get((strategy, dtype), "")


def cells_of(
    worlds: Sequence[int],
    strategies: Sequence[str],
    micro_batches: Sequence[int],
    dtypes: Sequence[str],
    algorithms: Sequence[str],
) -> list[Cell]:
    """All combinations but those that are left out."""
    return [
        Cell(algorithm=name, dtype=dtype, strategy=strategy, micro_batch=size, world_size=world)
        for name, dtype, strategy, size, world in product(
            algorithms, dtypes, strategies, micro_batches, worlds
        )
        if strategy in ALGORITHMS[name] and not left_out(strategy, dtype)
    ]


def failures(outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, str]]:
    """Runs that failed or that differ from the first one of their kind and program, and how."""
    first: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        cell = outcome.cell
        if outcome.failure:
            yield outcome, outcome.failure
        elif where := first.setdefault((cell.kind, cell.mutant), outcome).parting(outcome):
            other = first[cell.kind, cell.mutant].cell.name
            yield outcome, f"parts from {other} in {where}"


def control_cells(worlds: Sequence[int]) -> list[Cell]:
    """Each wrong program, and the right one, in every strategy that must show it."""
    keys = {"": [key for m in WORLD_MUTANTS for key in m.caught_by]}
    keys |= {m.name: [*m.caught_by] for m in WORLD_MUTANTS}
    return [
        Cell(dtype="float32", strategy=strategy, micro_batch=4, world_size=size, mutant=mutant)
        for mutant, own in keys.items()
        for strategy in dict.fromkeys(key.removeprefix("C4 ") for key in own)
        for size in worlds
        if not left_out(strategy, "float32")
    ]


def judge(outcomes: Sequence[Outcome]) -> tuple[list[MutantResult], list[Result]]:
    """What each mutant's runs came to, and the same of the right program."""
    found = [
        MutantResult(mutant=mutant, results=tuple(_results(outcomes, mutant.name)))
        for mutant in WORLD_MUTANTS
    ]
    return found, list(_results(outcomes, ""))


def _results(outcomes: Sequence[Outcome], mutant: str) -> Iterator[Result]:
    row = {"claim": "C4", "scope": "fp32", "what": "number of processes"}
    own = [outcome for outcome in outcomes if outcome.cell.mutant == mutant]
    for strategy in dict.fromkeys(outcome.cell.strategy for outcome in own):
        tally, runs = Tally(), [o for o in own if o.cell.strategy == strategy]
        why = {outcome.cell: text for outcome, text in failures(runs)}
        for outcome in runs:
            tally.expect(outcome.cell.name, outcome.cell not in why, why.get(outcome.cell, ""))
        yield tally.result(sum(o.seconds for o in runs), subject=strategy, **row)


def digit_share(
    prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str], **extra: Any
) -> list[float]:
    """Share of digits in a completion: a reward that an untrained policy earns too."""
    return [sum(map(str.isdecimal, text)) / max(len(text), 1) for text in completions]


def config_of(cell: Cell, steps: int, device: str, directory: Path) -> RunConfig:
    """Samples of five groups of three, which borders of leaves cut; something of every part of a
    step whose order could matter: warm start, KL, clipping, schedule, evaluation, regrouping."""
    build = {"architecture": "qwen3", "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    build |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    build |= {"max_position_embeddings": 64}
    task = {"name": "arithmetic", "num_terms": 2, "max_value": 8, "train_size": 32, "eval_size": 4}
    rewards = [{"name": "arithmetic"}, {"name": f"{__name__}:digit_share", "weight": 0.5}]
    tree = {
        "run": {"name": "cell", "seed": 3, "num_threads": 1, "device": device}
        | {"output_dir": str(directory)},
        "policy": {"build": build, "dtype": cell.dtype},
        "tokenizer": {"kind": "byte"},
        "data": {"task": task, "max_prompt_tokens": 4},
        "reward": {"functions": rewards},
        "warm_start": {"steps": 2, "batch_size": 10, "learning_rate": 1e-2},
        "rollout": {"prompts_per_step": 5, "sampling": {"n": 3, "max_tokens": 8}},
        "algorithm": {"name": cell.algorithm, "loss": "dapo", "kl_coefficient": 0.05},
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "max_grad_norm": 0.4},
        "training": {"steps": steps, "micro_batch_size": cell.micro_batch}
        | {"strategy": cell.strategy, "eval_every": steps},
        "consistency": {"gradient_leaves": LEAVES, "gradient_check_every": steps},
        "tracking": {"console": False},
    }
    return RunConfig.model_validate(tree)


def run_cells(
    cells: Sequence[Cell], *, steps: int, device: str = "cpu", on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run all cells, in the order of their numbers of processes; returns the outcomes by cell.

    A cell whose process raises or dies has its error as the outcome, and the others run on in new
    processes. `on_outcome` is called with each outcome as soon as it is there.
    """
    found: dict[int, Outcome] = {}

    def add(i: int, **fields: Any) -> None:
        found[i] = Outcome(cell=cells[i], **fields)
        on_outcome(found[i])

    for world_size in sorted({cell.world_size for cell in cells}):
        left = {i: cell for i, cell in enumerate(cells) if cell.world_size == world_size}
        while left:
            with TemporaryDirectory() as folder:
                _run_group(left, world_size, steps, device, Path(folder), add)
            left = {i: cell for i, cell in left.items() if i not in found}
    return [found[i] for i in range(len(cells))]


def _run_group(
    cells: dict[int, Cell], world_size: int, steps: int, device: str, folder: Path,
    add: Callable[..., None],
) -> None:  # fmt: skip
    """Run cells of one number of processes up to the end, or to the first that fails."""
    left = list(cells)

    def collect() -> None:
        while left and (file := folder / f"{left[0]}.json").exists():
            add(left.pop(0), **json.loads(file.read_text()))

    given = cells, world_size, steps, device, folder
    method = start_method(device, __name__).get_start_method()
    context: Any = start_processes(_enter, given, world_size, False, True, method)
    try:
        while not context.join(timeout=0.1):
            collect()
        collect()
    except ProcessException as error:
        collect()
        if left:  # a process may end badly after its last cell
            add(left[0], error=str(error))
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _enter(
    rank: int, cells: dict[int, Cell], world_size: int, steps: int, device: str, folder: Path
) -> None:
    end_with_parent()
    # torch's own FSDP2 calls what torch 2.13 deprecates; the lines would stand across the table.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)
    for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ |= {name: str(number), f"LOCAL_{name}": str(number)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    mutants = {mutant.name: mutant for mutant in WORLD_MUTANTS}
    zero.ZERO_OPTIMIZATION |= RELEASED
    # Once: DeepSpeed keeps hold of the first process group it sees.
    backend, store = "nccl" if device == "cuda" else "gloo", f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
    for i, cell in cells.items():
        with mutants[cell.mutant].perturb() if cell.mutant else nullcontext():
            found = _outcome(cell, steps, device, folder / str(i))
        dist.barrier()
        if rank == 0:
            write_whole(folder / f"{i}.json", json.dumps(found))
    dist.destroy_process_group()


def _outcome(cell: Cell, steps: int, device: str, directory: Path) -> dict[str, Any]:
    """The fields of an `Outcome`, as JSON has them."""
    start = time.perf_counter()
    summary = train(config_of(cell, steps, device, directory), announce=lambda line: None)
    digest, critic = summary["parameter_digest"], summary.get("critic_digest")
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"}
        for row in read_metrics(directory / "metrics.jsonl")
    ]
    return {
        "digest": sha256(f"{digest} {critic}".encode()).hexdigest() if critic else digest,
        "tokens": summary["consistency/tokens"],
        "mismatched_tokens": summary["consistency/mismatched_tokens"],
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }
