"""An optimizer step of TRL's GRPOTrainer, as it comes and with `attach`, and of our own recipe.

All have the same random weights in bfloat16, prompts, lengths and optimizer (AdamW); the reward is
a function of the text. TRL as it comes generates with Hugging Face. `trl defaults` is a trainer
with fp32 weights under autocast, what TRL does unasked: its gradients are fp32 too, so memory is
set against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

import rl_consistency
from benchmarks.make_random_model import main as make_random_model
from benchmarks.recipe import phase_medians, random_prompts, recipe_steps, variety
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Suites, cases
from benchmarks.timing import Machine, against_stock, held_by_graphs
from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.parity.gradients import REGROUPINGS

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
    device = bench.device.type
    with TemporaryDirectory() as place:
        make_random_model(["--preset", model, "--device", device, f"{place}/model"])

        def run(steps: int, attached: bool | None, dtype: str, bf16: bool) -> dict[str, Any]:
            return _trl_run(place, workload, micro_batch, steps, device, attached, dtype, bf16)

        stock = run(WARM_UP + FEW, None, "bfloat16", False)
        defaults = run(WARM_UP + FEW, None, "float32", True)
        measured = run(1, False, "bfloat16", False)
        ours = run(STEPS, True, "bfloat16", False)
        rows = recipe_steps(place, device, workload, micro_batch=micro_batch)
        recipe = phase_medians(rows)["step"]
    name, tokens = "TRL with Hugging Face generation", workload.sequences * new_tokens
    return against_stock(ours["step"], stock["step"], name, tokens) | {
        "peers": {"trl defaults": defaults["step"] * 1e6, "own recipe": recipe * 1e6},
        "peak_bytes": {"ours": ours["peak"], "stock": stock["peak"]},
        "figures": {
            "training_ratio": stock["training"] / ours["training"],
            "strict/training_seconds": ours["training"],
            "stock/training_seconds": stock["training"],
            "trl_defaults/training_seconds": defaults["training"],
            "memory_times_trl_defaults": ours["peak"] / max(defaults["peak"], 1),
            "monitor_share": ours["monitor"],
            "gradient_check_share": ours["check"],
            "strict/tokens": ours["drift"].tokens,
            "strict/mismatched_tokens": ours["drift"].mismatched_tokens,
            "stock/tokens": measured["drift"].tokens,
            "stock/mismatched_tokens": measured["drift"].mismatched_tokens,
        },
    }


def _trl_run(
    place: str, workload: Workload, micro_batch: int, steps: int, device: str,
    attached: bool | None, dtype: str, bf16: bool,
) -> dict[str, Any]:  # fmt: skip
    """Train; `attached` None leaves the trainer as it is, False only measures its drift."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    prompts = random_prompts(steps * workload.groups, workload.prompt_len)
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
            bf16=bf16,
            use_cpu=device == "cpu",
            gradient_checkpointing=False,
            logging_steps=min(steps, CHECK_EVERY),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(f"{place}/model"),
    )
    found: dict[str, Any] = {}
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
            found["drift"] = attachment.drift
    found |= clock.medians(CHECK_EVERY if attached else None)
    if attached:
        made = "consistency/gradient_check/checks"  # none where all rewards of a group are equal
        logged = [logs for logs in trainer.state.log_history if logs.get(made)]
        # In the first round of the regroupings some kernels are compiled.
        last = [logs["time/gradient_check_seconds"] for logs in logged[-len(REGROUPINGS) :]]
        found["check"] = fmean(last) / (PROMISED_EVERY * found["step"])
    trainer.accelerator.free_memory()
    return found


class _Clock(TrainerCallback):
    """Times of a trainer's optimizer steps, and what their training parts allocate at the peak."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._device = device
        self._steps: list[dict[str, float]] = []
        self._peak = self._before = 0
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._generated
        trainer.add_callback(self)

    def on_step_begin(self, *given: Any, **more: Any) -> None:
        self._start, self._observed = finished_seconds(self._device), 0.0

    def _generated(self, *given: Any) -> Any:
        found = self._generate(*given)
        self._trained_from = finished_seconds(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return found

    def on_step_end(self, *given: Any, **more: Any) -> None:
        end = finished_seconds(self._device)
        step = {"step": end - self._start, "training": end - self._trained_from}
        self._steps.append({**step, "monitor": self._observed / step["step"]})
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
        steps = self._steps
        if check_every:
            steps = [step for i, step in enumerate(steps) if i % check_every]
        counted = steps[min(WARM_UP, len(steps) - 1) :]
        names = ("step", "training", "monitor")
        return {n: median(p[n] for p in counted) for n in names} | {"peak": self._peak}
