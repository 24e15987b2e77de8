"""The suites of `python -m benchmarks ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from random import Random
from typing import Any

from benchmarks.models import model_config
from benchmarks.ops.attention import attention, attention_decode
from benchmarks.ops.dense import (
    drawn_tokens,
    gradient_fold,
    logprobs_and_gradients,
    product,
)
from benchmarks.ops.elementwise import WORKS, elementwise
from benchmarks.ops.experts import ROUTINGS, experts
from benchmarks.shapes import (
    EXPERTS,
    HEAD_DIMS,
    MODELS,
    ROWS,
    Sizes,
    draw_experts,
    draw_heads,
    draw_models,
    draw_products,
    rows,
    weights_of,
)
from benchmarks.suite import Choice, Suites, cases

TOKENS, CACHE_BYTES = 16384, 4 << 30
"""Tokens of a batch, and the most bytes of keys and values of a drawn decode step."""

RUNS: Mapping[str, tuple[str, str, Any]] = {
    "matmul_forward": ("matmul forward", "nt", partial(product, "nt")),
    "matmul_dx": ("matmul dX", "nn", partial(product, "nn")),
    "gradient_fold": ("dW fold", "folds", gradient_fold),
    "attention_forward": ("attention forward", "packed", partial(attention, False)),
    "attention_backward": ("attention backward", "packed", partial(attention, True)),
    "attention_decode": ("attention decode", "decode", attention_decode),
    "token_logprobs": ("token_logprobs forward + backward", "heads", logprobs_and_gradients),
    "sampling": ("draw tokens", "logits", drawn_tokens),
    "experts_forward": ("experts", "experts", partial(experts, False)),
    "experts_few": ("experts", "decoded experts", partial(experts, False)),
    "experts_step": ("experts forward + backward", "experts", partial(experts, True)),
}
"""Suite -> the work, whose sizes it takes, and the bench."""


def op_suites(choice: Choice) -> Suites:
    """Every op against its stock counterpart."""
    sizes = _sizes(MODELS)
    if choice.tiny:
        sizes = _tiny_sizes()
    elif choice.seed is not None:
        sizes = _drawn_sizes(choice.seed)
    found = {n: cases(work, run, sizes[of]) for n, (work, of, run) in RUNS.items()}
    found["elementwise"] = [
        case
        for name in WORKS
        for backward in (False, True)
        for case in cases(
            f"{name} backward" if backward else name,
            partial(elementwise, name, backward),
            sizes["layers"],
        )
    ]
    return found


def _sizes(models: Sequence[str]) -> dict[str, Sequence[Sizes]]:
    """Those of the models that people train."""
    lengths, contexts = (2048, 4096, 8192, 16384), (2048, 8192, 32768)
    heads = [{"heads": text, "head_dim": 128} for text in ("16/8", "32/8")]
    every = [shape | {"routing": r} for shape in EXPERTS for r in ROUTINGS]
    weights = weights_of(models)
    return {
        "nt": [{"m": m, "n": n, "k": k} for n, k in weights for m in ROWS],
        "nn": [{"m": m, "n": n, "k": k} for k, n in weights for m in ROWS],
        "folds": [{"tokens": t, "n": n, "k": k} for n, k in weights for t in ROWS[10:]],
        "packed": [{"length": n, "batch": TOKENS // n} | h for h in heads for n in lengths],
        "decode": [
            {"batch": b, "context": n} | h
            for h in heads
            for b in (1, 4, 16, 64, 256)
            for n in contexts
        ],
        **_layers(models, 8192),
        "experts": [{"tokens": t} | shape for shape in every for t in (2048, 4096, 16384)],
        "decoded experts": [{"tokens": t} | shape for shape in every for t in (1, 8, 64, 256)],
    }


def _layers(models: Sequence[str], tokens: int) -> dict[str, Sequence[Sizes]]:
    """Ops over the hidden states and the logits of models."""
    configs = [model_config(name) for name in models]
    pairs = dict.fromkeys((config.hidden_size, config.vocab_size) for config in configs)
    return {
        "layers": [{"model": name, "tokens": tokens} for name in models],
        "heads": [{"tokens": tokens, "width": w, "vocabulary": v} for w, v in pairs],
        "logits": [{"tokens": t, "vocabulary": v} for v in {v for _, v in pairs} for t in (1, 64)],
    }


def _drawn_sizes(seed: int) -> dict[str, Sequence[Sizes]]:
    """Those of a seed: products, folds and layers of three models, mixtures of experts."""
    rng, models, turns = Random(f"ops {seed}"), draw_models(seed, 3), cycle(ROUTINGS)
    products = list(draw_products(rng, models))
    found = {layout: [size for of, size in products if of == layout] for layout in ("nt", "nn")}
    packed, decode = [], []
    for dim in (*HEAD_DIMS, *HEAD_DIMS):
        length, context, heads = rows(rng, 256, TOKENS), rows(rng, 256, 32768), draw_heads(rng, dim)
        packed.append({"length": length, "batch": TOKENS // length} | heads)
        key_bytes = 4 * context * dim * int(heads["heads"].split("/")[1])
        batch = rows(rng, 1, min(256, CACHE_BYTES // key_bytes))
        decode.append({"batch": batch, "context": context} | heads)

    def routed(count: int, low: int, high: int) -> list[Sizes]:
        return [
            {"tokens": rows(rng, low, high), **draw_experts(rng), "routing": next(turns)}
            for _ in range(count)
        ]

    return {
        **found,
        "folds": [{"tokens": rows(rng, 256, 32768), "n": n, "k": k} for n, k in weights_of(models)],
        "packed": packed,
        "decode": decode,
        **_layers(models, rows(rng, 1024, 8192)),
        "experts": routed(6, 2048, TOKENS),
        "decoded experts": routed(9, 1, 256),
    }


def _tiny_sizes() -> dict[str, Sequence[Sizes]]:
    sparse = {"hidden": 64, "intermediate": 48, "experts": 8, "top_k": 3}
    every = [sparse | {"routing": routing} for routing in ROUTINGS]
    products = [{"m": m, "n": n, "k": k} for m in (1, 300) for n, k in ((48, 32), (32, 96))]
    shapes = (("4/2", 128, 32), ("6/2", 80, 24), ("3/1", 48, 21))
    heads = [({"heads": text, "head_dim": dim}, length) for text, dim, length in shapes]
    return {
        "nt": products,
        "nn": products,
        "folds": [{"tokens": 32, "n": 48, "k": 32}],
        "packed": [{"length": length, "batch": 2} | each for each, length in heads],
        "decode": [{"batch": 2, "context": length} | each for each, length in heads],
        **_layers(["tiny-qwen3"], 32),
        "experts": [{"tokens": 300} | shape for shape in every],
        "decoded experts": [{"tokens": 5} | shape for shape in every],
    }
