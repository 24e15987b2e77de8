"""Trainers of TRL around a tiny random Qwen3, as a user would build them."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

PROMPTS = [f"{a}+{b}=" for a in range(1, 12, 3) for b in range(1, 9, 2)]
PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "learning_rate": 1e-3,
    "max_steps": 2,
}
ROLLOUT = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "gradient_checkpointing": False,
}


def distinct_tokens(completions, **columns):
    """A reward that random weights do not meet equally."""
    return [len(set(completion)) / 6 for completion in completions]


def loaded(directory, **options):
    return AutoModelForCausalLM.from_pretrained(directory, **options)


def grpo(directory, tmp_path, *, model=None, config=GRPOConfig, trainer=GRPOTrainer, **options):
    """A GRPOTrainer, or one of another class with the same arguments."""
    return trainer(
        model=model or loaded(directory),
        reward_funcs=distinct_tokens,
        args=config(output_dir=str(tmp_path), **(PLAIN | ROLLOUT | options)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )


def logged(trainer, key):
    """What the trainer logged by that name, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
