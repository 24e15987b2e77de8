"""What a remembered launch distinguishes; that it launches at all is seen on a GPU."""

from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from rl_consistency.kernels.core import launch as launches
from rl_consistency.kernels.core.launch import gluon_descriptor, remembered, tile_descriptor


class Compiled:
    """What Triton returns of a launch, and takes all arguments in the order of the signature."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches, hooked):
        self.launches, self.hooked = launches, hooked

    def run(self, x, y, z, stream, function, metadata, launch, enter, leave, *arguments):
        assert (stream, function, metadata) == ("stream", "function", "metadata")
        assert launch is enter is leave is None
        self.launches.append(((x, y, z), arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.hooked.append((grid, arguments))


class Kernel:
    """Counts what Triton specialises."""

    arg_names = ("x", "y", "count", "BLOCK")

    def __init__(self, by_type=False):
        self.params = [SimpleNamespace(do_not_specialize=by_type) for _ in self.arg_names]
        self.specialised, self.launches, self.hooked = [], [], []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.specialised.append((grid, arguments, constants))
            return Compiled(self.launches, self.hooked)

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launches, "JITFunction", Kernel)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False
    )
    monkeypatch.setattr(launches, "_thread", launches._Thread())
    monkeypatch.setattr(launches, "enter_context", lambda device: None)
    return Kernel()


def tensor(offset=0, dtype=torch.float32):
    memory = torch.zeros(1024, dtype=torch.uint8)
    start = -memory.data_ptr() % 256 + offset
    return memory[start : start + 64].view(dtype)


def test_the_second_launch_goes_to_what_the_first_has_compiled(kernel):
    launch, x, y = remembered(kernel), tensor(), tensor()
    launch[(7,)](x, None, 5, BLOCK=32, num_warps=4)
    launch[(9, 2)](y, None, 5, BLOCK=32, num_warps=4)
    assert len(kernel.specialised) == 1
    ((grid, (given, *rest)),) = kernel.launches
    assert grid == (9, 2, 1) and given is y and rest == [None, 5, 32]


OTHERS = {
    "an address": lambda: ((tensor(16), None, 5), {}),
    "a dtype": lambda: ((tensor(dtype=torch.bfloat16), None, 5), {}),
    "a size": lambda: ((tensor(), None, 6), {}),
    "a number's type": lambda: ((tensor(), None, 5.0), {}),
    "a tensor for None": lambda: ((tensor(), tensor(), 5), {}),
    "a constant": lambda: ((tensor(), None, 5), {"BLOCK": 64}),
    "an option": lambda: ((tensor(), None, 5), {"num_warps": 8}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_arguments_are_specialised_anew(kernel, other):
    launch, constants = remembered(kernel), {"BLOCK": 32, "num_warps": 4}
    launch[(7,)](tensor(), None, 5, **constants)
    arguments, changed = OTHERS[other]()
    launch[(7,)](*arguments, **constants | changed)
    assert len(kernel.specialised) == 2 and not kernel.launches


def test_a_number_that_is_not_specialised_counts_by_its_type(kernel):
    launch = remembered(Kernel(by_type=True))
    for count in (5, 6, -7, 2**40, 2**41, 5.0, 6.0, True):
        launch[(7,)](tensor(), None, count, BLOCK=32)
    specialised = [arguments[2] for _, arguments, _ in launch.kernel.specialised]
    assert specialised == [5, 2**40, 5.0, True]


def matrix(rows, columns, dtype=torch.float32):
    return torch.zeros(rows, columns, dtype=dtype)


def test_a_descriptor_counts_by_dtype_box_and_layout(kernel):
    launch = remembered(kernel)

    def launched(x, box, layout=None):
        made = tile_descriptor(x, box)
        if layout is not None:
            made = gluon_descriptor(x, box, x.shape, x.stride(), layout)
        launch[(7,)](made, None, 5, BLOCK=32)
        return len(kernel.specialised)

    assert launched(matrix(64, 32), (16, 16)) == 1
    assert launched(matrix(128, 48), (16, 16)) == 1
    assert launched(matrix(64, 32), (32, 16)) == 2
    assert launched(matrix(64, 32, torch.bfloat16), (16, 16)) == 3
    assert launched(matrix(64, 32), (16, 16), "one") == 4
    assert launched(matrix(64, 32), (16, 16), "two") == 5
    assert launched(matrix(96, 64), (16, 16), "two") == 5


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hooks_are_called(kernel, monkeypatch, hook):
    launch = remembered(kernel)
    launch[(7,)](tensor(), None, 5, BLOCK=32)
    monkeypatch.setattr(knobs.runtime, hook, lambda metadata: None)
    launch[(7,)](tensor(), None, 5, BLOCK=32)
    assert len(kernel.hooked) == 1 and not kernel.launches


def test_another_device_is_specialised_anew(kernel, monkeypatch):
    launch = remembered(kernel)
    for device in (0, 1):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device)
        launch[(7,)](tensor(), None, 5, BLOCK=32)
    assert len(kernel.specialised) == 2


def test_every_thread_enters_the_context_of_every_device_once(kernel, monkeypatch):
    entered, launch = [], remembered(kernel)
    monkeypatch.setattr(
        launches, "enter_context", lambda device: entered.append((get_ident(), device))
    )

    def launched():
        for device in (0, 1, 0, 1):
            monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device)
            launch[(7,)](tensor(), None, 5, BLOCK=32)
        return get_ident()

    here = launched()
    with ThreadPoolExecutor(1) as other:
        there = other.submit(launched).result()
    assert entered == [(here, 0), (here, 1), (there, 0), (there, 1)]


def test_a_key_that_looks_at_sizes_alone_fails_the_same_check(kernel, monkeypatch):
    monkeypatch.setattr(launches, "launch_key", lambda device, arguments, *_: arguments[2:])
    launch = remembered(kernel)
    launch[(7,)](tensor(), None, 5, BLOCK=32)
    launch[(7,)](tensor(16), None, 5, BLOCK=32)
    assert len(kernel.specialised) == 1


def test_what_is_remembered_stays_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launches, "MOST_REMEMBERED", 3)
    launch = remembered(kernel)
    for count in range(10):
        launch[(7,)](tensor(), None, count, BLOCK=32)
    assert len(launch._compiled) <= 3


def test_the_interpreters_kernels_stay_as_they_are():
    kernel = object()
    assert remembered(kernel) is kernel
