"""Sizes that the benches measure: those of the models people train with this library."""

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

FOLD_TOKENS = (1024, 2048, 4096, 8192, 16384)
"""Tokens of one gradient fold."""

HEADS = ((16, 8), (32, 8))
"""(query heads, key and value heads) of the Qwen3 models up to 1.7B and of the 8B models."""

HEAD_DIM = 128

PREFILL_LENGTHS = (2048, 4096, 8192, 16384)
PREFILL_TOKENS = 16384
"""Tokens of one packed call, whatever the length of its sequences."""

DECODE_BATCHES = (1, 4, 16, 64, 256)
DECODE_CONTEXTS = (2048, 8192, 32768)
CACHE_BLOCK = 16

ROW_SHAPES = ((8192, 1024), (8192, 4096), (16384, 4096))
"""(tokens, width) of the ops that are bound by memory."""

VOCABULARY = 151936
LOGPROB_TOKENS = 8192
LOGPROB_WIDTHS = (1024, 2048, 4096)

STEP_MODELS = ("qwen3-0.6b", "qwen3-1.7b")
STEP_BATCHES = ((16, 1024), (8, 2048))
"""(sequences, tokens of each) of one training step."""
