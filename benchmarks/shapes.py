"""Shapes of the benches: those of the models people train, and shapes that no table was tuned for.

The latter are drawn by a seed: the same seed gives the same shapes. Widths are hidden sizes of 576
to 8192, intermediate sizes up to 29k, keys and values of 128 to 2048 columns, vocabularies of 32k
to 256k; most are multiples of 64, some only of 16. A weight of `WEIGHTS` or `FOLDS` is drawn again,
whatever its direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from benchmarks.models import ModelSizes

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

HIDDEN, INTERMEDIATE = (576, 8192), (1536, 29696)
KEYS_VALUES, VOCABULARIES = (128, 2048), (32768, 262144)
ROWS, TOKENS = (1, 16384), (256, 32768)
HEAD_ROWS = 2048
"""The most rows of a product with an LM head: a rollout or a chunk of a loss has no more."""

Sizes = dict[str, Any]
"""A shape as a case takes it."""

BYTES, OPERATIONS = 2 << 30, 4e12
"""The most that a product's operands and result take, and its multiplications and additions."""

TUNED = frozenset(
    weight for n, k in (*WEIGHTS, *(fold[1:] for fold in FOLDS)) for weight in ((n, k), (k, n))
)
"""Weights whose schedules were measured."""

TUNED_WIDTHS = frozenset(k for _, k in WEIGHTS)
"""Sizes of hidden states whose layers are among them."""

HEAD_DIMS, GROUPS = (64, 80, 96, 128, 256), (1, 2, 3, 4, 5, 6, 7, 8)
"""Head sizes, and query heads for each key head."""

ATTENTION_TOKENS = 16384
CACHE_BYTES = 4 << 30
"""The most that the keys and values of a decode case take."""

LOGITS = 1 << 31
"""The most logits that a stock loss, which makes them all in fp32, is given."""

EXPERT_COUNTS, TOP_K = (4, 8, 16, 32, 60, 64, 128, 160, 256), (1, 2, 4, 6, 8)
EXPERT_INTERMEDIATE = (256, 14336)

MODEL_FAMILIES = ("llama", "qwen2", "qwen3")
MODEL_HIDDEN = (576, 4096)


def draw_products(seed: int, count: int, rows: tuple[int, int] = ROWS) -> list[Sizes]:
    """`count` different products: layout "nt" or "nn", m within `rows`, n and k."""

    def shape(rng: Random) -> Sizes | None:
        layout, head, weight = rng.choice(("nt", "nn")), *_weight(rng)
        n, k = weight if layout == "nt" else weight[::-1]
        m = _rows(rng, *rows)
        if (head and m > HEAD_ROWS) or not _within(2 * (m * k + n * k + m * n), 2.0 * m * n * k):
            return None
        return {"layout": layout, "m": m, "n": n, "k": k}

    return _different(Random(f"products {seed} {rows}"), count, shape)


def draw_folds(seed: int, count: int) -> list[Sizes]:
    """`count` different gradient folds: tokens, n and k."""

    def shape(rng: Random) -> Sizes | None:
        (_, (n, k)), tokens = _weight(rng), _rows(rng, *TOKENS)
        if not _within(2 * tokens * (n + k) + 4 * n * k, 2.0 * tokens * n * k):
            return None
        return {"tokens": tokens, "n": n, "k": k}

    return _different(Random(f"folds {seed}"), count, shape)


def draw_attention(seed: int, each: int) -> list[Sizes]:
    """Causal attention over equal sequences, `each` of every head size: length, batch, head_dim and
    heads as "16/8"."""

    def shape(dim: int, rng: Random) -> Sizes | None:
        length = _rows(rng, 256, ATTENTION_TOKENS)
        batch, heads = ATTENTION_TOKENS // length, _heads(rng, dim)
        return heads and {"length": length, "batch": batch} | heads

    return _of_head_sizes(f"attention {seed}", each, shape)


def draw_decode(seed: int, each: int) -> list[Sizes]:
    """Paged decode, `each` of every head size: batch, context, head_dim and heads."""

    def shape(dim: int, rng: Random) -> Sizes | None:
        batch, context, heads = _rows(rng, 1, 256), _rows(rng, 256, 32768), _heads(rng, dim)
        if heads is None or 4 * batch * context * _kv_heads(heads) * dim > CACHE_BYTES:
            return None
        return {"batch": batch, "context": context} | heads

    return _of_head_sizes(f"decode {seed}", each, shape)


def draw_widths(seed: int, count: int) -> list[Sizes]:
    """Tokens, width and vocabulary of an embedding, an LM head or an op over hidden states."""

    def shape(rng: Random) -> Sizes | None:
        tokens, width = _rows(rng, 1024, 16384), _width(rng, *MODEL_HIDDEN)
        vocabulary = _width(rng, *VOCABULARIES)
        if width in TUNED_WIDTHS or tokens * vocabulary > LOGITS:
            return None
        return {"tokens": tokens, "width": width, "vocabulary": vocabulary}

    return _different(Random(f"widths {seed}"), count, shape)


