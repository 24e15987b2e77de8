"""An optimizer step of TRL's GRPOTrainer, as it comes and with `attach`, and of our own recipe.

All have the same random weights in bfloat16, prompts, lengths and optimizer (AdamW); the reward is
a function of the text. TRL as it comes generates with Hugging Face. `trl defaults` is the training
part of a trainer with fp32 weights under autocast, what TRL does unasked: its gradients are fp32
too, so memory is set against it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

import rl_consistency
from benchmarks.make_random_model import main as make_random_model
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Suites, cases
from benchmarks.timing import Machine, held_by_graphs
from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.parity.gradients import REGROUPINGS
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.run import train

STEPS, WARM_UP = 30, 2
"""Attached; the others take as many warm-up steps and FEW more, since they are slow."""
FEW = 3
CHECK_EVERY, PROMISED_EVERY = 3, 10
"""Steps from one check of the gradients to the next: here, and where its share is given for."""


def trl_suites() -> Suites:
    """The suite of `python -m benchmarks trl`."""
    shape = {**Workload.equal(8, 8, 256, 256).shape, "micro_batch": 16}
    return {"trl_grpo": cases("TRL GRPO step", trl_grpo, [{"model": "qwen3-0.6b", **shape}])}


def trl_grpo(
    bench: Machine, model: str, sequences: int, group: int, prompt: int, new_tokens: int,
    micro_batch: int,
) -> dict[str, Any]:  # fmt: skip
    """Times of a step and of its training part, peaks of the training part, differing tokens."""
    workload = Workload.equal(sequences // group, group, prompt, new_tokens)
    with TemporaryDirectory() as place:
        device = bench.device.type
        make_random_model(["--preset", model, "--device", device, f"{place}/model"])

        def run(steps: int, attached: bool | None, **arguments: Any) -> dict[str, Any]:
            return _trl_run(place, workload, micro_batch, steps, device, attached, arguments)

        stock = run(WARM_UP + FEW, None, dtype="bfloat16", bf16=False)
        defaults = run(WARM_UP + FEW, None, dtype="float32", bf16=True)
        measured = run(1, False, dtype="bfloat16", bf16=False)
        ours = run(STEPS, True, dtype="bfloat16", bf16=False)
        recipe = _recipe_seconds(place, workload, micro_batch, device)
    tokens = workload.sequences * new_tokens
    return {
        "ours_us": ours["step"] * 1e6,
        "stock_us": stock["step"] * 1e6,
        "stock": "TRL with Hugging Face generation",
        "peers": {"trl defaults": defaults["step"] * 1e6, "own recipe": recipe * 1e6},
        "ratio": stock["step"] / ours["step"],
        "peak_bytes": {"ours": ours["peak"], "stock": stock["peak"]},
        "tokens_per_second": {"ours": tokens / ours["step"], "stock": tokens / stock["step"]},
        "figures": {
            "training_ratio": stock["training"] / ours["training"],
            "strict/training_seconds": ours["training"],
            "stock/training_seconds": stock["training"],
            "trl_defaults/training_seconds": defaults["training"],
            "memory_times_trl_defaults": ours["peak"] / max(defaults["peak"], 1),
            "times_own_recipe": ours["step"] / recipe,
            "monitor_share": ours["monitor"],
            "gradient_check_share": ours["check"],
            "strict/tokens": ours["tokens"],
            "strict/mismatched_tokens": ours["mismatched"],
            "stock/tokens": measured["tokens"],
            "stock/mismatched_tokens": measured["mismatched"],
        },
    }


def _trl_run(
    place: str, workload: Workload, micro_batch: int, steps: int, device: str,
    attached: bool | None, arguments: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Train; `attached` None leaves the trainer as it is, False only measures its drift."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    dtype = arguments.pop("dtype")
    trainer = GRPOTrainer(
        model=f"{place}/model",
        reward_funcs=variety,
        args=GRPOConfig(
            output_dir=f"{place}/trl",
            max_steps=steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=workload.sequences // micro_batch,
            num_generations=workload.group_size,
            max_completion_length=workload.longest,
            learning_rate=1e-6,
            model_init_kwargs={"dtype": dtype},
            use_cpu=device == "cpu",
            gradient_checkpointing=False,
            logging_steps=min(steps, CHECK_EVERY),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Dataset.from_list(_prompts(workload, steps)),
        processing_class=AutoTokenizer.from_pretrained(f"{place}/model"),
    )
    drift = None
    if attached is None:
        clock = _Clock(trainer, torch.device(device))
        trainer.train()
    else:
        options: dict[str, Any] = {"measure_only": True}
        if attached:
            options = {"check_gradients_every": CHECK_EVERY}
        with rl_consistency.attach(trainer, **options) as attachment:
            # After what `attach` does at the end of a step.
            clock = _Clock(trainer, torch.device(device))
            with clock.drift_timed():
                trainer.train()
            drift = attachment.drift
    found = clock.medians(CHECK_EVERY if attached else None)
    if attached:
        made = "consistency/gradient_check/checks"  # none where all rewards of a group are equal
        logged = [logs for logs in trainer.state.log_history if logs.get(made)]
        # In the first round of the regroupings some kernels are compiled.
        last = [logs["time/gradient_check_seconds"] for logs in logged[-len(REGROUPINGS) :]]
        found["check"] = fmean(last) / (PROMISED_EVERY * found["step"])
    if drift is not None:
        found |= {"tokens": drift.tokens, "mismatched": drift.mismatched_tokens}
    trainer.accelerator.free_memory()
    return found


class _Clock:
    """Times of a trainer's optimizer steps, and what their training parts allocate at the peak."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self._phases: list[dict[str, float]] = []
        self._peak = self._before = 0
        self._observed = 0.0
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._generated
        trainer.add_callback(_Steps(self))

    def begin(self) -> None:
        """Note the start of an optimizer step."""
        self._start, self._observed = finished_seconds(self._device), 0.0

    def _generated(self, *given: Any) -> Any:
        found = self._generate(*given)
        self._trained_from = finished_seconds(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return found

    def end(self) -> None:
        """Keep the times of an optimizer step that ends, and its peak."""
        end = finished_seconds(self._device)
        step = {"step": end - self._start, "training": end - self._trained_from}
        self._phases.append({**step, "monitor": self._observed / step["step"]})
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() + held_by_graphs()
            self._peak = max(self._peak, peak - self._before)

    @contextmanager
    def drift_timed(self) -> Iterator[None]:
        """Count the time of the drift monitor, which works when a step ends."""
        compare = RolloutDrift.on_step_end

        def timed(*given: Any, **more: Any) -> None:
            start = finished_seconds(self._device)
            compare(*given, **more)
            self._observed += finished_seconds(self._device) - start

        with mock.patch.object(RolloutDrift, "on_step_end", timed):
            yield

    def medians(self, check_every: int | None) -> dict[str, Any]:
        """Median times of the steps behind the warm-up that end without a check, and the peak."""
        counted = self._phases[min(WARM_UP, len(self._phases) - 1) :]
        if check_every:
            unchecked = [p for i, p in enumerate(self._phases) if i % check_every]
            counted = unchecked[WARM_UP:]
        names = ("step", "training", "monitor")
        return {n: median(p[n] for p in counted) for n in names} | {"peak": self._peak}


class _Steps(TrainerCallback):
    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def on_step_begin(self, *given: Any, **more: Any) -> None:
        self._clock.begin()

    def on_step_end(self, *given: Any, **more: Any) -> None:
        self._clock.end()


def variety(completions: list[str], **columns: Any) -> list[float | None]:
    """The share of characters that are not there before, as TRL calls a reward. Random weights do
    not meet it equally."""
    return [len(set(text)) / max(len(text), 1) for text in completions]


def variety_share(prompts: Any, completions: list[str], answers: Any, **extra: Any) -> Any:
    """`variety`, as a recipe calls it."""
    return variety(completions)


def _prompts(workload: Workload, steps: int) -> list[dict[str, str]]:
    """Texts of one token per character, so many tokens long."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return [
        {"prompt": "".join(draw.choices(letters, k=workload.prompt_len))}
        for _ in range(steps * workload.groups)
    ]


def _recipe_seconds(place: str, workload: Workload, micro_batch: int, device: str) -> float:
    """Median time of a step of our own trainer on the same work."""
    data = Path(place) / "prompts.jsonl"
    rows = (json.dumps({**row, "answer": "none"}) for row in _prompts(workload, WARM_UP + FEW))
    data.write_text("\n".join(rows), "utf-8")
    tree = {
        "run": {"name": "own", "device": device, "output_dir": f"{place}/own"},
        "policy": {"path": f"{place}/model", "dtype": "bfloat16"},
        "tokenizer": {"kind": "auto"},
        "data": {
            "path": str(data),
            "prompt_field": "prompt",
            "max_prompt_tokens": workload.prompt_len,
        },
        "reward": {"functions": [{"name": "benchmarks.trl.grpo:variety_share"}]},
        "rollout": {
            "prompts_per_step": workload.groups,
            "sampling": {"n": workload.group_size, "max_tokens": workload.longest},
            "max_batch_tokens": 16384,
        },
        "optimizer": {"learning_rate": 1e-6},
        "training": {"steps": WARM_UP + FEW, "micro_batch_size": micro_batch},
        "tracking": {"console": False},
    }
    train(RunConfig.model_validate(tree), announce=lambda line: None)
    lines = (Path(place) / "own" / "metrics.jsonl").read_text("utf-8").splitlines()
    times = [json.loads(line).get("time/step_seconds") for line in lines]
    return median([seconds for seconds in times if seconds is not None][WARM_UP:])
