"""Compiling ahead: what is noted, what children and threads do, what is kept from a pass that
computes nothing. On a GPU see tests/gpu."""

import _thread
import hashlib
import os
from threading import Lock, Thread, get_ident
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.runtime import _async_compile, build, cache, driver
from triton.runtime.jit import JITCallable, JITFunction

from rl_consistency.kernels.core import compile_ahead as module
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core import launch as launches
from rl_consistency.kernels.core.child_processes import finished_in_children
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
    monkeypatch.setattr(module, "finished_in_children", lambda *given: iter(()))
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


def test_one_thread_at_a_time_parses_a_kernel(device, launch, monkeypatch):
    """Before Python 3.11.8 and 3.12.2 two that parse at a time may fail (gh-106905)."""
    real, free, failed = JITCallable.parse, Lock(), []

    def parse(function):
        if not free.acquire(blocking=False):
            failed.append(function)
            return real(function)
        sleep(0.01)
        free.release()
        return real(function)

    monkeypatch.setattr(JITCallable, "parse", parse)
    device.build = lambda src, metadata: JITFunction(nothing).parse()
    compile_ahead([lambda n=n: launch(n) for n in range(8)])
    assert not failed and JITCallable.parse is parse


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


def test_an_error_of_the_compiler_names_its_kernel_and_the_others_are_kept(device, launch):
    device.broken.add((2,))
    with pytest.raises(ValueError, match="no registers") as error:
        compile_ahead([lambda n=n: launch(n) for n in (1, 2, 3)])
    assert error.value.__notes__ == ["compiling nothing ahead; 1 of 3 failed: nothing"]
    assert sorted(n for _, n in device.known) == [1, 3]
    device.broken.clear()
    launch(2)
    assert len(device.compiled) == 3


