import math
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.world import World
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.trainers.algorithms.grpo import GRPOTrainer
from rl_consistency.trainers.data.examples import problems
from rl_consistency.trainers.data.prompts import PromptSet
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.policy import load_policy
from rl_consistency.trainers.rewards import RewardFunction
from rl_consistency.trainers.strategies.strategy import Replicated


class RecordingHook:
    """A hook that only writes down what it is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *given: self.calls.append((name, *given)) or {f"seen/{name}": 1}

    def given(self, name):
        return [call[1] for call in self.calls if call[0] == name]


def length_of_text(completions, **_):
    return [len(text) for text in completions]


@pytest.fixture
def make_trainer(tiny_run):
    def make(hook, reward=length_of_text, **changes):
        config = tiny_run.config(**changes)
        model, tokenizer = load_policy(config.policy, config.tokenizer, seed=1)
        examples = problems(0, "train", 6, num_terms=2, max_value=9)
        encoded = [tokenizer.encode(example.prompt) for example in examples]
        prompts = PromptSet(examples=examples, prompts=encoded)
        stack.enter_context(patch(model))
        ranks = Replicated(World.join(torch.device("cpu")), PartOrder(1), model)
        return GRPOTrainer(
            model=model,
            tokenizer=tokenizer,
            engine=RolloutEngine(model, eos_token_id=258, num_kv_blocks=64),
            optimizer=PolicyOptimizer(ranks, config.optimizer, total_steps=8),
            ranks=ranks,
            config=config,
            train=prompts,
            evaluations={"": prompts},
            rewards=[RewardFunction("given", reward)],
            hook=hook,
        )

    with ExitStack() as stack:
        yield make


def test_the_hook_is_told_four_times_a_step_and_nothing_more(make_trainer):
    hook = RecordingHook()
    trainer = make_trainer(
        hook, **{"algorithm.updates_per_rollout": 2, "training.micro_batch_size": 3}
    )
    metrics = trainer.step(1) | trainer.step(2)
    told = ["on_rollout", "on_training_logprobs", "on_gradients", "on_step_end"]
    assert [name for name, *_ in hook.calls] == told * 2
    assert {f"seen/{name}" for name in told} <= metrics.keys()
    assert not any(name.startswith(("consistency/", "stock/")) for name in metrics)


def test_the_hook_sees_samples_in_logical_order(make_trainer):
    hook = RecordingHook()
    trainer = make_trainer(hook, **{"training.micro_batch_size": 3, "data.shuffle": False})
    trainer.step(1)
    (rollout,), (logprobs,) = map(hook.given, ("on_rollout", "on_training_logprobs"))
    assert rollout.step == 1
    for i, (sequence, length) in enumerate(zip(rollout.sequences, rollout.prompt_lengths)):
        assert bytes(sequence[:length]).decode() == trainer.train.examples[i // 2].prompt
        assert len(sequence) - length == len(rollout.logprobs[i]) == len(logprobs[i])
        assert torch.equal(rollout.logprobs[i], logprobs[i])


def test_one_step_is_a_function_of_its_number_and_the_weights(make_trainer):
    hooks = [RecordingHook(), RecordingHook()]
    first, second = (make_trainer(hook, **{"optimizer.learning_rate": 1e-30}) for hook in hooks)
    for step in (1, 2, 3):
        first.step(step)
    second.step(3)
    drawn = [hook.given("on_rollout")[-1] for hook in hooks]
    assert drawn[0].sequences == drawn[1].sequences


def test_evaluation_is_greedy_and_changes_nothing(make_trainer):
    trainer = make_trainer(RecordingHook())
    before = trainer.evaluate()
    assert before == trainer.evaluate() and before.keys() == {"eval/reward"}


def test_the_first_rollout_compares_the_weights_that_the_trainer_was_given(make_trainer):
    """Those of a checkpoint, when a run is resumed."""
    trainer = make_trainer(RecordingHook())
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(1.5)
    with pytest.raises(ConsistencyError, match="the weights were handed over with digest"):
        trainer.step(1)


def test_weights_changed_after_the_hand_over_are_refused(tiny_run, monkeypatch):
    real = RolloutEngine.generate

    def generate(self, *args, weights_digest=None, **rest):
        if weights_digest is not None:
            with torch.no_grad():
                next(self._runner._model.parameters()).mul_(1.5)
        return real(self, *args, weights_digest=weights_digest, **rest)

    monkeypatch.setattr(RolloutEngine, "generate", generate)
    with pytest.raises(ConsistencyError, match="the weights were handed over with digest"):
        tiny_run()


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_rewards_that_fp32_cannot_tell_apart_have_the_advantages_of_small_ones(
    make_trainer, advantage
):
    """The penalty is in fourths, which fp64 adds to 1e8 without rounding."""
    found = []
    for offset in (0.0, 1e8):
        given = lambda completions, at=offset, **_: [at + i for i in range(len(completions))]  # noqa: E731
        penalty = {"algorithm.overlong": "penalty", "algorithm.overlong_buffer": 4}
        changes = {"rollout.sampling.max_tokens": 4, "algorithm.advantage": advantage}
        trainer = make_trainer(RecordingHook(), given, **penalty | changes)
        index, completions = trainer._roll_out(1)
        metrics, experience = trainer._experience(1, index, completions)
        assert metrics["reward/equal_group_fraction"] == 0
        found.append(torch.cat([*experience.advantages]))
    assert torch.equal(*found) and bool(found[0].all())


def without_some(completions, **_):
    return [None if i % 3 == 0 else len(text) / 9 for i, text in enumerate(completions)]


@pytest.mark.filterwarnings("ignore:all reward functions returned None")
@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"])
def test_a_completion_without_a_reward_is_passed_by(make_trainer, name):
    metrics = make_trainer(RecordingHook(), without_some, **{"algorithm.name": name}).step(1)
    assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["reward/mean"])


@pytest.mark.parametrize(("overlong", "tokens"), [("mask", 9), ("mask_counted", 14), ("keep", 14)])
def test_masked_completions_leave_the_count_of_tokens_of_the_whole_update(
    make_trainer, overlong, tokens
):
    """Micro-batches of the first of two updates, whose completions have 4 + 5 + 3 + 2 tokens."""
    update = {"algorithm.updates_per_rollout": 2, "algorithm.loss": "dapo"}
    trainer = make_trainer(RecordingHook(), **update, **{"algorithm.overlong": overlong})
    keep = torch.tensor([True, False, True, True, *[False] * 4])
    lengths = [4, 5, 3, 2, 1, 1, 1, 1]
    given = SimpleNamespace(lengths=lengths, keep=None if overlong == "keep" else keep)
    parts = [trainer._weights(given, [0, 1, 2, 3], part, "cpu") for part in ([0], [1, 2], [3])]
    wanted = torch.tensor([1.0] * 14)
    wanted[4:9] = float(overlong == "keep")
    assert torch.equal(torch.cat(parts), wanted / tokens)


@pytest.mark.parametrize("signature", ["ours", "trl"])
@pytest.mark.parametrize(("skip", "text"), [({}, "ab"), ({"skip": False}, "a<|bos|>b<|eos|>")])
def test_a_reward_reads_special_tokens_as_the_recipe_says_and_their_ids(
    make_trainer, signature, skip, text
):
    seen = []

    def reward(completions, completion_ids, **_):
        seen.append((completions, completion_ids))
        return [0.0] * len(completions)

    changes = {f"reward.{name}_special_tokens": value for name, value in skip.items()}
    trainer = make_trainer(RecordingHook(), **changes)
    trainer.rewards = [RewardFunction("mine", reward, signature=signature)]
    _, completions = trainer._roll_out(1)
    completions = [replace(c, token_ids=[97, 257, 98, 258]) for c in completions]
    trainer._rewards([trainer.train.examples[0]] * len(completions), completions)
    assert seen == [([text] * len(completions), [[97, 257, 98, 258]] * len(completions))]
    assert trainer._texts(completions[:1]) == [text]
