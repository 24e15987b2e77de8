"""Policies by a name of the hub, as directories of its cache."""

import json
import shutil

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from rl_consistency.trainers import hub
from rl_consistency.trainers.config.sections import PolicySection
from rl_consistency.trainers.policy_files import PolicyError

COMMIT = "0123456789" * 4


@pytest.fixture
def of_hub(tiny_run, monkeypatch):
    """Changes of the recipe that train a model saved in a cache of the hub; what is asked of it."""
    changes, asked = tiny_run.save_model(), []
    cached = shutil.copytree(changes["policy.path"], tiny_run.directory / "snapshots" / COMMIT)

    def snapshot(name, **given):
        asked.append((name, given["revision"], given["allow_patterns"]))
        return str(cached)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return changes, asked


def test_a_name_of_the_hub_trains_as_its_directory_and_the_manifest_has_the_commit(
    tiny_run, of_hub
):
    changes, asked = of_hub
    changes |= {"training.steps": 1, "training.save_every": None}
    by_path, _ = tiny_run.of_its_own("path", **changes)
    named = changes | {"policy.path": "org/tiny-model@v1.0"}
    by_name, _ = tiny_run(**named)
    assert by_name["parameter_digest"] == by_path["parameter_digest"]
    ((name, revision, patterns),) = asked
    assert (name, revision) == ("org/tiny-model", "v1.0") and not any("py" in p for p in patterns)
    for run, commits in {"run": {"policy org/tiny-model@v1.0": COMMIT}, "path": {}}.items():
        manifest = json.loads((tiny_run.directory / run / "manifest.json").read_text())
        assert manifest["hub"] == commits


def test_the_older_key_is_the_same_idea(of_hub):
    assert PolicySection(hub="gpt2").source == "gpt2"
    assert PolicySection(path="org/name").source == "org/name"
    assert hub.model_directory("gpt2")[1] == COMMIT and of_hub[1][-1][:2] == ("gpt2", None)


def test_a_name_that_neither_disk_nor_hub_has_is_told_with_the_remedy(monkeypatch):
    def offline(*_, **__):
        raise LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    told = r"models/mine: there is no such directory here, .*HF_HUB_OFFLINE.*cannot reach the hub"
    with pytest.raises(PolicyError, match=told):
        hub.model_directory("models/mine")
