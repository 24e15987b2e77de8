"""What the canonical path costs on a CPU: forward and backward, ours and stock, interleaved.

`python -m benchmarks.speed` prints the table and writes benchmarks/results/cpu_speed.json. Stock is
the unpatched Hugging Face model on the same sequences, right-padded. One thread each, medians.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_consistency.models.batch_layout import lay_out
from rl_consistency.models.patch import PatchSession, patch
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.numerics.fingerprint import fingerprint

RESULTS = Path(__file__).parent / "results" / "cpu_speed.json"
SIZES = {
    "tiny (hidden 64, 2 layers), 64 x 24 tokens": ((64, 192, 2, 4, 2, 16, 272), 64, 24),
    "small (hidden 512, 4 layers), 8 x 256 tokens": ((512, 1536, 4, 8, 4, 64, 8192), 8, 256),
}
ROUNDS = 7


def build(sizes: tuple[int, ...]) -> Qwen3ForCausalLM:
    """A Qwen3 of the given sizes with random weights."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = sizes
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocabulary,
            tie_word_embeddings=True,
        )
    )


def canonical_step(session: PatchSession, sequences: list[list[int]]) -> None:
    """Forward and backward through the patched model."""
    session.model.zero_grad(set_to_none=True)
    scored = token_logprobs(session.model, sequences, prompt_lengths=[1] * len(sequences))
    scored.logprobs.sum().backward()


def stock_step(session: PatchSession, sequences: list[list[int]]) -> None:
    """The same loss through the unpatched model, padded."""
    session.model.zero_grad(set_to_none=True)
    with session.stock() as stock:
        model: Any = stock
        ids, mask = lay_out(sequences, "right_padded")
        assert isinstance(ids, torch.Tensor)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])
        (logprobs[..., 0] * mask[:, 1:]).sum().backward()


def measure(name: str) -> dict[str, Any]:
    """Median seconds of both paths at one size."""
    sizes, count, length = SIZES[name]
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(0, sizes[-1], (count, length), generator=generator).tolist()
    times: dict[str, list[float]] = {"canonical": [], "stock": []}
    model = build(sizes)
    with patch(model) as session:
        for _ in range(ROUNDS):
            for side, step in (("canonical", canonical_step), ("stock", stock_step)):
                started = perf_counter()
                step(session, sequences)
                times[side].append(perf_counter() - started)
    ours, stock = median(times["canonical"]), median(times["stock"])
    return {"work": name, "ours_s": ours, "stock_s": stock, "ratio": stock / ours}


def main() -> None:
    """Measure all sizes, print and save."""
    torch.set_num_threads(1)
    rows = []
    for name in SIZES:
        row = measure(name)
        rows.append(row)
        print(
            f"{name}: canonical {row['ours_s'] * 1e3:.0f} ms, stock {row['stock_s'] * 1e3:.0f} ms, "
            f"stock / canonical {row['ratio']:.2f}"
        )
    meta = {
        "command": "python -m benchmarks.speed",
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "fingerprint": fingerprint().digest,
    }
    RESULTS.write_text(json.dumps({"meta": meta, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