def draw_experts(seed: int, count: int, rows: tuple[int, int]) -> list[Sizes]:
    """Mixtures of experts: tokens within `rows`, hidden, intermediate, experts and top_k."""

    def shape(rng: Random) -> Sizes | None:
        tokens, hidden = _rows(rng, *rows), _width(rng, *MODEL_HIDDEN)
        inner = _multiple(hidden * rng.uniform(0.2, 3.5), 64, *EXPERT_INTERMEDIATE)
        sizes = {"hidden": hidden, "intermediate": inner, "experts": rng.choice(EXPERT_COUNTS)}
        sizes["top_k"] = rng.choice([k for k in TOP_K if 2 * k <= sizes["experts"]])
        if sizes in EXPERTS.values() or 6 * sizes["experts"] * hidden * inner > BYTES:
            return None
        return {"tokens": tokens} | sizes

    return _different(Random(f"experts {seed} {rows}"), count, shape)


def draw_models(seed: int, count: int) -> list[str]:
    """Names of small dense models, of 2 to 4 layers: `ModelSizes.named` reads them."""

    def shape(rng: Random) -> Sizes | None:
        family, dim = rng.choice(MODEL_FAMILIES), rng.choice([d for d in HEAD_DIMS if d <= 128])
        hidden, group = _width(rng, *MODEL_HIDDEN), rng.choice(GROUPS)
        kv_heads = max(round(hidden / (group * dim)), 1)
        if family != "qwen3":  # the others want query heads as wide as the hidden states
            hidden = kv_heads * group * dim
        if hidden in TUNED_WIDTHS or not MODEL_HIDDEN[0] <= hidden <= MODEL_HIDDEN[1]:
            return None
        sizes = ModelSizes(
            family=family,
            layers=rng.randint(2, 4),
            hidden=hidden,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=dim,
            intermediate=_gated(rng, hidden),
            vocabulary=_width(rng, *VOCABULARIES),
            tied=rng.random() < 0.5,
        )
        return {"model": sizes.name}

    return [sizes["model"] for sizes in _different(Random(f"models {seed}"), count, shape)]


def draw_workloads(seed: int, count: int) -> list[Sizes]:
    """Sequences to decode: groups, of which each is one, and prompt_len."""

    def shape(rng: Random) -> Sizes:
        return {"groups": _rows(rng, 1, 256), "prompt_len": _rows(rng, 100, 1000)}

    return _different(Random(f"workloads {seed}"), count, shape)


def _of_head_sizes(
    text: str, each: int, draw: Callable[[int, Random], Sizes | None]
) -> list[Sizes]:
    drawn = (_different(Random(f"{text} {d}"), each, partial(draw, d)) for d in HEAD_DIMS)
    return [sizes for shapes in drawn for sizes in shapes]


def _heads(rng: Random, dim: int) -> Sizes | None:
    """Query and key heads of a size; None for too many, and for those of a table."""
    kv_heads = rng.randint(1, KEYS_VALUES[1] // dim)
    heads = kv_heads * rng.choice(GROUPS)
    text = f"{heads}/{kv_heads}"
    if heads * dim > HIDDEN[1] or (dim == HEAD_DIM and text in HEADS):
        return None
    return {"heads": text, "head_dim": dim}


def _kv_heads(heads: Sizes) -> int:
    return int(heads["heads"].split("/")[1])


def _different(rng: Random, count: int, draw: Callable[[Random], Sizes | None]) -> list[Sizes]:
    """`count` different shapes; `draw` gives None for one that is too large."""

    found: dict[tuple[tuple[str, Any], ...], Sizes] = {}
    while len(found) < count:
        if shape := draw(rng):
            found[tuple(shape.items())] = shape
    return list(found.values())


def _within(held: int, operations: float) -> bool:
    return held <= BYTES and operations <= OPERATIONS


def _weight(rng: Random) -> tuple[bool, tuple[int, int]]:
    """Whether it is an LM head, and the weight's output and input features."""
    while True:
        hidden = _width(rng, *HIDDEN)
        kinds = ("query", "output", "key", "up", "down", "head")
        (kind,) = rng.choices(kinds, weights=(2, 2, 2, 3, 3, 1))
        if kind in ("query", "output"):
            other = rng.choice((hidden, _width(rng, *HIDDEN)))
        elif kind == "key":
            other = _width(rng, *KEYS_VALUES)
        elif kind == "head":
            other = _width(rng, *VOCABULARIES)
        else:
            other = _gated(rng, hidden)
        weight = (hidden, other) if kind in ("output", "down") else (other, hidden)
        if weight not in TUNED:
            return kind == "head", weight


def _gated(rng: Random, hidden: int) -> int:
    """The width of a gated unit: 2 to 5 times that of the hidden states."""
    return _multiple(hidden * rng.uniform(2, 5), 64, *INTERMEDIATE)


def _width(rng: Random, low: int, high: int) -> int:
    """A multiple of 64, one time in eight of 16 only, evenly spread on a log scale."""
    return _multiple(_log_uniform(rng, low, high), 16 if rng.random() < 1 / 8 else 64, low, high)


def _multiple(value: float, step: int, low: int, high: int) -> int:
    return min(max(round(value / step) * step, low), high)


def _rows(rng: Random, low: int, high: int) -> int:
    """Rows or tokens, evenly spread on a log scale: any number, a round one such as 700, or a power
    of two."""
    value = _log_uniform(rng, low, high)
    style = rng.choice(("any", "round", "power"))
    if style == "round":
        value = round(value, 1 - math.floor(math.log10(value)))
    elif style == "power":
        value = 2 ** round(math.log2(value))
    return min(max(round(value), low), high)


def _log_uniform(rng: Random, low: int, high: int) -> float:
    return low * (high / low) ** rng.random()
