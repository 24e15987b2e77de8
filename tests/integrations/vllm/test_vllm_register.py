"""The entry point: off until asked, exact releases."""

import os
import re
from pathlib import Path

import pytest

from rl_consistency.integrations.vllm.calls import CALLS
from rl_consistency.models.families import FAMILIES
from tests.integrations.vllm.fake_vllm import ModelRegistry

COPIED = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


@pytest.fixture
def register(monkeypatch):
    from rl_consistency.integrations.vllm import register, versions

    monkeypatch.setattr(versions, "version", lambda name: "0.26.0")
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(COPIED, "")
    ModelRegistry.models.clear()
    vars(ModelRegistry).pop("register_model", None)
    return register


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_registered_until_asked(register, monkeypatch, value):
    monkeypatch.delenv("RL_CONSISTENCY_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("RL_CONSISTENCY_VLLM", value)
    register()
    assert not ModelRegistry.models


def test_every_family_is_served_by_one_class(register, monkeypatch):
    monkeypatch.setenv("RL_CONSISTENCY_VLLM", "1")
    register()
    register()
    assert set(ModelRegistry.models) == {f"{name}ForCausalLM" for name in FAMILIES.values()}
    assert len(set(ModelRegistry.models.values())) == 1


def test_a_model_that_is_not_covered_is_not_served_by_vllms_own(register, monkeypatch):
    monkeypatch.setenv("RL_CONSISTENCY_VLLM", "1")
    ModelRegistry.register_model("TransformersForCausalLM", object)
    register()
    assert "TransformersForCausalLM" not in ModelRegistry.models


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "TheirsForCausalLM"])
def test_a_model_that_comes_later_is_not_served_either(register, monkeypatch, name):
    """Of a plug-in behind this one, or of vLLM's `model_class_overrides`."""
    monkeypatch.setenv("RL_CONSISTENCY_VLLM", "1")
    register()
    ours = dict(ModelRegistry.models)
    ModelRegistry.register_model(name, object)
    assert ModelRegistry.models == ours
    register()
    assert ModelRegistry.models == ours


@pytest.mark.parametrize("own", ["", "MINE,OTHER", "RL_CONSISTENCY_VLLM"])
def test_workers_that_ray_starts_get_the_variable_too(register, monkeypatch, own):
    """vLLM gives them its own variables only, and one without ours serves vLLM's model."""
    monkeypatch.setenv("RL_CONSISTENCY_VLLM", "1")
    monkeypatch.setenv(COPIED, own)
    register()
    register()
    kept = [name for name in own.split(",") if name not in ("", "RL_CONSISTENCY_VLLM")]
    assert os.environ[COPIED].split(",") == [*kept, "RL_CONSISTENCY_VLLM"]


def test_another_value_is_refused(register, monkeypatch):
    monkeypatch.setenv("RL_CONSISTENCY_VLLM", "yes")
    with pytest.raises(ValueError, match="1 turns the plug-in on"):
        register()


@pytest.mark.parametrize("found", ["0.26.0", "0.26.0+cu129", "0.31.0", "0.33.0"])
def test_a_covered_release_is_taken_in_any_build(register, monkeypatch, found):
    from rl_consistency.integrations.vllm import versions

    monkeypatch.setattr(versions, "version", lambda name: found)
    versions.require_covered()


@pytest.mark.parametrize("found", ["0.25.1", "0.26.1", "0.32.0"])
def test_a_release_that_is_not_covered_is_refused_by_name(register, monkeypatch, found):
    from rl_consistency.integrations.vllm import versions

    monkeypatch.setenv("RL_CONSISTENCY_VLLM", "1")
    monkeypatch.setattr(versions, "version", lambda name: found)
    with pytest.raises(ValueError, match=rf"vLLM {found} is installed.*pip install vllm==0.26.0"):
        register()
    assert not ModelRegistry.models


def test_the_calls_that_the_page_names_exist():
    """They need no function, which vLLM's processes take as pickles alone."""
    page = Path(__file__).parents[3].joinpath("docs", "vllm.md").read_text("utf-8")
    assert set(re.findall(r'collective_rpc\("(\w+)"\)', page)) == CALLS.keys()
