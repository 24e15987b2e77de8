"""Compiling ahead: what is asked of Triton, what threads do, what is kept from a pass that computes
nothing. On a GPU see tests/gpu."""

import subprocess
import sys
from threading import Thread, get_ident
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, build, driver
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.core import compile_ahead as module
from rl_consistency.kernels.core import launch as launches
from rl_consistency.kernels.core.compile_ahead import (
    compile_ahead,
    compiles_only,
    require_launches,
    use_workers,
)
from rl_consistency.kernels.core.findings import Findings, Winner
from rl_consistency.kernels.core.launch import launch_key, remembered
from rl_consistency.kernels.matmul import audit, cublaslt
from rl_consistency.kernels.matmul.cublaslt import Key

BF16 = torch.bfloat16
RUN = JITFunction.run


class Device:
    """What stands for Triton and a GPU: kernels by their arguments, compiled or launched."""

    def __init__(self):
        self.launched, self.compiled, self.built, self.known = [], [], [], {}
        self.broken = set()

    def run(self, kernel, *args, grid, warmup, **options):
        key = (kernel, *args)
        found = self.known.get(key)
        if found is None:
            mode = _async_compile.active_mode.get()
            finish = lambda compiled: self.known.update({key: compiled})  # noqa: E731
            if mode is not None:
                mode.submit(str(args), lambda: self.compile(args), finish)
            else:
                finish(self.compile(args))
        if not warmup:
            self.launched.append((args, get_ident()))

    def compile(self, args):
        if args in self.broken:
            raise ValueError(f"no registers for {args}")
        self.compiled.append((args, get_ident()))
        return SimpleNamespace(src=args, metadata=None)

    def build(self, src, metadata):
        self.built.append((src, get_ident()))


@pytest.fixture
def device(monkeypatch, tmp_path):
    found = Device()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "_workers", 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    launcher = lambda *given: found.build(*given)  # noqa: E731
    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=launcher))
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    monkeypatch.setattr(launches, "_thread", launches._Thread())
    monkeypatch.setattr(launches, "enter_context", lambda device: None)
    run = lambda kernel, *args, **options: found.run(kernel, *args, **options)  # noqa: E731
    monkeypatch.setattr(JITFunction, "run", run)
    return found


def nothing(n):
    pass


@pytest.fixture
def launch(device):
    return JITFunction(nothing)[(1,)]


def test_each_kernel_is_compiled_once_in_threads_and_nothing_is_launched(device, launch):
    numbers = [1, 2, 3, 2, 1]
    assert compile_ahead([lambda n=n: launch(n) for n in numbers]) == 3
    assert sorted(args for args, _ in device.compiled) == [(1,), (2,), (3,)]
    assert {src for src, _ in device.built} == {(1,), (2,), (3,)}
    assert get_ident() not in {thread for _, thread in device.compiled + device.built}
    assert not device.launched
    for n in numbers:
        launch(n)
    assert len(device.compiled) == 3 and len(device.launched) == 5


def test_what_is_known_is_compiled_no_second_time(device, launch):
    compile_ahead([lambda: launch(1)])
    assert compile_ahead([lambda: launch(1), lambda: launch(2)]) == 1


def test_launchers_are_built_and_not_loaded_by_threads(device, launch, monkeypatch):
    loads = []
    monkeypatch.setattr(build, "_load_module_from_path", lambda *path: loads.append(path))
    device.build = lambda src, metadata: build._load_module_from_path("launcher", "path").launch
    compile_ahead([lambda: launch(1)])
    assert not loads
    build._load_module_from_path("launcher", "path")
    assert loads == [("launcher", "path")]


def test_what_is_remembered_is_not_launched_while_it_compiles(device):
    launch = remembered(JITFunction(nothing))
    launched = []
    compiled = SimpleNamespace(
        run=lambda x, y, z, *_: launched.append((x, y, z)), function=None, packed_metadata=None
    )
    launch._compiled[launch_key(0, (1,), launch._by_type, {})] = (compiled, ())
    assert compile_ahead([lambda: launch[(1,)](1)]) == 1
    assert not launched and not device.launched
    launch[(1,)](1)
    assert launched == [(1, 1, 1)]


def test_another_thread_launches_as_ever_meanwhile(device, launch):
    def beside():
        other = Thread(target=launch, args=(7,))
        other.start()
        other.join()
        assert compiles_only()

    compile_ahead([beside, lambda: launch(1)])
    assert [args for args, _ in device.launched] == [(7,)]
    assert not compiles_only()


def test_an_error_of_a_call_passes_through_and_launching_is_put_back(device, launch):
    def refuse():
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        compile_ahead([refuse])
    launch(1)
    assert len(device.launched) == 1 and not compiles_only()
    assert _async_compile.active_mode.get() is None


