from contextlib import ExitStack

import pytest
import torch

from rl_consistency.distributed.world import World
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.trainers.algorithms.critic import Critic, CriticModel
from rl_consistency.trainers.policy import load_policy
from rl_consistency.trainers.strategies.strategy import trained_parameters

SEQUENCES = [[1 + (7 * i + j) % 200 for j in range(n)] for i, n in enumerate((5, 17, 2, 33, 9))]
PROMPTS = [2, 1, 1, 20, 8]
LENGTHS = [len(s) - p for s, p in zip(SEQUENCES, PROMPTS, strict=True)]
LAYOUTS = ("packed", "packed_with_gaps", "left_padded", "right_padded")
GROUPINGS = ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 2], [0, 3, 1]])


@pytest.fixture(params=["float32", "bfloat16"])
def critic(request, tiny_run):
    config = tiny_run.config(**{"algorithm.name": "ppo", "policy.dtype": request.param})
    policy, _ = load_policy(config.policy, config.tokenizer, seed=1)
    with ExitStack() as stack:
        yield Critic(config, policy, stack).model


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_of_its_own_ends_at_the_same_share(tiny_run, schedule):
    """The policy's minimum may be above the critic's peak."""
    given = {"optimizer.schedule": schedule, "optimizer.min_lr": 2.5e-3}
    own = {"algorithm.name": "ppo", "algorithm.ppo": {"critic_learning_rate": 1e-3}}
    config = tiny_run.config(**given, **own)
    policy, _ = load_policy(config.policy, config.tokenizer, seed=1)
    with ExitStack() as stack:
        critic = Critic(config, policy, stack)
        critic.assemble(policy, World.join(torch.device("cpu")), None)
        (rate, *_), (share, *_) = (
            critic.optimizer._schedule.base_lrs,
            critic.optimizer._schedule.lr_lambdas,
        )
    assert rate * share(config.optimizer_steps) == pytest.approx(2.5e-4)


def values_of(critic, groups, layout):
    """Of each sequence, in logical order."""
    found = {}
    for group in groups:
        sequences, prompts = [SEQUENCES[i] for i in group], [PROMPTS[i] for i in group]
        found.update(zip(group, critic.values(sequences, prompts, layout), strict=True))
    return [found[i] for i in range(len(SEQUENCES))]


def differing(critic):
    """The groupings and layouts under which a value has other bytes than alone and packed."""
    with torch.no_grad():
        alone = torch.cat(values_of(critic, GROUPINGS[1], "packed"))
        return [
            (groups, layout)
            for groups in GROUPINGS
            for layout in LAYOUTS
            if not same_bytes(torch.cat(values_of(critic, groups, layout)), alone)
        ]


def test_values_have_the_same_bytes_under_every_grouping_order_and_padding(critic):
    assert differing(critic) == []
    values = values_of(critic, GROUPINGS[0], "packed")
    assert [len(part) for part in values] == LENGTHS
    assert torch.cat(values).dtype == torch.float32 and torch.cat(values).unique().numel() > 20


def test_mutant_a_value_that_depends_on_padding_is_seen(critic, monkeypatch):
    real = CriticModel.values

    def padded(self, sequences, prompt_lengths, layout="packed"):
        factor = 1 + layout.endswith("padded") * 2**-7
        return [values * factor for values in real(self, sequences, prompt_lengths, layout)]

    monkeypatch.setattr(CriticModel, "values", padded)
    assert {layout for _, layout in differing(critic)} == {"left_padded", "right_padded"}


def test_a_value_knows_the_tokens_before_it_and_no_others(critic):
    tokens, other = SEQUENCES[3], [*SEQUENCES[3][:-1], 250]
    (values,), (changed,) = critic.values([tokens], [20]), critic.values([other], [20])
    assert same_bytes(values, changed)
    earlier = [*tokens[:25], 250, *tokens[26:]]
    (changed,) = critic.values([earlier], [20])
    assert same_bytes(values[:6], changed[:6]) and not torch.isclose(values[6:], changed[6:]).any()


def test_the_stand_in_of_the_lm_head_takes_no_memory_and_is_not_trained(critic):
    stand_in = critic.policy.lm_head.weight
    assert stand_in.untyped_storage().nbytes() == critic.head.in_features * stand_in.element_size()
    assert "policy.lm_head.weight" not in trained_parameters(critic)
    assert {"head.weight", "policy.model.embed_tokens.weight"} <= trained_parameters(critic).keys()
