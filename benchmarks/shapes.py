"""Shapes of the benches: those of models that people train, and those that no table was tuned for.

The latter are drawn by a seed: the same seed gives the same shapes. Hidden states of 576 to 4096
columns, vocabularies of 32k to 256k; most widths are multiples of 64, some only of 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from benchmarks.models import model_config
from rl_consistency.cases.case import shapes_of

Sizes = dict[str, Any]
"""A shape as a case takes it."""

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "llama3-8b")
EXPERTS: tuple[Sizes, ...] = (
    {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    {"hidden": 2048, "intermediate": 1024, "experts": 64, "top_k": 8},
    {"hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2},
)
"""The mixtures of Qwen3-30B-A3B, OLMoE-1B-7B and Mixtral-8x7B."""

ROWS = tuple(2**i for i in range(15))
"""Rows of a matmul: decode batches of 1 up to packed batches of 16,384 tokens."""
BANDS = ((1, 16), (17, 128), (129, 1024), (1025, 16384))
"""Numbers of rows by which products of random shapes are judged."""
HEAD_ROWS = 2048
"""The most rows of a drawn product with an LM head: a rollout or a chunk of a loss has no more."""

TUNED_WIDTHS = (1024, 2048, 3072, 4096)
"""Hidden states whose layers have schedules that were measured."""
HEAD_DIMS, GROUPS = (64, 80, 96, 128, 256), (1, 2, 3, 4, 5, 6, 7, 8)
"""Head sizes, and query heads for each key head."""
HIDDEN, VOCABULARIES = (576, 4096), (32768, 262144)
EXPERT_COUNTS, TOP_K = (4, 8, 16, 32, 60, 64, 128, 160, 256), (1, 2, 4, 6, 8)
EXPERT_BYTES = 2 << 30
"""The most that the weights of a drawn mixture of experts take."""


def weights_of(models: Sequence[str]) -> list[tuple[int, int]]:
    """The weights [n, k] of the layers and the LM heads of some models, each once."""
    found: dict[tuple[int, int], None] = {}
    for model in models:
        shapes = shapes_of(model, model_config(model))
        found |= dict.fromkeys((n, k) for k, n in shapes.linear)
        found[shapes.vocab_size, shapes.hidden_size] = None
    return list(found)


def draw_products(rng: Random, models: Sequence[str]) -> Iterator[tuple[str, Sizes]]:
    """ "nt" or "nn", and a product with m in each band, for every weight of some models."""
    for n, k in weights_of(models):
        for low, high in BANDS:
            most = min(high, HEAD_ROWS) if n >= VOCABULARIES[0] else high
            layout, m = rng.choice(("nt", "nn")), rows(rng, low, most)
            yield layout, {"m": m, "n": n if layout == "nt" else k, "k": k if layout == "nt" else n}


def draw_heads(rng: Random, dim: int) -> Sizes:
    """Query and key heads of a size, as "16/8"; at most 2,048 columns of keys, 8,192 of queries."""
    kv_heads = rng.randint(1, 2048 // dim)
    group = rng.choice([g for g in GROUPS if kv_heads * g * dim <= 8192])
    return {"heads": f"{kv_heads * group}/{kv_heads}", "head_dim": dim}


def draw_experts(rng: Random) -> Sizes:
    """A mixture of experts that no table has seen: hidden, intermediate, experts and top_k."""
    while True:
        hidden, experts = _width(rng, *HIDDEN), rng.choice(EXPERT_COUNTS)
        inner = _multiple(hidden * rng.uniform(0.2, 3.5), 64, 256, 14336)
        top_k = rng.choice([k for k in TOP_K if 2 * k <= experts])
        sizes = {"hidden": hidden, "intermediate": inner, "experts": experts, "top_k": top_k}
        if sizes not in EXPERTS and 6 * experts * hidden * inner <= EXPERT_BYTES:
            return sizes


def draw_models(seed: int, count: int) -> list[str]:
    """Names of small dense models, of 2 to 4 layers, as `models.NAME` reads them."""
    rng, found = Random(f"models {seed}"), []
    while len(found) < count:
        family, dim = rng.choice(("llama", "qwen2", "qwen3")), rng.choice(HEAD_DIMS[:-1])
        hidden, group = _width(rng, *HIDDEN), rng.choice(GROUPS)
        kv_heads = max(round(hidden / (group * dim)), 1)
        if family != "qwen3":  # the others want query heads as wide as the hidden states
            hidden = kv_heads * group * dim
        if hidden in TUNED_WIDTHS or not HIDDEN[0] <= hidden <= HIDDEN[1]:
            continue
        layers, inner = rng.randint(2, 4), _multiple(hidden * rng.uniform(2, 5), 64, 1536, 29696)
        heads, vocabulary = f"{kv_heads * group}/{kv_heads}x{dim}", _width(rng, *VOCABULARIES)
        tied = "-tied" if rng.random() < 0.5 else ""
        found.append(f"{family}-{layers}x{hidden}-{heads}-{inner}-{vocabulary}{tied}")
    return found


def rows(rng: Random, low: int, high: int) -> int:
    """Rows or tokens, evenly spread on a log scale: any number, a round one such as 700, or a power
    of two."""
    value = low * (high / low) ** rng.random()
    style = rng.choice(("any", "round", "power"))
    if style == "round":
        value = round(value, 1 - math.floor(math.log10(value)))
    elif style == "power":
        value = 2 ** round(math.log2(value))
    return min(max(round(value), low), high)


def _width(rng: Random, low: int, high: int) -> int:
    """A multiple of 64, one time in eight of 16 only, evenly spread on a log scale."""
    value, step = low * (high / low) ** rng.random(), 16 if rng.random() < 1 / 8 else 64
    return _multiple(value, step, low, high)


def _multiple(value: float, step: int, low: int, high: int) -> int:
    return min(max(round(value / step) * step, low), high)
