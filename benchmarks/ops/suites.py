"""The suites of `python -m benchmarks ops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, product
from random import Random
from typing import Any

from benchmarks.models import model_config
from benchmarks.ops import dense
from benchmarks.ops.attention import attention, attention_decode
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
    "matmul_forward": ("matmul forward", "nt", partial(dense.product, "nt")),
    "matmul_dx": ("matmul dX", "nn", partial(dense.product, "nn")),
    "gradient_fold": ("dW fold", "folds", dense.gradient_fold),
    "attention_forward": ("attention forward", "packed", partial(attention, False)),
    "attention_backward": ("attention backward", "packed", partial(attention, True)),
    "attention_decode": ("attention decode", "decode", attention_decode),
    "token_logprobs": ("token_logprobs forward + backward", "heads", dense.logprobs_and_gradients),
    "sampling": ("draw tokens", "logits", dense.drawn_tokens),
    "experts_forward": ("experts", "experts", partial(experts, False)),
    "experts_few": ("experts", "decoded experts", partial(experts, False)),
    "experts_step": ("experts forward + backward", "experts", partial(experts, True)),
}
"""Suite -> the work, whose sizes it takes, and the bench."""


def op_suites(choice: Choice) -> Suites:
    """Every op against its stock counterpart."""
    if choice.tiny:
        sizes = _tiny_sizes()
    else:
        sizes = _sizes() if choice.seed is None else _drawn_sizes(choice.seed)
    found = {n: cases(work, run, sizes[of]) for n, (work, of, run) in RUNS.items()}
    found["elementwise"] = []
    for name, backward in product(WORKS, (False, True)):
        work, run = f"{name}{' backward' * backward}", partial(elementwise, name, backward)
        found["elementwise"] += cases(work, run, sizes["layers"])
    return found


def _all(shapes: Sequence[Sizes] = ({},), **choices: Sequence[Any]) -> list[Sizes]:
    """Every shape with every combination."""
    chosen = [dict(zip(choices, each, strict=True)) for each in product(*choices.values())]
    return [{**shape, **each} for shape in shapes for each in chosen]


def _sizes() -> dict[str, Sequence[Sizes]]:
    """Those of the models that people train."""
    weights = weights_of(MODELS)
    heads = _all(heads=("16/8", "32/8"), head_dim=(128,))
    packed = [{"length": n, "batch": TOKENS // n} for n in (2048, 4096, 8192, 16384)]
    return {
        "nt": [{"m": m, "n": n, "k": k} for n, k in weights for m in ROWS],
        "nn": [{"m": m, "n": n, "k": k} for k, n in weights for m in ROWS],
        "folds": [{"tokens": t, "n": n, "k": k} for n, k in weights for t in ROWS[10:]],
        "packed": [{**size, **each} for each in heads for size in packed],
        "decode": _all(heads, batch=(1, 4, 16, 64, 256), context=(2048, 8192, 32768)),
        **_layers(MODELS, 8192),
        "experts": _all(EXPERTS, routing=ROUTINGS, tokens=(2048, 4096, 16384)),
        "decoded experts": _all(EXPERTS, routing=ROUTINGS, tokens=(1, 8, 64, 256)),
    }


def _layers(models: Sequence[str], tokens: int) -> dict[str, Sequence[Sizes]]:
    """Ops over the hidden states and the logits of models."""
    configs = [model_config(name) for name in models]
    pairs = dict.fromkeys((config.hidden_size, config.vocab_size) for config in configs)
    return {
        "layers": _all(model=models, tokens=(tokens,)),
        "heads": [{"tokens": tokens, "width": w, "vocabulary": v} for w, v in pairs],
        "logits": _all(vocabulary=list(dict.fromkeys(v for _, v in pairs)), tokens=(1, 64)),
    }


def _drawn_sizes(seed: int) -> dict[str, Sequence[Sizes]]:
    """Those of a seed: products, folds and layers of three models, mixtures of experts."""
    rng, models, turns = Random(f"ops {seed}"), draw_models(seed, 3), cycle(ROUTINGS)
    products, packed, decode = list(draw_products(rng, models)), [], []
    for dim in (*HEAD_DIMS, *HEAD_DIMS):
        length, context, heads = rows(rng, 256, TOKENS), rows(rng, 256, 32768), draw_heads(rng, dim)
        packed.append({"length": length, "batch": TOKENS // length} | heads)
        key_bytes = 4 * context * dim * int(heads["heads"].split("/")[1])
        batch = rows(rng, 1, min(256, CACHE_BYTES // key_bytes))
        decode.append({"batch": batch, "context": context} | heads)

    def routed(count: int, low: int, high: int) -> list[Sizes]:
        tokens = [rows(rng, low, high) for _ in range(count)]
        return [{"tokens": t, **draw_experts(rng), "routing": next(turns)} for t in tokens]

    weights = weights_of(models)
    return {
        **{layout: [s for of, s in products if of == layout] for layout in ("nt", "nn")},
        "folds": [{"tokens": rows(rng, 256, 32768), "n": n, "k": k} for n, k in weights],
        "packed": packed,
        "decode": decode,
        **_layers(models, rows(rng, 1024, 8192)),
        "experts": routed(6, 2048, TOKENS),
        "decoded experts": routed(9, 1, 256),
    }


def _tiny_sizes() -> dict[str, Sequence[Sizes]]:
    sparse = [{"hidden": 64, "intermediate": 48, "experts": 8, "top_k": 3}]
    kinds = ("4/2", 128), ("6/2", 80), ("3/1", 48)
    heads = [{"heads": text, "head_dim": dim} for text, dim in kinds]
    products = _all(m=(1, 300), n=(48,), k=(32, 96))
    return {
        "nt": products,
        "nn": products,
        "folds": [{"tokens": 32, "n": 48, "k": 32}],
        "packed": _all(heads, length=(21,), batch=(2,)),
        "decode": _all(heads, batch=(2,), context=(21,)),
        **_layers(["tiny-qwen3"], 32),
        "experts": _all(sparse, tokens=(300,), routing=ROUTINGS),
        "decoded experts": _all(sparse, tokens=(5,), routing=ROUTINGS),
    }
