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


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mistral", "tiny-olmoe"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_captured_decode_step_gives_the_bits_of_any_other(preset, shares, monkeypatch):
    """With padding, and where sequences lie in the same blocks."""
    from rl_consistency.integrations.vllm import steps

    monkeypatch.setattr(steps, "reads_shared_keys_once", lambda keys: shares)
    monkeypatch.setattr(steps, "SHARED_FROM", 2)
    trained = build_preset(preset, torch.bfloat16)
    draw = random.Random(3)
    head = [draw.randrange(trained.config.vocab_size) for _ in range(160)]
    sequences = [head + [i, i + 1, i + 2] for i in range(5)]
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)
        server = Server(model, sequences, pad=(3, 3))
    for table in server.tables[1:]:
        table[:10] = server.tables[0][:10]
    server.run([(i, 160) for i in range(5)])
    others = Server(model, sequences, pad=(3, 3), keep=server)
    for _ in range(3):
        found, _ = server.run([(i, 1) for i in range(5)], captured=True)
        expected, _ = others.run([(i, 1) for i in range(5)])
        assert torch.equal(found, expected)
    (layout,) = model._decode._made.values()
    assert (layout.most_runs > 0) == shares
    if shares:
        assert layout.numbers.shared.runs.tolist() == [[0, 5, 128], [0, 0, 0]]
