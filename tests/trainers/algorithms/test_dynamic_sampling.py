import shutil

import torch

from rl_consistency.trainers import run
from rl_consistency.trainers.algorithms.dynamic_sampling import Drawn, fill_batch
from rl_consistency.trainers.rewards import Rewards
from tests.trainers.algorithms.test_grpo_step import RecordingHook, make_trainer

__all__ = ["make_trainer"]


def rounds_of(*batches):
    """`draw` of groups of two with these rewards; a sample is named by round, group and place."""

    def draw(number):
        flat = [value for group in batches[number] for value in group]
        names = [(number, i // 2, i % 2) for i in range(len(flat))]
        rewards = Rewards(flat, {"given": flat})
        return Drawn(list(range(len(flat))), names, rewards, torch.tensor(flat))

    return draw


def groups(drawn):
    assert all(place == i % 2 for i, (*_, place) in enumerate(drawn.completions))
    return [name[:2] for name in drawn.completions[::2]]


def test_groups_of_equal_rewards_are_left_out_and_further_ones_drawn():
    draw = rounds_of([(1, 0), (1, 1), (0, 0)], [(0, 0), (0, 1), (1, 0)], [(1, 0)] * 3)
    drawn, rounds, metrics = fill_batch(draw, 3, 2, max_rounds=10)
    assert rounds == 2 and groups(drawn) == [(0, 0), (1, 1), (1, 2)]
    assert drawn.rewards.total == [1, 0, 0, 1, 1, 0] == drawn.rewards.by_function["given"]
    assert drawn.shaped.tolist() == [1, 0, 0, 1, 1, 0]
    assert metrics == {
        "dynamic_sampling/rounds": 2,
        "dynamic_sampling/dropped_groups": 3,
        "dynamic_sampling/filled_groups": 0,
        "dynamic_sampling/reward_mean": 5 / 12,
    }


def test_a_full_first_batch_is_taken_as_it_is():
    drawn, rounds, _ = fill_batch(rounds_of([(1, 0), (0, 2)]), 2, 2, max_rounds=3)
    assert rounds == 1 and groups(drawn) == [(0, 0), (0, 1)]


def test_after_the_last_round_equal_groups_fill_the_step():
    draw = rounds_of([(1, 1), (0, 0)], [(0, 1), (2, 2)])
    drawn, rounds, metrics = fill_batch(draw, 2, 2, max_rounds=2)
    assert rounds == 2 and groups(drawn) == [(1, 0), (0, 0)]
    assert metrics["dynamic_sampling/filled_groups"] == 1
    assert metrics["dynamic_sampling/dropped_groups"] == 2


def mostly_equal(completions, answers, **_):
    """Groups differ for few prompts."""
    return [float(int(a) % 3 == 0 and len(t) % 2) for t, a in zip(completions, answers)]


def test_a_step_learns_from_groups_that_differ_and_the_next_goes_on_behind_them(make_trainer):
    hook = RecordingHook()
    given = {"algorithm.dynamic_sampling": {"max_rounds": 40}, "rollout.prompts_per_step": 2}
    trainer = make_trainer(hook, mostly_equal, **given)
    first = trainer.step(1)
    rounds = first["dynamic_sampling/rounds"]
    assert rounds > 1 and trainer.extra_rounds == rounds - 1
    assert first["reward/equal_group_fraction"] == 0
    drawn = trainer._order.draws(rounds)
    seen = []
    trainer._draw, real = lambda *given: seen.append(given[3]) or real(*given), trainer._draw
    trainer.step(2)
    assert seen[0] == list(drawn)


DYNAMIC = {
    "training.save_every": 1,
    "algorithm.name": "dapo",
    "algorithm.dynamic_sampling": {"max_rounds": 3},
    "reward.functions": [{"name": "toy_rewards:rare"}],
}
RARE = "\ndef rare(completions, **_): return [float(len(t) % 5 == 0) for t in completions]\n"


def test_a_resumed_run_draws_the_prompts_that_the_whole_one_drew(tiny_run, lasting, monkeypatch):
    with (tiny_run.directory / "toy_rewards.py").open("a") as file:
        file.write(RARE)
    _, rows = tiny_run.of_its_own("whole", **DYNAMIC)
    assert any(row["dynamic_sampling/rounds"] > 1 for row in rows[:2])
    tiny_run(**DYNAMIC | {"training.steps": 2})
    shutil.copytree(tiny_run.directory / "run", tiny_run.directory / "copy")
    _, resumed = tiny_run(**DYNAMIC, resume=True)
    assert lasting(resumed) == lasting(rows)
    # Negative control: the position is forgotten.
    restore = run._Run.restore

    def forgetful(self):
        step = restore(self)
        self.trainer.extra_rounds = 0
        return step

    monkeypatch.setattr(run._Run, "restore", forgetful)
    _, resumed = tiny_run.of_its_own("copy", **DYNAMIC, resume=True)
    assert lasting(resumed) != lasting(rows)
