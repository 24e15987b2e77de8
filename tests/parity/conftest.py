"""A tiny patched model of four layers, and what `localize` finds of fixed tokens on it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.parity.localize import localize
from rl_consistency.parity.sides import Work
from rl_consistency.verify.presets import make_lifelike, preset_config

LAYERS = 4


def tokens_of(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(331, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="session")
def work():
    """Three sequences and their prompts."""
    return Work(sequences=tokens_of(14, 9, 19), prompt_lengths=[3, 1, 6])


def layers_of(name, count):
    config = preset_config(name)
    config.num_hidden_layers = count
    config.layer_types = ["full_attention"] * count
    return config


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(layers_of("tiny-qwen3", LAYERS)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            make_lifelike(parameter, generator)
    with patch(made):
        yield made


@pytest.fixture
def found(model, work):
    def find(*between, **options):
        options = {"ablation": False, "prompt_lengths": work.prompt_lengths} | options
        between = between or ("training", "again")
        return localize(model, work.sequences, between=between, **options)

    return find
