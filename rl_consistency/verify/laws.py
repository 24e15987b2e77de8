"""The laws of an op, each written once: what may change about a call without changing a byte.

`verify`, the tests on a CPU and those on a GPU judge by these functions; each gives its own op and
operands. A stock op must fail the same law, or the law proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

from rl_consistency.cases.case import Case, Op, as_tuple
from rl_consistency.cases.launches import Launch, compare
from rl_consistency.kernels.core.compile_ahead import compile_ahead
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import STEP
from rl_consistency.verify.claims import Tally

ROW_COUNTS = (2, 7, 15, 16, 17, 33, 64, 65)
"""Rows of a call where no sweep says it."""


def judged(law: Callable[..., object], *args: object, **options: object) -> Tally:
    """The tally of one law: `assert judged(rows_alike, "y", op, x).passed`."""
    tally = Tally()
    law(tally, *args, **options)
    return tally


def rows_alike(
    tally: Tally, name: str, op: Op, *inputs: Tensor, counts: Iterable[int] = ROW_COUNTS
) -> None:
    """A row alone and among others is the same bytes, in calls of `counts` rows, and in many orders
    and storages. `op` maps inputs [rows, ...] to a tensor of as many rows."""
    rows, device = len(inputs[0]), inputs[0].device
    alone = torch.cat([op(*(x[i : i + 1] for x in inputs)) for i in range(rows)]).detach()

    def compare(case: str, index: Tensor) -> None:
        index = index.to(device)
        tally.equal(f"{name}, {case}", alone[index], op(*(x[index] for x in inputs)).detach())

    for count in counts:
        part = op(*(x[:count] for x in inputs)).detach()
        tally.equal(f"{name}, {count} rows", alone[:count], part)
    compare("permuted", torch.randperm(rows, generator=torch.Generator().manual_seed(rows)))
    compare("one row 20 times", torch.full((20,), min(3, rows - 1)))
    few = min(rows, 17)
    for shift in range(few):
        compare(f"row 0 at place {shift}", torch.arange(few).roll(shift))
    middle = op(*(x[rows // 3 :] for x in inputs)).detach()
    tally.equal(f"{name}, the last two thirds", alone[rows // 3 :], middle)
    strided = op(*(x.repeat_interleave(2, dim=0)[::2] for x in inputs)).detach()
    tally.equal(f"{name}, strided storage", alone, strided)
    tally.equal(f"{name}, misaligned storage", alone, op(*map(misaligned, inputs)).detach())


def launch_alike(tally: Tally, launch: Launch) -> tuple[Tensor, ...]:
    """Every schedule of a launch and every other way give the same bytes, which are returned.

    Schedules that ask for more resources than the device has are left out; two must remain.
    """
    operands, of = launch.operands(), launch.key

    def fitting(op: Op) -> None:
        with suppress(OutOfResources):
            op(*(x.clone() for x in operands))

    compile_ahead(partial(fitting, op) for op in launch.candidates.values())
    found = compare(launch, operands)
    for error in found.unable.values():
        if not isinstance(error, OutOfResources):
            raise error
    for name in found.equal:
        tally.expect(f"{of}, {name}", all(bool(x.isfinite().all()) for x in found.reference))
    for name, why in found.withdrawn.items():
        tally.expect(f"{of}, {name}", False, why)
    used = len(found.equal) + len(found.withdrawn)
    tally.expect(f"{of}, entries that fit", used >= 2, f"{used} of {len(launch.candidates)}")
    for way, op in launch.ways.items():
        results = as_tuple(op(*(x.clone() for x in operands)))
        for expected, result in zip(found.reference, results, strict=True):
            tally.equal(f"{of}, {way}", expected, result)
    return found.reference


def case_rows_alike(
    tally: Tally, case: Case, rows: int, counts: Iterable[int] = ROW_COUNTS, op: Op | None = None
) -> None:
    """`rows_alike` of a case's results, and of the gradients of its rows; of `op` in its place."""
    counts, run, n = list(counts), op or case.call, len(case.rows)
    operands, dys = case.draw(rows, 1), case.draw_dys(rows, 1)
    own, shared = operands[:n], operands[n:]
    names = [name for name in case.rows if name in case.gradients]

    def results(*xs: Tensor) -> Tensor:
        return rows_of(*as_tuple(run(*xs, *shared)))

    def gradients(*xs: Tensor) -> Tensor:
        return rows_of(*case_gradients(case, run, (*xs[:n], *shared), xs[n:], names))

    rows_alike(tally, case.size, results, *own, counts=counts)
    if names:
        rows_alike(tally, f"{case.size}, gradients", gradients, *own, *dys, counts=counts)


