"""Small engines, what they gave and hold, and a drafter that is often right."""

import torch

from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.rollout.engine import RolloutEngine


def engine_of(model, **settings):
    return RolloutEngine(model, **{"eos_token_id": None, "kv_block_size": 4, **settings})


def content(completions):
    """What of completions is compared, by prompt and sample."""
    return {
        (c.prompt_index, c.sample_index): (
            c.token_ids,
            c.token_logprobs.numpy().tobytes(),
            c.finish_reason,
        )
        for c in completions
    }


def mismatched(engine, model, prompts, params):
    """How many completions have other logprobs than training computes."""
    found = engine.generate(prompts, params)
    sequences = [[*prompts[c.prompt_index], *c.token_ids] for c in found]
    lengths = [len(prompts[c.prompt_index]) for c in found]
    with torch.no_grad():
        scored = token_logprobs(model, sequences, prompt_lengths=lengths).split()
    pairs = zip(found, scored, strict=True)
    return sum(not torch.equal(c.token_logprobs, own) for c, own in pairs)


def is_idle(engine):
    free = engine._blocks.num_free_blocks == engine._blocks.num_blocks
    return free and not engine.has_unfinished


class Recalling:
    """A drafter that has seen texts before, and remembers every third token wrongly."""

    def __init__(self, texts):
        self.texts = texts

    def start(self, token_ids):
        return Recollection(self.texts, list(token_ids))


class Recollection:
    def __init__(self, texts, token_ids):
        self.texts, self.token_ids = texts, token_ids

    def append(self, token_ids):
        self.token_ids += token_ids

    def propose(self, most):
        end = len(self.token_ids)
        for text in self.texts:
            if text[:end] == self.token_ids:
                return [t if i % 3 else 1 for i, t in enumerate(text)][end : end + most]
        return []
