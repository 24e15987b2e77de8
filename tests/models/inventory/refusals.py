"""Changes of a model, as tables name them, and the two ways in which each is refused."""

import pytest
import torch

from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.engine import RolloutEngine
from tests.models.inventory.scores import SAMPLING, rolled_out, scores, tokens


def set_on(path, **attributes):
    """A change of attributes of one module."""

    def change(model, undo):
        for name, value in attributes.items():
            setattr(model.get_submodule(path), name, value)

    return change


def at(path, function):
    """A call with one module."""
    return lambda model, undo: function(model.get_submodule(path))


def in_config(**values):
    def change(model, undo):
        for name, value in values.items():
            setattr(model.config, name, value)

    return change


def hooked(path, kind="forward", hook=lambda module, *_: None):
    def change(model, undo):
        undo.enter_context(getattr(model.get_submodule(path), f"register_{kind}_hook")(hook))

    return change


def replaced(owner, name, value):
    """A change outside the model: a class or function of transformers."""

    def change(model, undo):
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    return change


def added(owner, name, value):
    """A member that a class did not have."""

    def change(model, undo):
        undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    return change


def refused_untouched(change, message, model, undo):
    change(model, undo)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=message):
        patch(model)
    assert [type(module) for module in model.modules()] == classes


def refused_live(change, message, model, undo):
    with patch(model) as session:
        engine_before = RolloutEngine(model, eos_token_id=None, num_kv_blocks=32)
        scores(model)
        change(model, undo)
        for compute in (
            lambda: scores(model),
            lambda: model(input_ids=torch.tensor(tokens(model))),
            lambda: model.model(input_ids=torch.tensor(tokens(model))),
            lambda: engine_before.generate(tokens(model, 9), SAMPLING),
            lambda: rolled_out(model),
        ):
            with pytest.raises(UnsupportedModelError, match=message):
                compute()
        with pytest.raises(ConsistencyError, match=message):
            session.verify()
        assert not session.live
