"""TRL's GRPOTrainer on a tiny random Qwen3, with generation and training in the same bits.

    python examples/trl_grpo.py --measure-only     # as TRL does it: tokens differ
    python examples/trl_grpo.py                    # 0 tokens differ

One line is added to an ordinary TRL script: `rl_consistency.attach(trainer)`. The last line printed
is the number of tokens whose logprob differs between generation and training. Several processes:

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/trl_grpo.py
    accelerate launch --config_file recipes/accelerate/zero2.yaml examples/trl_grpo.py
"""

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import rl_consistency
from rl_consistency.trainers.data.tokenizer import byte_tokenizer

TINY = {
    **{"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 128, "tie_word_embeddings": True, "initializer_range": 0.2},
    **{"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258},
}


def save_tiny_model(directory: str) -> None:
    """What a model directory of your own holds: weights, a config, a tokenizer."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


def digits(completions: list[str], **columns: object) -> list[float]:
    """The share of characters that are digits: something to learn."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def on_this_machine() -> dict[str, Any]:
    """Nothing on a GPU. On a CPU `use_cpu=True` would make accelerate leave DeepSpeed out."""
    if torch.cuda.is_available():
        return {}
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    return {"ddp_backend": "gloo"} if deepspeed else {"use_cpu": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model directory; a tiny random Qwen3 without it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--measure-only", action="store_true", help="patch nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if (model := options.model) is None:
            save_tiny_model(model := f"{folder}/model")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=digits,
            args=GRPOConfig(
                output_dir=f"{folder}/run",
                max_steps=options.steps,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=16,
                gradient_accumulation_steps=2,
                learning_rate=1e-3,
                beta=0.05,
                bf16=False,  # autocast; bfloat16 weights are asked for by model_init_kwargs
                model_init_kwargs={"dtype": options.dtype},
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                **on_this_machine(),
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"{a}+{a}=" for a in range(32)]}),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        attachment = rl_consistency.attach(trainer, measure_only=options.measure_only)
        trainer.train()
        drift = attachment.drift
        print(f"{drift.mismatched_tokens} of {drift.tokens} tokens differ", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
