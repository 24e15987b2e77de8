"""A snapshot holds only while a forward reads the very same objects."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from rl_consistency.models import inventory, patch
from rl_consistency.models.snapshot import Snapshot
from rl_consistency.verify.presets import build_preset


@pytest.fixture(scope="module")
def session():
    model = build_preset("tiny-qwen3")
    with patch.patch(model) as session:
        yield session


class Equal:
    """Is equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


def place(space, key, value):
    """Puts a value in a dictionary, and gives what undoes that."""
    patching = pytest.MonkeyPatch()
    patching.setitem(space, key, value)
    return patching.undo


def attribute(target, name, value):
    """The same of an attribute."""
    patching = pytest.MonkeyPatch()
    patching.setattr(target, name, value)
    return patching.undo


def own_dict(target):
    return attribute(target, "__dict__", dict(vars(target)))


CHANGES = {
    "an integer for a truth value": lambda m: place(vars(m.lm_head), "in_features", 32.0),
    "what equals all": lambda m: place(vars(m.model.norm), "variance_epsilon", Equal()),
    "a container of another class": lambda m: place(
        vars(m.lm_head), "_parameters", OrderedDict(m.lm_head._parameters)
    ),
    "a dictionary of its own": lambda m: own_dict(m.model.layers[1].mlp),
    "a parameter": lambda m: place(
        m.model.layers[1].mlp.up_proj._parameters,
        "weight",
        nn.Parameter(m.model.layers[1].mlp.up_proj.weight.detach()),
    ),
    "a dtype": lambda m: attribute(m.model.norm.weight, "data", m.model.norm.weight.data.half()),
    "a sign": lambda m: attribute(
        m.model.norm.weight, "data", torch._neg_view(m.model.norm.weight.data)
    ),
    "a module": lambda m: place(m.model.layers[0].mlp._modules, "act_fn", nn.SiLU()),
    "a value of the config": lambda m: attribute(m.config, "rms_norm_eps", 0.5),
    "a kind of value of the config": lambda m: place(vars(m.config), "use_cache", 1),
    "the config's dictionary": lambda m: own_dict(m.config),
    "a nested value": lambda m: place(m.config.rope_parameters, "rope_theta", 5.0),
    "a name of the config": lambda m: place(
        type(m.config).attribute_map, "rms_norm_eps", "initializer_range"
    ),
    "a function": lambda m: attribute(nn.functional, "silu", nn.functional.relu),
    "a member of a class": lambda m: attribute(type(m.model.norm), "forward", lambda *_: None),
    "a base's call": lambda m: attribute(nn.Module, "__call__", lambda *_: None),
    "checkpoints": lambda m: attribute(m.model, "gradient_checkpointing", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_object_is_seen_and_none_that_was_put_back(session, name):
    session.check()
    snapshot = session.snapshot()
    assert snapshot.holds() and session.snapshot() is snapshot
    undo = CHANGES[name](session.model)
    try:
        assert not snapshot.holds()
    finally:
        undo()
    assert snapshot.holds() or Snapshot(session.model).holds()


def test_a_mode_and_values_of_weights_may_change(session):
    session.check()
    model, snapshot = session.model, session.snapshot()
    for mode in (True, False, True):
        model.train(mode)
        assert snapshot.holds()
    state = session.check()
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0).mul_(0.5)
    assert session.check() is state and snapshot.holds()
    model.eval()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(1.0)  # a buffer is read as it is
    assert not snapshot.holds()


def test_a_check_looks_closer_only_where_the_snapshot_does_not_hold(session, monkeypatch):
    session.check()
    snapshot, reads = session.snapshot(), []
    read = inventory.ForwardWatch.read
    monkeypatch.setattr(inventory.ForwardWatch, "read", lambda self: reads.append(1) or read(self))
    state = session.check()
    assert session.check() is state and not reads
    handle = session.model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="lm_head .* has a hook"):
        session.check()
    handle.remove()
    assert session.check() == state and len(reads) >= 2
    assert session.snapshot() is not snapshot


def test_the_session_keeps_no_snapshot_alive():
    with patch.patch(model := build_preset("tiny-qwen3")) as session:
        session.snapshot()
        assert session.model is model
        assert session._snapshot() is None
