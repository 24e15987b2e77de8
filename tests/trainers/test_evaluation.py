"""Evaluation sets by name, several samples of each example, pass@k."""

from itertools import combinations

import pytest

from rl_consistency.trainers.evaluation import evaluation_metrics, pass_at_k, sampling_of


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(n):
    for correct in range(n + 1):
        for k in range(1, n + 1):
            choices = list(combinations([i < correct for i in range(n)], k))
            expected = sum(map(any, choices)) / len(choices)
            assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-15)


def test_the_biased_estimate_is_another_number():
    """Negative control."""
    assert pass_at_k(5, 2, 2) == 0.7 != 1 - (1 - 2 / 5) ** 2


def test_a_completion_passes_by_its_reward(tiny_run):
    sampled = {"training.eval_sampling": {"n": 4}, "training.eval_pass_reward": 0.5}
    config = tiny_run.config(**sampled)
    rewards = [0.5, 0.4, 0.0, 0.0, 1.0, 1.0, 1.0, 0.9]
    assert evaluation_metrics(config, "sums", rewards) == {
        "eval/sums/reward": pytest.approx(4.8 / 8),
        "eval/sums/pass_at_1": (0.25 + 1) / 2,
        "eval/sums/pass_at_2": (0.5 + 1) / 2,
        "eval/sums/pass_at_4": 1.0,
    }
    greedy = evaluation_metrics(tiny_run.config(), "", rewards)
    assert greedy == {"eval/reward": pytest.approx(4.8 / 8)}


def test_one_completion_is_greedy_and_noise_is_of_seed_set_and_step(tiny_run):
    assert sampling_of(tiny_run.config(), "", 3).temperature == 0
    longer = tiny_run.config(**{"training.eval_sampling": {"max_tokens": 20}})
    assert sampling_of(longer, "", 3).temperature == 0 and longer.longest_sequence == 26
    config = tiny_run.config(**{"training.eval_sampling": {"n": 3, "top_p": 0.9}})
    sampling = sampling_of(config, "a", 3)
    assert (sampling.n, sampling.top_p, sampling.temperature) == (3, 0.9, 1.0)
    seeds = {sampling_of(config, name, step).seed for name in ("a", "b") for step in (3, 4)}
    assert len(seeds) == 4 and config.pass_at == (1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_sampling": {"m": 3}}, "unknown key m; "),
        ({"eval_sampling": {"m": 3, "n": 0}}, "unknown key m; .*; n must"),
        ({"eval_sampling": {"n": 2, "temperature": 0}}, "n greedy completions are equal"),
        ({"eval_sampling": {"n": 2}, "eval_pass_at": [1, 4]}, "4 is more than the 2 completions"),
        ({"eval_sampling": {"max_tokens": 60}}, "training.eval_sampling.max_tokens 60 = 66 tokens"),
    ],
)
def test_what_an_evaluation_cannot_do_is_refused(tiny_run, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_run.config(**{f"training.{key}": value for key, value in changes.items()})


def test_named_sets_have_metrics_of_their_own(tiny_run):
    """A run with them takes the trajectory of one without."""
    given = str(tiny_run.example_file(5, "eval.jsonl"))
    changes = {"data.task": None, "data.path": given, "training.steps": 1}
    changes["training.save_every"] = None
    plain, _ = tiny_run(**changes)
    changes |= {
        "data.eval_sets": {"few": {"path": given, "limit": 2}, "all": {"path": given}},
        "training.eval_every": 1,
        "training.eval_sampling": {"n": 2},
    }
    summary, (before, after) = tiny_run(**changes, overwrite=True)
    names = {f"eval/{name}/{what}" for name in ("few", "all") for what in ("reward", "pass_at_1")}
    assert names | {"eval/few/pass_at_2", "eval/all/pass_at_2", "eval/reward"} == {
        name for name in before if name.startswith("eval/")
    }
    assert before["eval/all/reward"] != after["eval/all/reward"]
    assert after["eval/reward"] == (after["eval/few/reward"] + after["eval/all/reward"]) / 2
    assert summary["parameter_digest"] == plain["parameter_digest"]
