"""Hooks of libraries are known by the file that their code is in, and by no name."""

import functools
import sys
import types

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_state
from transformers.utils import output_capturing

from rl_consistency.models.installed_code import homes, written_in
from rl_consistency.models.sharding import of_a_library

OWN = "def own(*given):\n    return given"
STATE = _fsdp_state.__name__


def executed(space):
    """A function whose code is ours, in this namespace."""
    exec(OWN, space)
    return space.pop("own")


def copied(function):
    """Its code, in a namespace of ours."""
    return types.FunctionType(function.__code__, {"__name__": function.__globals__["__name__"]})


@functools.wraps(_fsdp_state.FSDPState._pre_forward)
def wrapper(*given):
    return given


OTHERS = {
    "namespace": executed(vars(_fsdp_state)),
    "copy": copied(_fsdp_state._get_module_fsdp_state),
    "made up": executed(vars(types.ModuleType(STATE))),
    "wrapper": wrapper,
    "lambda": lambda *_: None,
    "builtin": print,
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_a_name_makes_no_code_that_of_a_library(function):
    assert written_in(function) in ("", __name__)
    assert not of_a_library(function)
    assert not of_a_library(functools.partial(function))
    assert not of_a_library(torch.compiler.disable(OTHERS["lambda"]))


def test_a_module_under_a_library_s_name_has_no_file_of_it(monkeypatch):
    module = types.ModuleType("torch.distributed.fsdp._fully_shard.mine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not of_a_library(executed(vars(module)))


def test_replaced_code_of_a_library_s_own_function_is_seen(monkeypatch):
    install = output_capturing.install_output_capuring_hook
    assert written_in(install) == output_capturing.__name__
    monkeypatch.setattr(install, "__code__", OTHERS["lambda"].__code__)
    assert written_in(install) == ""


def test_hooks_of_fsdp2_are_known_alone_and_in_a_group():
    state = _fsdp_state.FSDPState()
    modules = [torch.nn.Identity(), torch.nn.Identity()]

    def hooks(pre, post):
        handle = _fsdp_state._register_group_forward_hooks(modules, pre, post, set(), state._cast)
        found = [*modules[0]._forward_pre_hooks.values(), *modules[1]._forward_hooks.values()]
        handle.remove()
        return found

    state._cast = state._lazy_init
    assert all(map(of_a_library, [state._pre_forward, state._post_forward]))
    assert all(map(of_a_library, hooks(state._pre_forward, state._post_forward)))
    assert not any(map(of_a_library, hooks(OTHERS["lambda"], OTHERS["lambda"])))
    assert STATE in homes(state._pre_forward)
