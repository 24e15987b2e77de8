"""C1 and C2 through the rollout engine: its tokens and logprobs, and those training recomputes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models.packing import lay_out
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.parity.drift import compare_logprobs
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.device.ragged_graphs import CAPTURED_AT
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import RolloutStatistics
from rl_consistency.verify.checks.whole_model import Chain
from rl_consistency.verify.claims import Tally

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
    calls: Sequence[Sequence[int]] = (range(len(PROMPT_LENGTHS)),)
    """The prompts of each call."""
    speculation: int = 0
    """Longest draft."""


class RolloutProbe:
    """Prompts with common prefixes: the first two begin alike, the last repeats the fourth."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        room = chain.config.max_position_embeddings - MAX_TOKENS
        lengths = [min(n, room) for n in PROMPT_LENGTHS]
        prompts = self.prompts = probe_tokens(lengths, chain.config.vocab_size, seed=3)
        prompts[1] = [*prompts[0][:33], *prompts[1][33:]]
        prompts[7] = [*prompts[3], *prompts[7][len(prompts[3]) :]]
        params = partial(SamplingParams, n=SAMPLES, max_tokens=MAX_TOKENS, seed=11)
        self.sampling = [params(**kind) for kind in islice(cycle(SAMPLING), len(prompts))]

    def generate(self, serving: Serving) -> tuple[list[Completion], list[RolloutStatistics]]:
        """Completions in the prompts' own order, and the statistics of each call."""
        options: dict[str, Any] = {"max_num_seqs": SAMPLES * len(self.prompts)} | serving.options
        eos = self.chain.config.eos_token_id
        engine = RolloutEngine(self.chain.model, eos_token_id=eos, **options)
        found: dict[tuple[int, int], Completion] = {}
        stats: list[RolloutStatistics] = []
        for members in serving.calls:
            prompts = [self.prompts[i] for i in members]
            own = [replace(self.sampling[i], speculation=serving.speculation) for i in members]
            for c in engine.generate(prompts, own, prompt_ids=members):
                found[members[c.prompt_index], c.sample_index] = c
            stats.append(engine.stats)
        return [found[key] for key in sorted(found)], stats


def servings(chain: Chain) -> Iterator[Serving]:
    """Every way to run the engine that must not matter."""
    count = len(PROMPT_LENGTHS)
    yield Serving("each prompt alone", calls=[[i] for i in range(count)])
    yield Serving("permuted prompts", calls=[[(5 * i + 3) % count for i in range(count)]])
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
        again = [range(count)] * CAPTURED_AT
        yield Serving("replayed prefill", {"enable_prefix_sharing": False}, calls=again)


def check_engine(tally: Tally, chain: Chain) -> None:
    """Tokens and logprobs of the engine under every serving against its default."""
    probe = RolloutProbe(chain)
    expected, stats = probe.generate(Serving("default"))
    tally.expect("prefix sharing took place", any(s.prefix_hit_tokens for s in stats))
    for serving in servings(chain):
        found, stats = probe.generate(serving)
        if serving.name == "preemption":
            tally.expect("preemption took place", any(s.preemptions for s in stats))
        if serving.name == "replayed prefill":
            tally.expect("prefill was replayed", any(s.replayed_prefills for s in stats))
        if serving.name == "no prefix sharing":
            tally.expect("nothing was shared", not any(s.prefix_hit_tokens for s in stats))
        for a, b in zip(expected, found, strict=True):
            sample = f"{serving.name}, prompt {a.prompt_index} sample {a.sample_index}"
            texts = f"{a.token_ids} against {b.token_ids}"
            if tally.expect(f"{sample}, tokens", a.token_ids == b.token_ids, texts):
                tally.equal(sample, a.token_logprobs, b.token_logprobs, "token {}".format)


@torch.no_grad()
def check_training(tally: Tally, chain: Chain) -> None:
    """Behaviour logprobs against `token_logprobs`, packed and padded: the ratio is exactly 1."""
    probe = RolloutProbe(chain)
    compared = 0
    for serving in (Serving("default"), Serving("chunked", {"prefill_chunk_size": 7})):
        completions, _ = probe.generate(serving)
        owned = [prompt for prompt in probe.prompts for _ in range(SAMPLES)]
        pairs = zip(owned, completions, strict=True)
        sequences = [[*prompt, *c.token_ids] for prompt, c in pairs]
        sampling = [params for params in probe.sampling for _ in range(SAMPLES)]
        rollout = [c.token_logprobs for c in completions]
        given = {"prompt_lengths": [len(prompt) for prompt in owned], "sampling": sampling}
        given["check_support"] = False
        for layout in ("packed", "packed_with_gaps", "left_padded", "right_padded"):
            inputs, mask = lay_out(sequences, layout, chain.device)
            training = token_logprobs(chain.model, inputs, attention_mask=mask, **given)
            found = [t.cpu() for t in training.split()]
            report, case = compare_logprobs(rollout, found), f"{serving.name}, {layout}"
            compared += report.tokens
            ratios = {report.ratio_min, report.ratio_max}
            text = f"{ratios}, {report.mismatched_tokens} of {report.tokens} tokens differ"
            tally.expect(f"{case}, importance ratio", ratios == {1.0}, text)
            for i, (ours, theirs) in enumerate(zip(rollout, found, strict=True)):
                tally.equal(f"{case}, sample {i}", ours, theirs, "token {}".format)
    if not tally.mismatches:
        tally.detail = f"{compared} tokens, every importance ratio exactly 1"
