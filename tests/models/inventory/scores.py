"""Numbers of a small model: patched, of the stock model, and of a rollout."""

import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

SAMPLING = SamplingParams(n=2, max_tokens=6)


def tokens(model, *lengths):
    return probe_tokens(lengths or (21,), model.config.vocab_size)


def scores(model):
    return token_logprobs(model, tokens(model), prompt_lengths=[1]).logprobs.detach()


@torch.no_grad()
def stock_scores(model):
    ids = torch.tensor(tokens(model))
    logprobs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return logprobs[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


def rolled_out(model):
    engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=32)
    return engine.generate(tokens(model, 9, 17), SAMPLING)


def halved(module, given, output):
    """A hook that changes what any module of the model returns."""
    if isinstance(output, torch.Tensor):
        return output * 0.5
    if isinstance(output, tuple):
        return (output[0] * 0.5, *output[1:])
    return type(output)(last_hidden_state=output.last_hidden_state * 0.5)
