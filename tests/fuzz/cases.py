"""A random case: model, modifications, engine settings, cuts, interruptions, judged by two oracles.

The oracles are the stock forward in fp64, and the laws of bytes. A model that is refused, before
or after the patch, has passed.
"""

import copy
import random
from dataclasses import dataclass

import torch
from modifications import MODIFICATIONS
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency import ConsistencyError, RolloutEngine, SamplingParams, patch, token_logprobs
from rl_consistency.parity.gradients import Regrouping, check_gradients
from rl_consistency.verify.presets import _make_lifelike

REFUSED = (ValueError, TypeError, ConsistencyError)


class Interrupted(Exception):
    """Raised by a case in the middle of something."""


@dataclass
class Outcome:
    """What a case did."""

    text: str
    refused: str | None


def random_config(rng):
    heads = rng.choice([1, 2, 4])
    dim = rng.choice([8, 16, 32])
    family = rng.choice(["llama", "mistral", "qwen2", "qwen3"])
    options = {
        "vocab_size": rng.choice([64, 257, 331]),
        "hidden_size": heads * dim,  # qwen2 takes the head size from it
        "intermediate_size": rng.choice([24, 80, 129]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([h for h in (1, 2, 4) if heads % h == 0]),
        "head_dim": dim,
        "max_position_embeddings": 256,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "hidden_act": rng.choice(["silu", "silu", "gelu_pytorch_tanh"]),
    }
    if family in ("llama", "qwen3"):
        options["attention_bias"] = rng.random() < 0.5
    if family == "llama":
        options["mlp_bias"] = rng.random() < 0.5
    if family == "mistral" and rng.random() < 0.7:
        options["sliding_window"] = rng.choice([5, 17, 100])
    theta = rng.choice([1e4, 5e5])
    options["rope_parameters"] = rng.choice(
        [
            {"rope_type": "default", "rope_theta": theta},
            {"rope_type": "linear", "rope_theta": theta, "factor": 2.0},
        ]
    )
    return family, options


def random_model(rng, dtype):
    family, options = random_config(rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.randrange(1 << 30))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).to(dtype)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    with torch.no_grad():
        for parameter in model.parameters():
            _make_lifelike(parameter, generator)
    return model.eval(), f"{family} {options}"


def sequences_for(rng, vocabulary):
    return [
        [rng.randrange(2, vocabulary) for _ in range(rng.choice([2, 3, 9, 16, 17, 40]))]
        for _ in range(rng.choice([1, 2, 5]))
    ]


def stock_logprobs(model, sequences):
    """Of all tokens but the first, by the stock forward in the model's own dtype."""
    found = []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def canonical_logprobs(model, sequences):
    return token_logprobs(model, sequences, prompt_lengths=[1] * len(sequences)).logprobs


def same(a, b, what):
    if a.shape != b.shape or not torch.equal(a.view(torch.int32), b.view(torch.int32)):
        raise AssertionError(f"{what}: bytes differ")


def run(seed):
    """Run the case of a seed; AssertionError on a finding."""
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    model, text = random_model(rng, dtype)
    count = rng.choice([0, 0, 1, 1, 1, 2])
    changes = rng.sample(MODIFICATIONS, count)
    later = rng.sample(MODIFICATIONS, 1) if rng.random() < 0.3 else []
    names = [c.__name__ for c in changes], [c.__name__ for c in later]
    text = f"seed {seed}: {text}, {dtype}, changed {names[0]}, after the patch {names[1]}"
    try:
        for change in changes:
            change(model, rng)
        sequences = sequences_for(rng, model.config.vocab_size)
        with torch.no_grad():
            stock = stock_logprobs(model, sequences)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        return Outcome(text, f"stock fails too: {error}")  # two changes that do not go together
    try:
        with patch(model):
            _judge(rng, model, sequences, stock, dtype, text)
            for change in later:
                change(model, rng)
                try:
                    with torch.no_grad():
                        fresh = stock_logprobs(copy.deepcopy(_unpatched(model)), sequences)
                except REFUSED as error:
                    return Outcome(text, str(error))
                _judge(rng, model, sequences, fresh, dtype, text)
    except REFUSED as error:
        return Outcome(text, str(error))
    return Outcome(text, None)
