"""A run localizes its first mismatch by itself, and its message names what it found."""

import json

import pytest
import torch

from rl_consistency.models import modules
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity import localize as localizing
from rl_consistency.parity.histograms import HISTOGRAMS
from rl_consistency.parity.metric_table import WORST_TOKENS
from rl_consistency.parity.replay import TEXTS
from rl_consistency.trainers.hooks import ConsistencyHook
from rl_consistency.verify.substitution import attribute
from tests.trainers.tracking.wandb_file import records

WARN = {"consistency.on_drift": "warn", "training.steps": 2}


def worse_decode(q, paged, index, *, run=modules.attention_paged, **named):
    out, lse = run(q, paged, index, **named)
    return out * (1 + 2**-20), lse


def nudged(self, logprobs, *, run=ConsistencyHook.on_training_logprobs):
    return run(self, [part - 1e-6 for part in logprobs])


def test_the_first_mismatch_names_the_op_and_the_next_ones_do_not(tiny_run):
    told = []
    with attribute(modules, "attention_paged", worse_decode):
        tiny_run(announce=told.append, **WARN)
    drifted = [line for line in told if "other logprobs in training" in line]
    assert len(drifted) == 2
    assert "differs first in: attention of layer 0 (model.layers.0.self_attn)" in drifted[0]
    assert "differs first" not in drifted[1]
    (file,) = (tiny_run.directory / "run" / "replay").rglob("localization.json")
    assert str(file) in drifted[0]
    record = json.loads(file.read_text())
    assert record["first"]["op"] == "attention" and record["between"] == ["rollout", "training"]
    texts = [json.loads(f.read_text()) for f in (tiny_run.directory / "run").rglob(TEXTS)]
    assert len(texts) == 2 and all(isinstance(text, str) for t in texts for text in t.values())
    tiny_run(overwrite=True, **WARN)  # the files are the run's own, to remove


def test_wandb_has_every_figure_of_a_run_and_what_drifted(tiny_run):
    pytest.importorskip("wandb", reason="wandb is an optional extra")
    with attribute(modules, "attention_paged", worse_decode):
        _, rows = tiny_run(announce=str, **WARN, **{"tracking.wandb": {"project": "bits"}})
    found = records(tiny_run.directory / "run")
    logged = [record.history for record in found if record.HasField("history")]
    names = [{item.nested_key[0] for item in history.item} for history in logged]
    counted = [{name for name in row if "/count/" not in name} - {"step"} for row in rows]
    media = {*(histogram.wandb for histogram in HISTOGRAMS), WORST_TOKENS}
    assert [n & (c | media) for n, c in zip(names, counted, strict=True)] == [
        c | media for c in counted
    ]
    alerts = [record.alert for record in found if record.HasField("alert")]
    assert len(alerts) == 2 and len({alert.title for alert in alerts}) == 1
    assert "differs first in: attention of layer 0" in alerts[0].text
    kinds = [record.artifact.type for record in found if record.HasField("artifact")]
    assert kinds.count("localization") == 1, "only the first mismatch is localized"


def test_a_run_that_localized_a_mismatch_has_the_weights_of_one_that_did_not(tiny_run, lasting):
    def measured(name):
        _, rows = tiny_run.of_its_own(name, **WARN)
        return lasting(rows)

    with attribute(ConsistencyHook, "on_training_logprobs", nudged):
        localized = measured("localized")
        with attribute(localizing, "localize", no_room):
            plain = measured("plain")
    assert localized == plain


def test_a_mismatch_that_is_gone_when_run_again_is_said_to_be(tiny_run):
    with (
        attribute(ConsistencyHook, "on_training_logprobs", nudged),
        pytest.raises(ConsistencyError, match="Run again, both sides of sequence 0 are equal"),
    ):
        tiny_run()


def no_room(*_, **__):
    raise torch.OutOfMemoryError("no room")


def test_a_mismatch_that_cannot_be_localized_is_told_all_the_same(tiny_run):
    with (
        attribute(ConsistencyHook, "on_training_logprobs", nudged),
        attribute(localizing, "localize", no_room),
        pytest.raises(ConsistencyError, match=r"other logprobs .* not localized \(no room\)"),
    ):
        tiny_run()
