"""Small models of every family that vLLM is given, and the patched model it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rl_consistency as rlc
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.verify.presets import build_lifelike

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
EXPERTS = {
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64, "tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "qwen2": {},
    "mistral": {"sliding_window": 100},
    "qwen3_moe": {"head_dim": 64, **EXPERTS},
}
"""What a family has that others have not: tied weights, biases, rotation, a window, experts."""

Drawn = list[tuple[list[int], list[float]]]
"""Tokens and logprobs of each completion."""


def checkpoint(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A folder with a model of random lifelike weights in bf16, and a tokenizer of bytes."""
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | changes)
    model: Any = build_lifelike(config, torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}:"
    tokenizer.save_pretrained(folder)
    return folder


def random_prompts(name: str, lengths: Sequence[int], vocabulary: int = 1024) -> list[list[int]]:
    """Prompts of these lengths; the same ones for the same name."""
    draw = Random(name)
    return [draw.choices(range(3, vocabulary), k=length) for length in lengths]


def mixed_prompts() -> list[list[int]]:
    """20 of 5 to 700 tokens, six behind one head of 200, and two of 1,500."""
    lengths = Random(0)
    prompts = random_prompts("mixed", [lengths.randint(5, 700) for _ in range(20)])
    (head,) = random_prompts("head", [200])
    prompts += [head + tail for tail in random_prompts("tails", (1, 16, 17, 40, 56, 90))]
    return prompts + random_prompts("long", (1500, 1500))


def differing(found: Drawn, expected: Drawn) -> int:
    """Tokens of which the id or a bit of the fp32 logprob differs. ValueError on a logprob that is
    no number, and on completions of other lengths."""
    count = 0
    for (tokens, logprobs), (others, other_logprobs) in zip(found, expected, strict=True):
        one, two = (np.array(each, dtype=np.float32) for each in (logprobs, other_logprobs))
        if not (len(tokens) == len(others) == len(one) == len(two) > 0):
            raise ValueError(f"{len(tokens)} and {len(others)} tokens, {len(one)}, {len(two)}")
        if np.isnan(one).any() or np.isnan(two).any():
            raise ValueError("a logprob is no number")
        same = (np.array(tokens) == np.array(others)) & (one.view(np.int32) == two.view(np.int32))
        count += int((~same).sum())
    return count


@dataclass(frozen=True)
class Trainer:
    """The patched Hugging Face model of a checkpoint, on the GPU."""

    model: Any

    @classmethod
    def of(cls, folder: Path) -> Trainer:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        model.cuda().eval()
        rlc.patch(model)
        return cls(model)

    def scored(self, prompts: Sequence[list[int]], drawn: Drawn, **sampling: Any) -> Drawn:
        """The completions with the logprobs that training computes."""
        with torch.no_grad():
            scored = rlc.token_logprobs(
                self.model,
                [prompt + tokens for prompt, (tokens, _) in zip(prompts, drawn, strict=True)],
                prompt_lengths=[len(prompt) for prompt in prompts],
                sampling=rlc.SamplingParams(**sampling),
                check_support=False,
            ).split()
        return [
            (tokens, row.float().tolist()) for (tokens, _), row in zip(drawn, scored, strict=True)
        ]

    def completed(self, prompts: Sequence[list[int]], new: int, **sampling: Any) -> Drawn:
        """What our own engine draws for prompt i with seed i and prompt id i."""
        engine = rlc.RolloutEngine(
            self.model, eos_token_id=None, max_num_seqs=16, num_kv_blocks=1024, cuda_graphs=False
        )
        wanted = [
            rlc.SamplingParams(max_tokens=new, ignore_eos=True, seed=i, **sampling)
            for i in range(len(prompts))
        ]
        found = engine.generate(prompts, wanted, prompt_ids=list(range(len(prompts))))
        return [(list(each.token_ids), each.token_logprobs.tolist()) for each in found]

    def move(self, seed: int) -> None:
        """Change every weight, as an optimizer step would."""
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                noise = torch.randn(weight.shape, generator=generator, device="cuda")
                weight.add_((0.01 * noise * weight.abs().mean()).to(weight.dtype))

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Copies of all parameters by the checkpoint's names."""
        return [(name, each.detach().clone()) for name, each in self.model.named_parameters()]
