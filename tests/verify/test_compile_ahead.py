"""Compiling ahead: what threads do, and what they are kept from. On a GPU see tests/gpu."""

from threading import Thread, get_ident

import pytest
import torch
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.core import compile_ahead as module
from rl_consistency.kernels.core.compile_ahead import compile_ahead, use_threads
from rl_consistency.kernels.core.remembered_launch import _key, remembered


def nothing():
    pass


class Grids:
    """What a kernel was compiled to: notes the grids it is launched with."""

    function = packed_metadata = None

    def __init__(self, launched):
        self.launched = launched

    def run(self, x, y, z, *_):
        self.launched.append((x, y, z))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel of a stubbed device, and how it was run: (warm-up only, thread)."""
    runs = []

    def run(self, *args, grid, warmup, **options):
        runs.append((warmup, get_ident()))

    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "_threads", 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    monkeypatch.setattr(JITFunction, "run", run)
    return JITFunction(nothing)[(1,)], runs


def test_nothing_is_launched_while_it_compiles_and_everything_afterwards(kernel):
    launch, runs = kernel
    compile_ahead([launch] * 3)
    assert [warmup for warmup, _ in runs] == [True] * 3
    assert get_ident() not in {thread for _, thread in runs}
    launch()
    assert runs[-1] == (False, get_ident())


def test_what_is_remembered_is_not_launched_while_it_compiles(kernel):
    _, runs = kernel
    launch = remembered(JITFunction(nothing))
    launched = []
    launch.kernel.arg_names = ()
    launch._compiled[_key(0, (), [], {})] = (Grids(launched), ())
    compile_ahead([lambda: launch[(1,)]()])
    assert [warmup for warmup, _ in runs] == [True] and not launched
    launch[(1,)]()
    assert launched == [(1, 1, 1)]


def test_another_thread_launches_as_ever_meanwhile(kernel):
    launch, runs = kernel

    def beside():
        other = Thread(target=launch)
        other.start()
        other.join()

    compile_ahead([beside, launch])
    assert sorted(warmup for warmup, _ in runs) == [False, True]


def test_an_error_passes_through_and_launching_is_put_back(kernel):
    launch, runs = kernel

    def refuse():
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        compile_ahead([refuse])
    launch()
    assert runs == [(False, get_ident())]


def test_a_process_that_shares_its_cores_compiles_in_fewer_threads(kernel):
    launch, runs = kernel
    use_threads(1)
    compile_ahead([launch] * 8)
    assert len({thread for _, thread in runs}) == 1


def test_the_interpreter_has_nothing_to_compile():
    compile_ahead([lambda: pytest.fail("called")])
