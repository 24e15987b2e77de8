import copy

import pytest
import torch

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import World
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.trainers.config.learning_sections import WarmStartSection
from rl_consistency.trainers.config.sections import BuildSection
from rl_consistency.trainers.data.examples import problems
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.policy import build_model
from rl_consistency.trainers.strategies.strategy import Replicated
from rl_consistency.trainers.warm_start import warm_start
from tests.trainers.conftest import RECIPE

TOKENIZER = byte_tokenizer()
EXAMPLES = problems(0, "train", 12, num_terms=3, max_value=9)
PROMPTS = [TOKENIZER.encode(example.prompt) for example in EXAMPLES]
TARGETS = [[*TOKENIZER.encode(example.target), TOKENIZER.eos_token_id] for example in EXAMPLES]


@pytest.fixture
def model():
    model = build_model(BuildSection(**RECIPE["policy"]["build"]), TOKENIZER, seed=1)
    with patch(model):
        yield model


def start(model, *, seed=0, prompts=PROMPTS, targets=TARGETS, **changes):
    section = WarmStartSection(**{"steps": 4, "batch_size": 4, "learning_rate": 3e-3} | changes)
    ranks = Replicated(World.join(torch.device("cpu")), PartOrder(1), model)
    return warm_start(prompts, targets, section, ranks, seed=seed)


def snapshot(model):
    return copy.deepcopy(model.state_dict())


def test_the_examples_become_likelier(model):
    def likelihood():
        with torch.no_grad():
            scored = token_logprobs(
                model,
                [[*p, *t] for p, t in zip(PROMPTS, TARGETS)],
                prompt_lengths=[len(p) for p in PROMPTS],
            )
        return scored.logprobs.mean().item()

    before = likelihood()
    loss = start(model, steps=30, batch_size=12)
    assert likelihood() > before + 1
    assert loss < -before - 1


def test_the_same_start_again_gives_the_same_weights_and_another_seed_does_not(model):
    fresh = snapshot(model)
    digests = []
    for seed in (0, 0, 1):
        model.load_state_dict(fresh)
        start(model, seed=seed)
        digests.append(parameter_digest(model))
    assert digests[0] == digests[1] != digests[2]


def test_the_order_of_the_examples_in_a_batch_does_not_enter(model):
    """A batch that holds all examples is the same batch in every epoch and for every seed."""
    fresh = snapshot(model)
    start(model, seed=0, batch_size=12)
    first = parameter_digest(model)
    model.load_state_dict(fresh)
    start(model, seed=1, batch_size=12)
    assert parameter_digest(model) == first


def test_prompts_are_not_imitated(model):
    """The loss is that of the targets alone."""
    with torch.no_grad():
        scored = token_logprobs(
            model, [[*PROMPTS[0], *TARGETS[0]]], prompt_lengths=[len(PROMPTS[0])]
        )
    assert len(scored.logprobs) == len(TARGETS[0])
    loss = start(model, steps=1, prompts=PROMPTS[:1], targets=TARGETS[:1])
    assert loss == pytest.approx(-scored.logprobs.mean().item(), rel=1e-6)
