"""Whether a policy learns as well attached as stock: `python -m benchmarks.trl.learning [FILE]`.

On a CPU: forty steps of TRL's GRPOTrainer from the tiny random model of examples/trl_grpo.py, ten
seeds of each; the reward is the share of digits. A run's figure is its mean reward over the last
ten steps. Three seeds say little: they differ by up to 0.65.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import rl_consistency

ROOT = Path(__file__).resolve().parents[2]
STEPS, LAST, SEEDS = 40, 10, range(4, 14)


def reward_of(seed: int, *, attached: bool, steps: int = STEPS, last: int = LAST) -> float:
    """Mean reward over the last steps of a run."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    example = runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))
    with TemporaryDirectory() as place:
        example["save_tiny_model"](f"{place}/model")
        trainer = GRPOTrainer(
            model=f"{place}/model",
            reward_funcs=example["digits"],
            args=GRPOConfig(
                output_dir=f"{place}/run",
                max_steps=steps,
                seed=seed,
                per_device_train_batch_size=16,
                num_generations=8,
                gradient_accumulation_steps=2,
                max_completion_length=16,
                learning_rate=1e-3,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
                use_cpu=True,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"{a}+{a}=" for a in range(64)]}),
            processing_class=AutoTokenizer.from_pretrained(f"{place}/model"),
        )
        if attached:
            rl_consistency.attach(trainer)
        trainer.train()
    rewards = [logs["reward"] for logs in trainer.state.log_history if "reward" in logs]
    return mean(rewards[-last:])


def main() -> None:
    """Measure, print, and write the file if one is named."""
    found: dict[str, list[float]] = {"stock": [], "attached": []}
    for seed in SEEDS:
        for name, rewards in found.items():
            rewards.append(round(reward_of(seed, attached=name == "attached"), 4))
            print(f"seed {seed}, {name}: {rewards[-1]}", flush=True)
    low, high, reward = min(found["stock"]), max(found["stock"]), mean(found["attached"])
    print(f"stock {low} to {high}, mean {mean(found['stock']):.3f}; attached, mean {reward:.3f}")
    if len(sys.argv) > 1:
        text = json.dumps({"steps": STEPS, "seeds": list(SEEDS), "reward": found}, indent=1)
        Path(sys.argv[1]).write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
