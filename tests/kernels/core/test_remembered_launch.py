"""What a remembered launch distinguishes; that it launches at all is seen on a GPU."""

import pytest
import torch

from rl_consistency.kernels.core import remembered_launch
from rl_consistency.kernels.core.remembered_launch import remembered


class Compiled:
    """What Triton returns of a launch, and takes all arguments in the order of the signature."""

    def __init__(self, launches, grid):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    """Counts what Triton specialises."""

    arg_names = ("x", "y", "count", "BLOCK")

    def __init__(self):
        self.specialised, self.launches = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.specialised.append((grid, arguments, constants))
            return Compiled(self.launches, grid)

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(remembered_launch, "JITFunction", Kernel)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
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


def test_another_device_is_specialised_anew(kernel, monkeypatch):
    launch = remembered(kernel)
    for device in (0, 1):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda device=device: device)
        launch[(7,)](tensor(), None, 5, BLOCK=32)
    assert len(kernel.specialised) == 2


def test_a_key_that_looks_at_sizes_alone_fails_the_same_check(kernel, monkeypatch):
    monkeypatch.setattr(remembered_launch, "_key", lambda arguments, constants: arguments[2:])
    launch = remembered(kernel)
    launch[(7,)](tensor(), None, 5, BLOCK=32)
    launch[(7,)](tensor(16), None, 5, BLOCK=32)
    assert len(kernel.specialised) == 1


def test_what_is_remembered_stays_bounded(kernel, monkeypatch):
    monkeypatch.setattr(remembered_launch, "MOST_REMEMBERED", 3)
    launch = remembered(kernel)
    for count in range(10):
        launch[(7,)](tensor(), None, count, BLOCK=32)
    assert len(launch._compiled) <= 3


def test_the_interpreters_kernels_stay_as_they_are():
    kernel = object()
    assert remembered(kernel) is kernel
