"""C1 and C2 through the rollout engine: its tokens and logprobs, and those training recomputes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, takewhile
from typing import Any

import torch
from torch import Tensor

from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.parity.drift import compare_logprobs
from rl_consistency.parity.gradients import lay_out
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.statistics import RolloutStatistics
from rl_consistency.verify.checks.whole_model import Chain
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.probe import probe_tokens

MAX_TOKENS = 17
"""Tokens generated per completion; more than one cache block of 16."""

SAMPLES = 3
"""Completions of one prompt."""

PROMPT_LENGTHS = (40, 40, 3, 65, 17, 1, 33, 70)

SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
)
"""Parameters of the prompts in turn."""


@dataclass(frozen=True)
class Serving:
    """One way to run the engine."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    order: Sequence[int] | None = None
    """Prompts in another order; None keeps theirs."""
    alone: bool = False
    """Every prompt in a call of its own."""
    speculation: int = 0
    """Longest draft."""


@dataclass(frozen=True)
class RolloutProbe:
    """Prompts with common prefixes, and how each is sampled."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]

    @classmethod
    def of(cls, chain: Chain) -> RolloutProbe:
        """Prompts for a chain's model: the first two begin alike, the last repeats the fourth."""
        room = chain.config.max_position_embeddings - MAX_TOKENS
        lengths = [min(n, room) for n in PROMPT_LENGTHS]
        prompts = probe_tokens(lengths, chain.config.vocab_size, seed=3)
        prompts[1] = [*prompts[0][:33], *prompts[1][33:]]
        prompts[7] = [*prompts[3], *prompts[7][len(prompts[3]) :]]
        turns = islice(cycle(SAMPLING), len(prompts))
        params = partial(SamplingParams, n=SAMPLES, max_tokens=MAX_TOKENS, seed=11)
        return cls(prompts, [params(**kind) for kind in turns])

    def generate(
        self, chain: Chain, serving: Serving
    ) -> tuple[list[Completion], list[RolloutStatistics]]:
        """Completions in the prompts' own order, and the statistics of each call."""
        options: dict[str, Any] = {"max_num_seqs": SAMPLES * len(self.prompts)} | serving.options
        engine = RolloutEngine(chain.model, eos_token_id=chain.config.eos_token_id, **options)
        order = list(range(len(self.prompts))) if serving.order is None else list(serving.order)
        calls = [[i] for i in order] if serving.alone else [order]
        found: dict[tuple[int, int], Completion] = {}
        stats: list[RolloutStatistics] = []
        for members in calls:
            prompts = [self.prompts[i] for i in members]
            own = [replace(self.sampling[i], speculation=serving.speculation) for i in members]
            for c in engine.generate(prompts, own, prompt_ids=members):
                found[members[c.prompt_index], c.sample_index] = c
            stats.append(engine.stats)
        return [found[key] for key in sorted(found)], stats


def servings(chain: Chain) -> Iterator[Serving]:
    """Every way to run the engine that must not matter."""
    count = len(PROMPT_LENGTHS)
    yield Serving("each prompt alone", alone=True)
    yield Serving("permuted prompts", order=[(5 * i + 3) % count for i in range(count)])
    yield Serving("at most 5 sequences", {"max_num_seqs": 5})
    for chunk in chain.sweep.chunks:
        yield Serving(f"prefill chunk {chunk}", {"prefill_chunk_size": chunk})
    yield Serving("at most 24 tokens a step", {"max_batch_tokens": 24})
    yield Serving("no prefix sharing", {"enable_prefix_sharing": False})
    for size in chain.sweep.cache_blocks:
        yield Serving(f"cache blocks of {size}", {"kv_block_size": size})
    yield Serving("preemption", {"kv_block_size": 8, "num_kv_blocks": 24})
    yield Serving("speculation", speculation=7)
    yield Serving("speculation and preemption", {"num_kv_blocks": 12}, speculation=3)
    if chain.device.type == "cuda":
        yield Serving("no CUDA graphs", {"cuda_graphs": False})


def check_engine(tally: Tally, chain: Chain) -> None:
    """Tokens and logprobs of the engine under every serving against its default."""
    probe = RolloutProbe.of(chain)
    expected, stats = probe.generate(chain, Serving("default"))
    tally.expect("prefix sharing took place", any(s.prefix_hit_tokens for s in stats))
    for serving in servings(chain):
        found, stats = probe.generate(chain, serving)
        if serving.name == "preemption":
            tally.expect("preemption took place", any(s.preemptions for s in stats))
        if serving.name == "no prefix sharing":
            tally.expect("nothing was shared", not any(s.prefix_hit_tokens for s in stats))
        for a, b in zip(expected, found, strict=True):
            sample = f"{serving.name}, prompt {a.prompt_index} sample {a.sample_index}"
            if tally.expect(f"{sample}, tokens", a.token_ids == b.token_ids, _tokens(a, b)):
                tally.equal(sample, a.token_logprobs, b.token_logprobs, "token {}".format)


@torch.no_grad()
def check_training(tally: Tally, chain: Chain) -> None:
    """Behaviour logprobs against `token_logprobs`, packed and padded: the ratio is exactly 1."""
    probe = RolloutProbe.of(chain)
    compared = 0
    for serving in (Serving("default"), Serving("chunked", {"prefill_chunk_size": 7})):
        completions, _ = probe.generate(chain, serving)
        owners = [i // SAMPLES for i in range(len(completions))]
        pairs = zip(owners, completions, strict=True)
        sequences = [[*probe.prompts[owner], *c.token_ids] for owner, c in pairs]
        sampling = [probe.sampling[owner] for owner in owners]
        prompts = [len(probe.prompts[owner]) for owner in owners]
        rollout = [c.token_logprobs for c in completions]
        for layout in ("packed", "packed_with_gaps", "left_padded", "right_padded"):
            inputs, mask = lay_out(sequences, layout, chain.device)
            training = token_logprobs(
                chain.model, inputs, attention_mask=mask, prompt_lengths=prompts, sampling=sampling
            )
            found = [t.cpu() for t in training.split()]
            compared += _compare(tally, f"{serving.name}, {layout}", rollout, found)
    if not tally.mismatches:
        tally.detail = f"{compared} tokens, every importance ratio exactly 1"


def _compare(tally: Tally, case: str, rollout: list[Tensor], training: list[Tensor]) -> int:
    report = compare_logprobs(rollout, training)
    tally.expect(
        f"{case}, importance ratio",
        report.ratio_min == report.ratio_max == 1.0,
        f"from {report.ratio_min!r} to {report.ratio_max!r}, {report.mismatched_tokens} of "
        f"{report.tokens} tokens differ",
    )
    for i, (ours, theirs) in enumerate(zip(rollout, training, strict=True)):
        tally.equal(f"{case}, sample {i}", ours, theirs, "token {}".format)
    return report.tokens


def _tokens(a: Completion, b: Completion) -> str:
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return f"token {same}: {a.token_ids[same : same + 3]} against {b.token_ids[same : same + 3]}"