def case_ways_alike(tally: Tally, case: Case, rows: int) -> None:
    """Every other way to a case's results and gradients gives its bytes."""
    operands, dys = case.draw(rows, 1), case.draw_dys(rows, 1)

    def found(op: Op, names: Sequence[str]) -> list[Tensor]:
        results = [y.detach() for y in as_tuple(op(*operands))]
        return results + (case_gradients(case, op, operands, dys, names) if names else [])

    for ways, names in ((case.ways, case.gradients), (case.forward_ways, ())):
        expected = found(case.call, names) if ways else []
        kinds = [*case.outputs, *(f"d{name}" for name in names)]
        for way, op in ways.items():
            for kind, a, b in zip(kinds, expected, found(op, names), strict=True):
                tally.equal(f"{case.size}, {way}, {kind}", a, b)


def case_cuts_alike(tally: Tally, case: Case, rows: int, op: Op | None = None) -> None:
    """Gradients of a case's parameters in one call are those of the same tokens cut, with filler
    rows, whose gradient is zero, and repeated; of `op`, which has no buffers, in its place."""
    operands, dys, count = case.draw(rows, 1), case.draw_dys(rows, 1), len(case.rows)
    inputs = (*operands[:count], *dys)
    filler = [case.filler.get(name, 0.0) for name in case.rows] + [0.0] * len(dys)
    shared = [
        parameter_of(x) if name in case.parameters else x
        for name, x in zip(case.shared, operands[count:], strict=True)
    ]
    parameters = [x for x in shared if isinstance(x, nn.Parameter)]
    names = [f"{name}_grad" for name in case.parameters]
    buffers = dict(zip(names, map(GradientBuffer, parameters), strict=True)) if op is None else {}

    def gradients(cuts: Sequence[int], steps: int = 0) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        for begin, end in pairwise([0, *cuts, rows]):
            # Whole steps of filler, its own last step completed first.
            more = -(end - begin) % STEP + steps * STEP if steps else 0
            xs = [
                torch.cat([x[begin:end], x.new_full((more, *x.shape[1:]), value)])
                for x, value in zip(inputs, filler, strict=True)
            ]
            found = (op or case.call)(*xs[:count], *shared, **buffers)
            _backward(as_tuple(found), xs[count:])
        return [p.grad.clone() for p in parameters if p.grad is not None]

    whole = gradients(())
    tally.expect("every parameter has a gradient", len(whole) == len(parameters))
    half = STEP * (rows // STEP // 2)
    uneven = sorted({STEP * (rows // STEP * n // 10) for n in (1, 2, 7)} - {0})
    ways: dict[str, tuple[Sequence[int], int]] = {
        "run again": ((), 0),
        "one step a call": (range(STEP, rows, STEP), 0),
        "the first step apart": ((STEP,), 0),
        "two calls": ((half,), 0),
        "uneven cuts": (uneven, 0),
        "filler of 1 step": ((), 1),
        "cut, filler of 3 steps": ((half,), 3),
    }
    for name, (cuts, steps) in ways.items():
        for expected, actual in zip(whole, gradients(cuts, steps), strict=True):
            tally.equal(name, expected, actual)


def case_gradients(
    case: Case, op: Op, operands: Sequence[Tensor], dys: Sequence[Tensor], names: Sequence[str]
) -> list[Tensor]:
    """Gradients of the operands of some names; one of `dys` per output of floats."""
    leaves = {
        name: x.detach().clone().requires_grad_() if name in names else x.detach()
        for name, x in zip(case.names, operands, strict=True)
    }
    _backward(as_tuple(op(*leaves.values())), dys)
    return [leaves[name].grad for name in names]  # type: ignore[misc]


def _backward(outputs: Sequence[Tensor], dys: Sequence[Tensor]) -> None:
    floats = [y for y in outputs if y.is_floating_point()]
    # An output of rows alone has no gradient where only parameters have one.
    pairs = [(y, dy.to(y.dtype)) for y, dy in zip(floats, dys, strict=True) if y.requires_grad]
    torch.autograd.backward([y for y, _ in pairs], [dy for _, dy in pairs])


def parameter_of(values: Tensor) -> nn.Parameter:
    """A parameter of these values, whose gradient is fp32."""
    parameter = nn.Parameter(values)
    parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]  # all digits are compared
    return parameter


def rows_of(*parts: Tensor) -> Tensor:
    """Results of one call side by side, exactly: [rows, ...] each -> fp32 [rows, columns]."""
    return torch.cat([part.float().reshape(len(part), -1) for part in parts], dim=1)


def misaligned(x: Tensor) -> Tensor:
    """A copy of x in storage that starts one element past a boundary."""
    storage = x.new_empty(x.numel() + 1)
    storage[1:] = x.detach().flatten()
    return storage[1:].view(x.shape)
