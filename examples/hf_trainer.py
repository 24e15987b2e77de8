"""transformers' Trainer on a tiny random Llama: the weights do not depend on how a batch is cut.

    python examples/hf_trainer.py --stock     # as it is: other weights for each cut
    python examples/hf_trainer.py             # one digest

Every cut trains on the same 8 lines a step, as 8 x 1, 4 x 2, 2 x 4 or 1 x 8 of them at a time.
"""

import argparse
import tempfile

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import rl_consistency
from rl_consistency.trainers.data.tokenizer import byte_tokenizer

LINES = [" plus ".join(["one"] * n) + f" is {n}." for n in range(1, 17)]
TOKENIZER = byte_tokenizer()


def collate(lines: list[str]) -> dict[str, Tensor]:
    """Padded ids, their mask, and labels that leave padding out."""
    batch = TOKENIZER(lines, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def digest_after(micro_batch: int, attached: bool, folder: str) -> str:
    """`model_digest` of a model that was trained with one cut."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        pad_token_id=256, bos_token_id=257, eos_token_id=258,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=8 // micro_batch,
            learning_rate=1e-3,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=LINES,
        data_collator=collate,
    )
    if attached:
        rl_consistency.attach(trainer)
    trainer.train()
    return rl_consistency.model_digest(trainer.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stock", action="store_true", help="attach nothing")
    options = parser.parse_args()
    digests = []
    for micro_batch in (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            digests.append(digest_after(micro_batch, not options.stock, folder))
        print(f"{8 // micro_batch} x {micro_batch}  {digests[-1][:12]}", flush=True)
    print(f"digests of {len(digests)} cuts: {len(set(digests))}")


if __name__ == "__main__":
    main()