def test_an_error_of_the_compiler_passes_through_and_the_others_are_kept(device, launch):
    device.broken.add((2,))
    with pytest.raises(ValueError, match="no registers") as error:
        compile_ahead([lambda n=n: launch(n) for n in (1, 2, 3)])
    assert error.value.__notes__ == ["1 of 3 kernels did not compile ahead"]
    assert _async_compile.active_mode.get() is None
    assert sorted(n for _, n in device.known) == [1, 3]
    device.broken.clear()
    launch(2)
    assert len(device.compiled) == 3


def test_an_interrupt_leaves_launching_and_every_kernel_as_they_were(device, launch):
    def interrupted(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_ahead([lambda n=n: launch(n) for n in range(20)], interrupted)
    assert _async_compile.active_mode.get() is None and not compiles_only()
    for n in range(20):
        launch(n)
    assert len(device.compiled) == len(device.launched) == 20


def test_progress_is_reported_kernel_by_kernel(device, launch):
    seen = []
    compile_ahead([lambda n=n: launch(n) for n in range(3)], lambda *at: seen.append(at))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("shares", [True, False], ids=["shared cores", "an old Python"])
def test_one_thread_compiles(device, launch, shares, monkeypatch):
    """Before Python 3.11.8 and 3.12.2 two that parse at a time may fail (gh-106905)."""
    monkeypatch.setattr(module, "_PARSES_SIDE_BY_SIDE", shares)
    use_workers(1 if shares else 4)
    compile_ahead([lambda n=n: launch(n) for n in range(8)])
    assert len({thread for _, thread in device.compiled}) == 1


def doubled(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def alone_triton_itself_compiles(device, monkeypatch):
    monkeypatch.setattr(JITFunction, "run", RUN)
    driver.active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    driver.active.get_current_device = driver.active.get_current_stream = lambda *_: 0
    launch, x = remembered(JITFunction(doubled)), torch.zeros(64)
    calls = [lambda n=n: launch[(1,)](x, 64, BLOCK=n) for n in (32, 64, 32)]
    assert compile_ahead(calls) == 2 and compile_ahead(calls) == 0
    assert len(device.built) == 2 and not x.any()


def test_triton_itself_compiles_for_sm90_in_its_asynchronous_mode():
    """By Triton's own `run`: a warm-up asks for the kernel alone and launches nothing.

    In a process of its own: where a kernel ran, the interpreter keeps Triton's language.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_functions=alone_*", __file__]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_the_interpreter_has_nothing_to_compile(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETED", True)
    assert compile_ahead([lambda: pytest.fail("called")]) == 0


KEY = Key.of("nt", BF16, BF16, False, 100, 64, 64)


def ahead(call):
    """What a call gives in a pass that computes nothing."""
    found = []
    compile_ahead([lambda: found.append(call())])
    return found[0]


def test_a_pass_that_computes_nothing_asks_no_library_and_counts_nothing(device, monkeypatch):
    monkeypatch.setattr(cublaslt, "settings_in_force", lambda: True)
    monkeypatch.setattr(cublaslt, "prefers_library", lambda *sizes: True)
    monkeypatch.setattr(cublaslt, "_as_certified", lambda matrix: True)
    monkeypatch.setattr(cublaslt, "certified", lambda *_: pytest.fail("a certificate was made"))
    a, calls = torch.zeros(100, 64, dtype=BF16), audit._counts.calls
    assert ahead(lambda: cublaslt.product(a, a, None, "nt", BF16)) is None
    out = torch.zeros(64, 64)
    assert not ahead(lambda: cublaslt.outer_from_zero(a, a, out))
    assert audit._counts.calls == calls


def test_what_rests_on_results_is_refused_in_such_a_pass(device, tmp_path, monkeypatch):
    """The mutant: a product that did not ask would make a certificate of nothing."""
    held = Findings(tmp_path / "file.json", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt, "_has_room", lambda device, key: True)
    monkeypatch.setattr(cublaslt, "compare", lambda *_: pytest.fail("compared"))
    for what in (
        lambda: cublaslt.certified(torch.device("cpu"), KEY, 100),
        lambda: held.certify(KEY.name, 0, [100]),
        lambda: held.withdraw(KEY.name, "bytes differed"),
        lambda: audit.sample(KEY.name, pytest.fail, pytest.fail),
        lambda: held.keep("work", Winner("schedule", 1.0, 1.0)),
    ):
        with pytest.raises(RuntimeError, match="nothing is computed"):
            compile_ahead([what])
    assert not list(tmp_path.iterdir()) and not held.winners
    require_launches("outside")
