"""C1 and C2 on every family: however a completion is decoded, training gets its bytes."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from rl_consistency.models.packing import lay_out
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset
from tests.rollout.engine.engines import Recalling

FAMILIES = (
    *("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"),
    *("tiny-olmoe", "tiny-qwen3-moe", "tiny-mixtral"),
)
SHARED = [(7 * i + 3) % 61 for i in range(40)]
PROMPTS = [SHARED, [*SHARED[:32], 5, 6], [9], [11, 12, 13, 14, 15, 16, 17]]
SAMPLING = SamplingParams(n=2, temperature=0.9, top_k=20, max_tokens=9, seed=3, ignore_eos=True)
ROOMY = {"num_kv_blocks": 500}
ENGINES = {
    "all at once": {},
    "chunks of 7": {"prefill_chunk_size": 7},
    "one at a time": {"max_num_seqs": 1},
    "three at a time": {"max_num_seqs": 3},
    "few tokens at a time": {"max_batch_tokens": 5},
    "blocks of 1": {"kv_block_size": 1},
    "no sharing": {"enable_prefix_sharing": False},
    "few blocks": {"num_kv_blocks": 14, "kv_block_size": 4},
}


DRAFTING = {
    "drafts of chunks of 7, three at a time": {"prefill_chunk_size": 7, "max_num_seqs": 3},
    "drafts in few blocks": {"num_kv_blocks": 14, "kv_block_size": 4},
}


def outcome(completions):
    return [
        (c.prompt_index, c.sample_index, c.token_ids, c.token_logprobs.numpy().tobytes())
        for c in completions
    ]


@pytest.mark.parametrize(
    ("family", "dtype"),
    list(zip(FAMILIES, cycle([torch.float32, torch.bfloat16]))),
    ids=str,
)
def test_every_way_to_decode_gives_the_bytes_that_training_recomputes(family, dtype):
    model = build_preset(family, dtype)
    with patch(model):
        engines = {
            name: RolloutEngine(model, eos_token_id=None, **ROOMY | options)
            for name, options in ENGINES.items()
        }
        results = {name: e.generate(PROMPTS, SAMPLING) for name, e in engines.items()}
        expected = results["all at once"]
        for name, completions in results.items():
            assert outcome(completions) == outcome(expected), name
        assert engines["all at once"].stats.prefix_hit_tokens > 0
        assert engines["few blocks"].stats.preemptions > 0
        texts = [[*PROMPTS[c.prompt_index], *c.token_ids] for c in expected]
        for name, options in DRAFTING.items():
            settings = ROOMY | options | {"drafter": Recalling(texts)}
            engine = RolloutEngine(model, eos_token_id=None, **settings)
            drafted = engine.generate(PROMPTS, replace(SAMPLING, speculation=7))
            assert outcome(drafted) == outcome(expected), name
            assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens, name
        order = [2, 0, 3, 1]
        permuted = engines["all at once"].generate(
            [PROMPTS[i] for i in order], SAMPLING, prompt_ids=order
        )
        by_prompt = {(order[c.prompt_index], c.sample_index): c for c in permuted}
        for c in expected:
            other = by_prompt[c.prompt_index, c.sample_index]
            assert outcome([c])[0][2:] == outcome([other])[0][2:]

        sequences = [[*PROMPTS[c.prompt_index], *c.token_ids] for c in expected]
        lengths = [len(PROMPTS[c.prompt_index]) for c in expected]
        rollout = torch.cat([c.token_logprobs for c in expected]).numpy().tobytes()
        for layout in ("packed", "packed_with_gaps", "left_padded", "right_padded"):
            inputs, mask = lay_out(sequences, layout)
            scored = token_logprobs(
                model, inputs, attention_mask=mask, prompt_lengths=lengths, sampling=SAMPLING
            )
            assert scored.logprobs.detach().numpy().tobytes() == rollout, layout
