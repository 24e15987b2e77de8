"""Which model fits where: writes the table of docs/which_fits.md, or tells it of one model.

Usage: which_fits.py [MODEL_DIRECTORY [--tokens N] [--kv-tokens N]]

What stays from step to step is counted as a dry run counts it (`trainers/dry_run.py`). Activations
are fitted to the peaks of training steps that benchmarks/results/h200.json has; a dry run measures
them, and needs the GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PAGE, MARK = ROOT / "docs" / "which_fits.md", "<!-- written by tools/which_fits.py -->"
GIB = 2**30
GPUS = {"80 GB": 76.0, "141 GB": 136.0}
"""Name of a GPU -> GiB of it for tensors: about 2 less than it has, for context and fragments."""
WORLDS = (1, 2, 4, 8)
TOKENS, KV_TOKENS = 8192, 65_536
"""Tokens of a training pass, and tokens that the KV cache holds at once."""


class Sizes(NamedTuple):
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Without norms and biases, less than 0.1 % of them."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + (2 - self.tied) * self.vocabulary * self.hidden

    def terms(self, tokens: int) -> list[float]:
        """GiB that activations are fitted to: what each token keeps of all layers in 16 bits, and
        one value for each weight of the head."""
        heads = (self.heads + 2 * self.kv_heads) * self.head_dim
        kept = 2 * self.layers * (self.hidden + self.intermediate + heads)
        return [tokens * kept / GIB, self.vocabulary * self.hidden / GIB]


MODELS = {
    "Qwen2.5-0.5B": Sizes(151936, 896, 4864, 24, 14, 2, 64, True),
    "Qwen3-0.6B": Sizes(151936, 1024, 3072, 28, 16, 8, 128, True),
    "Llama-3.2-1B": Sizes(128256, 2048, 8192, 16, 32, 8, 64, True),
    "Qwen3-1.7B": Sizes(151936, 2048, 6144, 28, 16, 8, 128, True),
    "Qwen2.5-3B": Sizes(151936, 2048, 11008, 36, 16, 2, 128, True),
    "Llama-3.2-3B": Sizes(128256, 3072, 8192, 28, 24, 8, 128, True),
    "Qwen3-4B": Sizes(151936, 2560, 9728, 36, 32, 8, 128, True),
    "Qwen2.5-7B": Sizes(152064, 3584, 18944, 28, 28, 4, 128, False),
    "Qwen3-8B": Sizes(151936, 4096, 12288, 36, 32, 8, 128, False),
    "Qwen3-14B": Sizes(151936, 5120, 17408, 40, 40, 8, 128, False),
    "Qwen3-32B": Sizes(151936, 5120, 25600, 64, 64, 8, 128, False),
}
MEASURED = {
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama3.2-1b": "Llama-3.2-1B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "llama3.2-3b": "Llama-3.2-3B",
    "qwen3-4b-8l": "Qwen3-4B",
    "qwen2.5-7b-8l": "Qwen2.5-7B",
    "qwen3-8b-8l": "Qwen3-8B",
}
"""Names of the recorded training steps; 8l has 8 layers."""


def recorded() -> list[tuple[str, Sizes, int, float]]:
    """Name, sizes, tokens and peak GiB of each recorded training step."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text("utf-8"))["rows"]
    found = []
    for row in rows:
        shape = row["shape"]
        if row["suite"] != "training_step_named" or shape["model"] not in MEASURED:
            continue
        sizes = MODELS[MEASURED[shape["model"]]]
        if shape["model"].endswith("-8l"):
            sizes = sizes._replace(layers=8)
        peak = row["peak_bytes"]["ours"] / GIB
        found.append((shape["model"], sizes, shape["sequences"] * shape["length"], peak))
    return found


def fit() -> tuple[np.ndarray, float]:
    """Factors of `Sizes.terms` with the least relative errors over the recorded steps, and the
    largest of these errors. The peaks are beside weights and gradients."""
    rows = recorded()
    left = np.array([sizes.terms(tokens) for _, sizes, tokens, _ in rows])
    right = np.array([peak for *_, peak in rows])
    factors, *_ = np.linalg.lstsq(left / right[:, None], np.ones(len(rows)), rcond=None)
    return factors, float(np.abs(left @ factors / right - 1).max())


def needed(sizes: Sizes, world: int, tokens: int, kv_tokens: int) -> float:
    """GiB on each GPU, of a policy in bfloat16 with AdamW: replicated on one, else FSDP2."""
    billions = sizes.parameters / GIB
    kv_cache = 4 * sizes.layers * sizes.kv_heads * sizes.head_dim * kv_tokens / GIB
    activations = float(np.dot(sizes.terms(tokens), fit()[0]))
    if world == 1:  # weights 2, gradients 4, masters and moments 12 bytes
        return 18 * billions + kv_cache + activations
    shard, whole = 12 * billions / world, 2 * billions
    gradients = 8 * billions / world  # and the carry of the ordered sum
    phases = {
        "loading": 4 * billions,  # the whole policy in fp32, before it is sharded
        "rollout": shard + gradients / 2 + whole + kv_cache,
        "training": shard + gradients + activations + kv_cache,
    }
    return max(phases.values())


def lines(models: dict[str, Sizes], tokens: int, kv_tokens: int) -> list[str]:
    """The table: GiB of each GPU, struck out where a GPU has less."""
    worlds = [f"{world} x" if world > 1 else "1 GPU" for world in WORLDS]
    table = [
        f"| model | parameters | {' | '.join(worlds)} | fits 80 GB from | fits 141 GB from |",
        f"| --- |{' ---: |' * (len(worlds) + 3)}",
    ]
    for name, sizes in models.items():
        each = [needed(sizes, world, tokens, kv_tokens) for world in WORLDS]
        first = [
            next((str(w) for w, gib in zip(WORLDS, each, strict=True) if gib <= has), "no")
            for has in GPUS.values()
        ]
        cells = [f"{sizes.parameters / 1e9:.1f} B", *(f"{gib:.0f}" for gib in each), *first]
        table.append(f"| {name} | {' | '.join(cells)} |")
    error = f"{100 * fit()[1]:.0f} %"
    return [
        f"GiB on each GPU, estimated: bfloat16, AdamW, a training pass of {tokens:,} tokens, a KV "
        f"cache of {kv_tokens:,} tokens. One GPU",
        "is replicated, several are FSDP2. The activations of the recorded training steps are met "
        f"within {error}.",
        "",
        *table,
    ]


def page() -> str:
    """The page with the table below its mark."""
    above = PAGE.read_text("utf-8").partition(MARK)[0]
    return above + "\n".join([MARK, "", *lines(MODELS, TOKENS, KV_TOKENS), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Which model fits where, estimated without a GPU.")
    parser.add_argument("directory", nargs="?", type=Path, help="of config.json")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a training pass")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="of the KV cache")
    args = parser.parse_args()
    if args.directory is None:
        PAGE.write_text(page(), "utf-8")
        return
    config = json.loads((args.directory / "config.json").read_text("utf-8"))
    heads = config["num_attention_heads"]
    sizes = Sizes(
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        heads,
        config.get("num_key_value_heads", heads),
        config.get("head_dim") or config["hidden_size"] // heads,
        config.get("tie_word_embeddings", False),
    )
    print("\n".join(lines({args.directory.name: sizes}, args.tokens, args.kv_tokens)))


if __name__ == "__main__":
    main()
