"""Trainers of TRL around a tiny random Qwen3, as a user would build them."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

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


def grpo(
    directory,
    tmp_path,
    *,
    model=None,
    config=GRPOConfig,
    trainer=GRPOTrainer,
    callbacks=None,
    **options,
):
    """A GRPOTrainer, or one of another class with the same arguments."""
    return trainer(
        callbacks=callbacks,
        model=model or loaded(directory),
        reward_funcs=distinct_tokens,
        args=config(output_dir=str(tmp_path), **(PLAIN | ROLLOUT | options)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )


def sft(directory, tmp_path, *, model=None, **options):
    """An SFTTrainer on lines of unequal lengths."""
    return SFTTrainer(
        model=model or loaded(directory),
        args=SFTConfig(
            output_dir=str(tmp_path), **(PLAIN | {"per_device_train_batch_size": 2} | options)
        ),
        train_dataset=Dataset.from_dict({"text": [f"{a}+{a}={'yes' * a}" for a in range(1, 8)]}),
        eval_dataset=Dataset.from_dict({"text": ["1+1=2", "20+20=40"]}),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )


def dpo(directory, tmp_path, *, model=None, **options):
    """A DPOTrainer on pairs of unequal lengths."""
    rows = [
        {"prompt": f"{a}+{a}=", "chosen": "yes" * a, "rejected": "no" * (a % 3 + 1)}
        for a in range(1, 8)
    ]
    return DPOTrainer(
        model=model or loaded(directory),
        args=DPOConfig(
            output_dir=str(tmp_path), **(PLAIN | {"per_device_train_batch_size": 2} | options)
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )


def plain(directory, tmp_path, *, model=None, trainer=Trainer, compute_loss_func=None, **options):
    """transformers' Trainer on the same lines, padded by hand."""
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def collate(rows):
        batch = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, "labels": labels}

    return trainer(
        model=model or loaded(directory),
        compute_loss_func=compute_loss_func,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            **(
                PLAIN | {"per_device_train_batch_size": 2, "remove_unused_columns": False} | options
            ),
        ),
        train_dataset=Dataset.from_dict({"text": [f"{a}+{a}={'yes' * a}" for a in range(1, 8)]}),
        eval_dataset=Dataset.from_dict({"text": ["1+1=2", "20+20=40"]}),
        data_collator=collate,
    )


def quick_at(name, cases):
    """Parameters of named cases, all but one of them thorough."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=key,
            marks=() if key == name else pytest.mark.thorough,
        )
        for key, case in cases.items()
    ]


def logged(trainer, key):
    """What the trainer logged by that name, in order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
