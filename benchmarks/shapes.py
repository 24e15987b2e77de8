"""Sizes that several benches share: those of the models people train with this library."""

from __future__ import annotations

WEIGHTS = (
    (1024, 1024),  # Qwen3-0.6B key, value
    (2048, 1024),  # Qwen3-0.6B query
    (1024, 2048),  # Qwen3-0.6B output; Qwen3-1.7B key, value
    (3072, 1024),  # Qwen3-0.6B gate, up
    (1024, 3072),  # Qwen3-0.6B down
    (2048, 2048),  # Qwen3-1.7B query, output
    (6144, 2048),  # Qwen3-1.7B gate, up
    (2048, 6144),  # Qwen3-1.7B down
    (1024, 4096),  # Qwen3-8B and Llama-3-8B key, value
    (4096, 4096),  # Qwen3-8B and Llama-3-8B query, output
    (14336, 4096),  # Llama-3-8B gate, up
    (4096, 12288),  # Qwen3-8B down
    (151936, 1024),  # Qwen3-0.6B LM head
    (151936, 4096),  # Qwen3-8B LM head
)
"""Weights [n, k] of the models' layers."""

ROWS = tuple(2**i for i in range(15))
"""Rows of a matmul: decode batches of 1 up to packed batches of 16,384 tokens."""

BANDS = ((1, 16), (17, 128), (129, 1024), (1025, 16384))
"""Numbers of rows by which products of random shapes are judged."""

NAMED = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b",
    "llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "mistral-7b",
)  # fmt: skip
"""Dense models whose training and decode steps have bars; of the largest, the first layers do."""

NAMED_SPARSE = ("qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b")
"""Mixtures of experts, likewise."""

FOLDS = (
    (4096, 4096, 4096), (8192, 6144, 4096), (16384, 3072, 1024), (16384, 1024, 3072),
    (16384, 2048, 2048), (16384, 12288, 4096),
)  # fmt: skip
"""Tokens, n and k at which the schedules of the gradient fold are tuned."""

EXPERTS = {
    "qwen3_moe": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "olmoe": {"hidden": 2048, "intermediate": 1024, "experts": 64, "top_k": 8},
    "mixtral": {"hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2},
}
"""Mixtures of experts by family: those of Qwen3-30B-A3B, OLMoE-1B-7B and Mixtral-8x7B."""

HEADS = ("16/8", "32/8")
"""Query heads / key and value heads of the Qwen3 models up to 1.7B and of the 8B models."""

HEAD_DIM = 128
CACHE_BLOCK = 16
VOCABULARY = 151936
