"""What `attach` adds to the wandb run of a trainer, read back from the offline file."""

import errno
import json
import os

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")
pytest.importorskip("wandb", reason="wandb is an optional extra")

import wandb

from rl_consistency.integrations.wandb_drift import ALERT
from rl_consistency.parity.drift import WorstToken
from rl_consistency.parity.foreign_drift import DEFINITIONS
from rl_consistency.parity.histograms import HISTOGRAMS
from rl_consistency.parity.metric_table import WORST_TOKENS
from tests.integrations.trainers import grpo, logged, sft
from tests.trainers.tracking.wandb_file import records


@pytest.fixture
def offline(tmp_path):
    """A directory with an offline run, which transformers goes on with."""
    wandb.init(dir=tmp_path, mode="offline", settings=wandb.Settings(silent=True))
    yield tmp_path
    wandb.finish()


def test_a_trainer_that_drifts_shows_histograms_worst_tokens_and_an_alert(
    directory, offline, attach
):
    trainer = grpo(directory, offline, report_to=["wandb"])
    attach(trainer, measure_only=True, metrics_of=list(DEFINITIONS))
    trainer.train()
    wandb.finish()
    found = records(offline)
    rows = [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    shown = [row for row in rows if "train/consistency/tokens" in row]
    assert len(shown) == 2, "in the row of the trainer's own figures"
    for row in shown:
        for key in (histogram.wandb for histogram in HISTOGRAMS):
            assert sum(row[f"{key}/values"]) == row["train/consistency/tokens"]
        assert row[f"{WORST_TOKENS}/nrows"] > 0
        assert row["train/token_mult_prob_error"] >= 1.0
    files = offline.glob("wandb/offline-*/files/media/table/**/worst_tokens_*.table.json")
    tables = [json.loads(file.read_text()) for file in files]
    assert len(tables) == 2 and all(t["columns"] == list(WorstToken._fields) for t in tables)
    for token, prompt, number, position, *_, difference in tables[0]["data"]:
        assert isinstance(token, str) and prompt == 0 and number < 4 and position < 6
        assert difference != 0
    alerts = [record.alert for record in found if record.HasField("alert")]
    assert [alert.title for alert in alerts] == [ALERT] * 2
    assert "other logprobs in training than in rollout" in alerts[0].text


def test_an_attached_trainer_shows_equal_tokens_and_no_alert(directory, offline, attach):
    trainer = grpo(directory, offline, report_to=["wandb"], max_steps=1)
    attach(trainer, metrics_of=["trl"])
    trainer.train()
    wandb.finish()
    found = records(offline)
    assert not any(record.HasField("alert") for record in found)
    assert logged(trainer, "sampling/sampling_logp_difference/max") == [0.0]
    assert logged(trainer, "sampling/importance_sampling_ratio/min") == [1.0]


def test_a_full_disk_under_wandb_costs_one_warning(directory, offline, attach, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wandb, "Table", full)
    trainer = grpo(directory, offline, report_to=["wandb"])
    attach(trainer, measure_only=True)
    with pytest.warns(UserWarning, match="No space left on device.*training goes on") as told:
        trainer.train()
    assert len([w for w in told if "worst tokens" in str(w.message)]) == 1
    assert len(logged(trainer, "consistency/tokens")) == 2


def test_a_trainer_whose_metrics_are_not_known_is_refused(attach, make):
    with pytest.raises(ValueError, match="no drift metrics of openrlhf are known; known are trl"):
        attach(make(), metrics_of=["openrlhf"])
    with pytest.raises(TypeError, match="does not generate; leave out .*metrics_of"):
        attach(make(sft), metrics_of=["trl"])
