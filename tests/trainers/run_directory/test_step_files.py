import json

import pytest
import torch
from safetensors.torch import load_file

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import each_digest
from rl_consistency.trainers.algorithms.grpo import GRPOTrainer
from rl_consistency.trainers.hooks import ConsistencyHook
from rl_consistency.trainers.run_directory.step_files import StepFiles, read_digests

MADE = ["tokens", "logprobs", "training_logprobs", "gradients", "weights"]


def digests_of(run):
    return read_digests(run.directory / "run" / "digests.jsonl")


def test_every_step_leaves_the_digests_of_what_it_made_in_the_order_of_their_making(tiny_run):
    _, rows = tiny_run(**{"training.eval_every": 1})
    digests = digests_of(tiny_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]  # 0 is the first evaluation
    assert [list(row) for row in digests] == [
        ["step", "initial_weights", *MADE],
        ["step", *MADE],
        ["step", *MADE],
    ]
    weights = load_file(
        tiny_run.directory / "run" / "checkpoints" / "step_000003" / "model.safetensors"
    )
    assert digests[-1]["weights"] == each_digest(weights)
    assert digests[0]["initial_weights"].keys() == digests[0]["gradients"].keys() == weights.keys()
    for row in digests:
        assert row["logprobs"] == row["training_logprobs"]
    made = [json.dumps(row[name]) for row in digests for name in (*MADE[:2], *MADE[3:])]
    assert len(set(made)) == len(made)


def test_the_seconds_of_all_digests_are_those_of_the_metric(tiny_run, monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr("rl_consistency.trainers.hooks.perf_counter", lambda: next(seconds))
    _, rows = tiny_run()
    assert [row["time/digest_seconds"] for row in rows] == [6, 5, 5]


def test_a_step_that_drift_stopped_leaves_what_it_made_until_then(tiny_run, monkeypatch):
    real = ConsistencyHook.on_training_logprobs

    def drifted(self, logprobs):
        changed = [torch.nextafter(part, part.new_tensor(-9e9)) for part in logprobs]
        return real(self, changed if self._current.step == 2 else logprobs)

    monkeypatch.setattr(ConsistencyHook, "on_training_logprobs", drifted)
    with pytest.raises(ConsistencyError):
        tiny_run()
    _, second = digests_of(tiny_run)
    assert [*second] == ["step", *MADE[:3]]
    assert second["logprobs"] != second["training_logprobs"]


def test_a_step_that_failed_before_its_rollout_repeats_no_digests(tiny_run, monkeypatch):
    real = GRPOTrainer._roll_out

    def failing(self, step):
        if step == 2:
            raise ConsistencyError("changed", metrics={"loss": 1.0})
        return real(self, step)

    monkeypatch.setattr(GRPOTrainer, "_roll_out", failing)
    with pytest.raises(ConsistencyError):
        tiny_run()
    assert [row["step"] for row in digests_of(tiny_run)] == [1]


def test_a_refused_file_leaves_the_other_uncut(tmp_path):
    files = StepFiles(tmp_path, None, lambda: {"tokens": "ab"})
    files.log(1, {"loss": 0.5})
    state = files.state()
    files.log(2, {"loss": 0.5})
    files.close()
    before = (tmp_path / "digests.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is missing or damaged"):
        StepFiles(tmp_path, state, dict)
    assert (tmp_path / "digests.jsonl").read_bytes() == before


@pytest.mark.parametrize("value", ["1", "[]", "null", '{"a": 1}'])
def test_what_is_no_digest_is_named_with_file_and_line(tmp_path, value):
    (tmp_path / "d.jsonl").write_text(f'{{"step": 1, "tokens": {value}}}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 1: 'tokens' is neither a digest"):
        read_digests(tmp_path / "d.jsonl")
