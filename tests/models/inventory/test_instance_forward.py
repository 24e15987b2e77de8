"""A forward that is set on a module of a live session: the next call names who set it."""

import functools
import re
from unittest.mock import Mock

import pytest
import torch

from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from tests.models.inventory.scores import scores, tokens


def halved_forward(module):
    """A plain function that says, as TRL's does, that it is the forward it wraps."""

    @functools.wraps(type(module).forward)
    def half(*args, **kwargs):
        return type(module).forward(module, *args, **kwargs) * 0.5

    module.forward = half


def by_trl(module):
    utils = pytest.importorskip("trl.trainer.utils", reason="trl is an optional extra")
    utils.add_fused_lm_head(module)


def partial_forward(module):
    module.forward = functools.partial(type(module).forward, module)


def mock(module):
    """It has every attribute that is asked for."""
    module.forward = Mock(side_effect=AssertionError("it must not be reached"))


HALF, NORM = f"{__name__}.halved_forward.<locals>.half", "CanonicalRMSNorm.forward"
SET = {
    "TRL's fused head": (by_trl, "", "trl.trainer.utils.add_fused_lm_head.<locals>._fused_forward"),
    "a wrapping function": (halved_forward, "model.layers.1.mlp", HALF),
    "a partial": (partial_forward, "model.norm", f"rl_consistency.models.modules.{NORM}"),
    "a mock": (mock, "model.layers.0.self_attn", "a unittest.mock.Mock"),
}


@pytest.mark.parametrize("change, path, origin", SET.values(), ids=SET)
def test_the_next_call_names_the_module_who_set_it_and_attach(change, path, origin, model):
    batch = torch.tensor(tokens(model))
    with patch(model) as session:
        before = scores(model)
        module = model.get_submodule(path)
        change(module)
        message = (
            rf"module {re.escape(path or 'root')} .*replaced on the instance by "
            rf"{re.escape(origin)};.*rl_consistency\.attach\(trainer\)"
        )
        for compute in (lambda: scores(model), lambda: model.model(input_ids=batch)):
            with pytest.raises(UnsupportedModelError, match=message):
                compute()
        assert not session.live
        del module.forward
        assert session.live and torch.equal(scores(model), before)


def test_trl_s_own_call_of_a_patched_model_raises_too(model):
    with patch(model):
        by_trl(model)
        ids = torch.tensor(tokens(model))
        with pytest.raises(UnsupportedModelError, match=r"add_fused_lm_head.*attach\(trainer\)"):
            model(input_ids=ids, labels=ids, fused_lm_head=True)
        del model.forward
