"""An optimizer step of TRL's GRPOTrainer, as it comes and with `attach`, and of our own recipe.

All have the same random weights in bfloat16, prompts, lengths and optimizer (AdamW); the reward is
a function of the text. TRL as it comes generates with Hugging Face. `trl defaults` is a trainer
with fp32 weights under autocast, what TRL does unasked: its gradients are fp32 too, so memory is
set against it.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import TrainerCallback

import rl_consistency
from benchmarks.make_random_model import main as make_random_model
from benchmarks.recipe import phase_medians, random_prompts, recipe_steps, variety
from benchmarks.rollout.workload import Workload
from benchmarks.suite import Choice, Suites, cases
from benchmarks.timing import Machine, peak_bytes, row_fields
from rl_consistency.numerics.clock import finished_seconds

STEPS, WARM_UP = 30, 2
"""Attached; the others take as many warm-up steps and FEW more, since they are slow."""
FEW = 3
CHECK_EVERY = 3
"""Attached steps from one check of the gradients to the next, whose own step does not count."""


def trl_suites(choice: Choice) -> Suites:
    """The suite of `python -m benchmarks trl`."""
    model, workload, micro_batch = "qwen3-0.6b", Workload.equal(8, 8, 256, 256), 16
    if choice.tiny:
        model, workload, micro_batch = "tiny-qwen3", Workload.equal(2, 2, 8, 8), 2
    shape = {"model": model, **workload.shape, "micro_batch": micro_batch}
    return {"trl_grpo": cases("TRL GRPO step", trl_grpo, [shape])}


def trl_grpo(
    bench: Machine, model: str, sequences: int, group: int, prompt: int, new_tokens: int,
    micro_batch: int,
) -> dict[str, Any]:  # fmt: skip
    """Times of a step and of its training part, peaks of the training part, differing tokens."""
    workload = Workload.equal(sequences // group, group, prompt, new_tokens)
    device = bench.device.type
    with TemporaryDirectory() as place:
        make_random_model(["--preset", model, "--device", device, f"{place}/model"])
        given = place, workload, micro_batch, bench.device
        stock = _trl_run(*given, steps=WARM_UP + FEW)
        defaults = _trl_run(*given, steps=WARM_UP + FEW, dtype="float32", bf16=True)
        measured = _trl_run(*given, steps=1, attach={"measure_only": True})
        ours = _trl_run(*given, steps=STEPS, attach={"check_gradients_every": CHECK_EVERY})
        rows = recipe_steps(place, device, workload, micro_batch=micro_batch)
    name, tokens = "TRL with Hugging Face generation", workload.sequences * new_tokens
    times = {"ours": ours["step"], name: stock["step"]}
    times |= {"trl defaults": defaults["step"], "own recipe": phase_medians(rows)["step"]}
    return row_fields(times, [name], tokens=tokens) | {
        "peak_bytes": {"ours": ours["peak"], "stock": stock["peak"]},
        "figures": {
            "training_ratio": stock["training"] / ours["training"],
            "strict/training_seconds": ours["training"],
            "stock/training_seconds": stock["training"],
            "trl_defaults/training_seconds": defaults["training"],
            "memory_times_trl_defaults": ours["peak"] / max(defaults["peak"], 1),
            "strict/tokens": ours["drift"].tokens,
            "strict/mismatched_tokens": ours["drift"].mismatched_tokens,
            "stock/tokens": measured["drift"].tokens,
            "stock/mismatched_tokens": measured["drift"].mismatched_tokens,
        },
    }


def _trl_run(
    place: str, workload: Workload, micro_batch: int, device: torch.device, *, steps: int,
    attach: dict[str, Any] | None = None, dtype: str = "bfloat16", bf16: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train, and give median times of the steps behind the warm-up that end without a check, and
    the peak; with options for `attach` also the `drift`."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

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
            use_cpu=device.type == "cpu",
            gradient_checkpointing=False,
            logging_steps=min(steps, CHECK_EVERY),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            random_prompts(steps * workload.groups, workload.prompt_len)
        ),
        processing_class=AutoTokenizer.from_pretrained(f"{place}/model"),
    )
    given = nullcontext() if attach is None else rl_consistency.attach(trainer, **attach)
    with given as attachment:
        # After what `attach` does at the end of a step.
        clock = _Clock(trainer, device)
        trainer.train()
        drift = getattr(attachment, "drift", None)
    trainer.accelerator.free_memory()
    checked = "check_gradients_every" in (attach or {})
    counted = [s for i, s in enumerate(clock.steps) if not checked or i % CHECK_EVERY]
    counted = counted[min(WARM_UP, len(counted) - 1) :]
    step, training = (median(each) for each in zip(*counted, strict=True))
    return {"drift": drift, "step": step, "training": training, "peak": max(clock.peaks)}


class _Clock(TrainerCallback):
    """Times of a trainer's optimizer steps, and what their training parts allocate at the peak."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._device = device
        self.steps: list[tuple[float, float]] = []
        """Seconds of each step, and of its training part."""
        self.peaks: list[int] = []
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._generated
        trainer.add_callback(self)

    def on_step_begin(self, *given: Any, **more: Any) -> None:
        self._start = finished_seconds(self._device)

    def _generated(self, *given: Any) -> Any:
        found = self._generate(*given)
        self._trained_from = finished_seconds(self._device)
        self._training = ExitStack()
        self._peak = self._training.enter_context(peak_bytes(self._device))
        return found

    def on_step_end(self, *given: Any, **more: Any) -> None:
        end = finished_seconds(self._device)
        self.steps.append((end - self._start, end - self._trained_from))
        self._training.close()
        self.peaks += self._peak
