"""The model class of vLLM over random steps gives the logprobs that training computes."""

import random

import pytest
import torch

import rl_consistency
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.verify.presets import build_preset
from tests.integrations.vllm.fake_vllm import Server, vllm_config

PRESETS = (
    *("tiny-qwen3", "tiny-llama", "tiny-qwen2", "tiny-mistral"),
    *("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"),
)
LENGTHS = 3, 17, 40, 96, 150, 33


def served(trained, dtype=torch.bfloat16):
    """vLLM's model with the weights of a trained one."""
    from rl_consistency.integrations.vllm.model import CanonicalForCausalLM

    torch.set_default_dtype(dtype)
    try:
        model = CanonicalForCausalLM(vllm_config=vllm_config(trained.config, dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_weights((n, p.detach()) for n, p in trained.named_parameters())
    return model


def sequences_of(vocabulary, seed=1):
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(n)] for n in LENGTHS]


def logprobs_of(model, sequences, **options):
    """Of all tokens but the first of each sequence, by vLLM's way through random steps."""
    server = Server(model, sequences, **options)
    found = [[] for _ in sequences]
    while server.unfinished:
        hidden, places = server.run(server.take() or [(i, 1) for i in left(server)[:1]])
        next_tokens = [(*sequences[i], 0)[p + 1] for i, p in places]
        behaviour = distribution(model.compute_logits(hidden), SamplingRows.uniform(len(places)))
        logprobs = behaviour.logprobs_of(torch.tensor(next_tokens)).tolist()
        for (i, _), logprob in zip(places, logprobs, strict=True):
            found[i].append(logprob)
    return [each[:-1] for each in found]


def left(server):
    return [i for i, s in enumerate(server.sequences) if server.computed[i] < len(s)]


def differing(one, other):
    pairs = [p for a, b in zip(one, other, strict=True) for p in zip(a, b, strict=True)]
    return sum(a != b for a, b in pairs), len(pairs)


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_of_vllm_give_the_logprobs_of_training(preset):
    trained = build_preset(preset, torch.bfloat16)
    sequences = sequences_of(trained.config.vocab_size)
    with rl_consistency.patch(trained, cuda_graphs=False), torch.no_grad():
        model = served(trained)
        scored = rl_consistency.token_logprobs(trained, sequences, prompt_lengths=[1] * 6)
        with rl_consistency.strict(False):
            stock = rl_consistency.token_logprobs(trained, sequences, prompt_lengths=[1] * 6)
        assert model.digest() == rl_consistency.model_digest(trained)
    scored, stock = ([x.tolist() for x in each.split()] for each in (scored, stock))
    found = logprobs_of(model, sequences)
    assert differing(found, scored) == (0, 333)
    assert differing(stock, scored)[0] > 300  # the comparison finds differences