def test_an_interrupt_ends_the_pool_and_leaves_launching_as_it_was(device, launch):
    before = _thread._count()

    def interrupted(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_ahead([lambda n=n: launch(n) for n in range(50)], interrupted)
    assert _thread._count() == before and len(device.compiled) < 50
    launch(1)
    assert device.launched and compile_ahead([lambda: launch(51)]) == 1


def test_progress_is_reported_kernel_by_kernel(device, launch):
    seen = []
    compile_ahead([lambda n=n: launch(n) for n in range(3)], lambda *at: seen.append(at))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_process_that_shares_its_cores_compiles_in_fewer_threads(device, launch):
    use_workers(1)
    compile_ahead([lambda n=n: launch(n) for n in range(8)])
    assert len({thread for _, thread in device.compiled}) == 1


@pytest.fixture
def disk(device, monkeypatch, tmp_path):
    """Children compile; `device.compiled` has what this process compiles because no child has."""
    monkeypatch.setattr(module, "finished_in_children", finished_in_children)
    fresh = device.compile

    def compiled(args):
        file = tmp_path / str(args)
        if file.exists():
            return SimpleNamespace(src=args, metadata=None, child=file.read_text())
        found = fresh(args)
        file.write_text(str(os.getpid()))
        return found

    monkeypatch.setattr(device, "compile", compiled)
    return tmp_path


def test_children_compile_and_this_process_reads_what_they_left(device, launch, disk):
    seen = []
    calls = [lambda n=n: launch(n) for n in range(6)]
    assert compile_ahead(calls, lambda *at: seen.append(at)) == 6
    assert not device.compiled and not device.launched
    assert len(device.known) == 6 and str(os.getpid()) not in {
        k.child for k in device.known.values()
    }
    assert seen == [(n, 6) for n in range(1, 7)]
    launch(3)
    assert not device.compiled and len(device.launched) == 1


def test_what_no_child_can_compile_raises_its_own_error_here(device, launch, disk):
    device.broken.update({(2,), (4,)})
    with pytest.raises(ValueError, match="no registers") as error:
        compile_ahead([lambda n=n: launch(n) for n in range(6)])
    assert error.value.__notes__ == ["compiling nothing ahead; 2 of 6 failed: nothing, nothing"]
    assert sorted(n for _, n in device.known) == [0, 1, 3, 5]


def test_what_lies_on_disk_needs_no_child(device, launch, monkeypatch):
    """Children for two kernels of five, by the names of the files in Triton's cache."""
    asked = []

    def few(work, count, workers):
        asked.append(count)
        return iter(())

    monkeypatch.setattr(module, "finished_in_children", few)
    for n in (0, 2, 3):
        folder = cache.get_cache_manager(hashlib.sha256(f"({n},)".encode()).hexdigest())
        folder.put("{}", "nothing.json", binary=False)
    compile_ahead([lambda n=n: launch(n) for n in range(5)])
    assert asked == [2] and len(device.compiled) == 5


def test_one_worker_and_a_cache_that_is_not_read_compile_here(device, launch, disk, monkeypatch):
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    compile_ahead([lambda: launch(1), lambda: launch(2)])
    monkeypatch.setattr(knobs.compilation, "always_compile", False)
    use_workers(1)
    compile_ahead([lambda: launch(3), lambda: launch(4)])
    assert sorted(args for args, _ in device.compiled) == [(1,), (2,), (3,), (4,)]


def more(n):
    first = n + 1
    second = first + 1
    return second


more_kernel = JITFunction(more)


def calls_more(n):
    return more_kernel(n)


def test_kernels_begin_with_the_longest_and_with_one_of_each_function(device):
    """With what a kernel calls, since all of it is compiled."""
    use_workers(1)
    short, middle, long = map(JITFunction, (nothing, more, calls_more))
    order = [(short, 1), (short, 2), (middle, 3), (long, 4), (long, 5), (middle, 6)]
    compile_ahead([lambda kernel=kernel, n=n: kernel[(1,)](n) for kernel, n in order])
    assert [n for (n,), _ in device.compiled] == [4, 3, 1, 5, 6, 2]


def test_the_interpreter_has_nothing_to_compile(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETED", True)
    assert compile_ahead([lambda: pytest.fail("called")]) == 0


KEY = Key.of("nt", BF16, BF16, False, 100, 64, 64)


def product_only_compiled(monkeypatch, held):
    """What a product of 100 rows launches in a pass that computes nothing, by rows."""
    launched = []
    monkeypatch.setattr(findings_module, "_by_device", {torch.device("cpu"): held})
    monkeypatch.setattr(cublaslt, "_has_room", lambda device, key: True)
    monkeypatch.setattr(cublaslt, "settings_in_force", lambda: True)
    monkeypatch.setattr(cublaslt, "prefers_library", lambda *sizes: True)
    monkeypatch.setattr(cublaslt, "has_tma", lambda device: True)
    monkeypatch.setattr(cublaslt, "_as_certified", lambda matrix: True)
    monkeypatch.setattr(cublaslt, "matmul_fwd", lambda a, *_: launched.append(len(a)))
    monkeypatch.setattr(cublaslt, "library_product", lambda *_: pytest.fail("the library ran"))
    a, b = torch.zeros(100, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16)
    found = []
    compile_ahead([lambda: found.append(cublaslt.product(a, b, None, "nt", BF16))])
    return found[0], launched


def test_a_pass_that_computes_nothing_makes_no_certificate(device, monkeypatch):
    held, before = Findings(None, {}), audit._counts.calls
    found, launched = product_only_compiled(monkeypatch, held)
    assert found.shape == (100, 64) and held.certificate(KEY.name) is None
    assert audit._counts.calls == before and not audit._counts.pending
    # What a comparison launches later is compiled: its numbers of rows, and an audit's.
    assert launched[-4:] == [65, 96, 100, 128] and all(32 <= m <= 64 for m in launched[:-4])
    held.certify(KEY.name, 0, [65, 96, 100, 128])
    found, launched = product_only_compiled(monkeypatch, held)
    assert found.shape == (100, 64)
    assert launched and all(32 <= m <= 64 for m in launched)


def test_a_withdrawn_product_is_compiled_as_triton_runs_it(device, monkeypatch):
    held = Findings(None, {})
    held.withdraw(KEY.name, "it differed")
    assert product_only_compiled(monkeypatch, held) == (None, [])


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
        audit.due,
        lambda: held.keep("work", Winner("schedule", 1.0, 1.0)),
    ):
        with pytest.raises(RuntimeError, match="nothing is computed"):
            compile_ahead([what])
    assert not list(tmp_path.iterdir()) and not held.winners
    require_launches("outside")


def test_a_thread_that_never_compiled_launches():
    answers = []
    other = Thread(target=lambda: answers.append(compiles_only()))
    other.start()
    other.join()
    assert answers == [False]
