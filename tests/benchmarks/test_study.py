"""The study runs the same recipe twice, and says of each run what happened."""

import json

import pytest
import yaml

from benchmarks.study import document, runs
from benchmarks.study.document import rewritten, table
from benchmarks.study.runs import LEARNING_RATES, MODES, POLICIES, RECIPE, SERIES, figures, key_of
from rl_consistency.trainers.config.recipe import load_config

ROWS = {name: [None, 0.5, 0.25] for name in SERIES}


def of(rewards):
    return ROWS | {"reward": rewards, "tokens": [None, 10, 30], "rerouted": [None, 0, 4]}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_recipe_of_each_policy_is_loaded(policy, tmp_path):
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["policy"]["build"] |= POLICIES[policy]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert load_config(tmp_path / "recipe.yaml").policy.build.architecture in ("qwen3", "qwen3_moe")


def test_a_run_that_loses_half_of_its_best_reward_has_collapsed():
    lost, kept = figures(of([0.8] + [0.1] * 10)), figures(of([0.8] + [0.7] * 10))
    assert (lost["collapsed"], kept["collapsed"]) == (1.0, 0.0)
    assert kept["reward"] == pytest.approx(0.7) and kept["rerouted"] == pytest.approx(0.1)


def test_only_runs_that_the_file_lacks_are_run(monkeypatch, tmp_path, capsys):
    file, asked = tmp_path / "runs.json", []
    everything = [
        key_of(policy, mode, rate, 1)
        for policy in POLICIES for mode in MODES for rate in LEARNING_RATES
    ]  # fmt: skip
    file.write_text(json.dumps({key: of([0.5] * 10) for key in everything[1:]}))

    def run_of(*what):
        asked.append(what)
        return of([0.5] * 10)

    monkeypatch.setattr(runs, "run_of", run_of)
    monkeypatch.setattr("sys.argv", ["runs", str(file), "--seeds", "1"])
    assert runs.main() == 0
    assert [key_of(*what[:4]) for what in asked] == everything[:1]
    assert set(json.loads(file.read_text())) == set(everything)
    assert "1/1 dense canonical" in capsys.readouterr().out


def test_the_table_has_a_line_for_each_group_and_goes_into_its_place(tmp_path, monkeypatch):
    found = {
        key_of(policy, mode, rate, seed): of([0.2 * seed] * 12)
        for policy in POLICIES for mode in MODES for rate in LEARNING_RATES for seed in (1, 2)
    }  # fmt: skip
    lines = table(found)
    assert len(lines) == 2 + len(POLICIES) * len(MODES) * len(LEARNING_RATES)
    assert "0.20, 0.40" in lines[2] and "0 of 2" in lines[2]
    text = rewritten(f"before\n{document.BEGIN}\nold\n{document.END}\nafter\n", lines)
    assert "old" not in text and text.startswith("before\n") and text.endswith("after\n")
    with pytest.raises(ValueError, match="exactly one"):
        rewritten("no place", lines)
    assert len(document.picture(found).axes) == 4
