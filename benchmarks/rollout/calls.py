"""What a call of the engine takes beside its tokens, and what the first prompt of a length does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from benchmarks.models import build_model
from benchmarks.rollout.workload import Workload
from benchmarks.timing import Machine, row_fields
from rl_consistency.models.patch import patch
from rl_consistency.numerics.clock import finished_seconds
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

WARM, RUNS, LENGTHS = 6, 15, 9


def call_cost(name: str, workload: Workload, bench: Machine) -> dict[str, Any]:
    """A call of one token to a prompt that no cache knows, of a length that was met before.

    Figures in milliseconds: a decode step (`token`), a call of one token (`one_token`), and the
    median and the most of calls with prompts of lengths not met before, up to 24 times the prompt.
    """
    rng = Random("call")
    model: Any = build_model(name, bench.device)
    vocabulary, known, many = model.config.vocab_size, workload.prompt_len, workload.longest
    most = min(24 * known, model.config.max_position_embeddings - 1)
    with patch(model):
        blocks = -(-most // 16) * (WARM + 2 * RUNS + LENGTHS)
        engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=blocks)

        def seconds(length: int, tokens: int = 1) -> float:
            prompt = [rng.randrange(vocabulary) for _ in range(length)]
            began = finished_seconds(bench.device)
            engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1))
            return finished_seconds(bench.device) - began

        def typical(run: Callable[[], float]) -> float:
            return median([run() for _ in range(WARM + RUNS)][WARM:])

        one, longer = typical(lambda: seconds(known)), typical(lambda: seconds(known, many))
        new = [seconds(length) for length in rng.sample(range(known + 1, most), LENGTHS)]
    figures = {
        "token_ms": 1e3 * (longer - one) / (many - 1),
        "one_token_ms": 1e3 * one,
        "new_length_ms": 1e3 * median(new),
        "new_length_most_ms": 1e3 * max(new),
    }
    return row_fields({"ours": one}, [], 0.0, 1) | {"figures": figures}
