"""Ops are called without autograd and dispatch where nobody looks on, and only there."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_consistency.kernels.core import autograd, torch_op
from rl_consistency.kernels.core.autograd import at_backward_errors, once_differentiable
from rl_consistency.kernels.core.torch_op import observed
from rl_consistency.kernels.gradient_fold.columns_triton import fold_step_sums
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.pointwise.embedding import embedding_fwd

X, WEIGHT = torch.randn(5, 16), torch.randn(8, 16)


class Watching(TorchDispatchMode):
    """Notes the ops that pass by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_nobody_looks_on_without_gradients():
    assert observed()
    with torch.no_grad():
        assert not observed()
        with torch.enable_grad():
            assert observed()
        with forward_ad.dual_level():
            assert observed()
        for mode in (Watching(), TorchFunctionMode()):
            with mode:
                assert observed()
        torch.func.vmap(lambda x: [x, observed() or pytest.fail("unseen")][0])(X)
        assert not observed()
    with torch.inference_mode():
        assert not observed()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_tracer_looks_on():
    def probe(x):
        assert observed()
        return x + 1

    with torch.no_grad():
        torch.jit.trace(probe, X, check_trace=False)
        for pre_dispatch in (False, True):
            make_fx(probe, pre_dispatch=pre_dispatch)(X)


def test_the_bytes_are_those_of_autograd(monkeypatch):
    expected = linear(X, WEIGHT)
    calls = []
    monkeypatch.setattr(torch.autograd.Function, "apply", lambda *a: calls.append(a))
    with torch.no_grad():
        assert torch.equal(linear(X, WEIGHT), expected)
    assert calls == []
    linear(X, WEIGHT)
    assert len(calls) == 1


def test_forward_mode_and_transforms_are_refused_without_gradients_too():
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(RuntimeError, match="forward"):
            linear(dual, WEIGHT)
    with torch.no_grad(), pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda x: linear(x, WEIGHT))(X[:, None])


def test_what_an_op_writes_is_a_new_version_of_the_tensor():
    for grad in (False, True):
        buffer = torch.zeros(4, dtype=torch.float64)
        with torch.set_grad_enabled(grad):
            fold_step_sums(buffer, torch.zeros(0, 4))
        assert buffer._version == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_an_op_called_by_name_takes_the_direct_way_too(monkeypatch):
    ids, table = torch.tensor([2, 0]), torch.randn(3, 8)
    asked = []
    monkeypatch.setattr(torch_op, "plain", lambda operands: not asked.append(operands))
    with torch.no_grad():
        found = embedding_fwd(weight=table, token_ids=ids)
    ((first, second),) = asked
    assert first is ids and second is table and torch.equal(found, table[ids])


def test_an_op_is_dispatched_where_a_mode_looks_on():
    ids, table = torch.tensor([2, 0]), torch.randn(3, 8)
    op = torch.ops.rl_consistency.embedding_fwd.default
    with torch.no_grad():
        with Watching() as watching:
            found = embedding_fwd(ids, table)
        assert op in watching.seen
        assert torch.equal(embedding_fwd(token_ids=ids, weight=table), found)


IDS, TABLE = torch.tensor([2, 0]), torch.randn(3, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
@pytest.mark.parametrize("grad", [False, True])
def test_a_tensor_that_holds_others_is_dispatched_to_them(grad):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, ids, table):
            return embedding_fwd(ids, table)

    two = TwoTensor(TABLE, TABLE.clone())
    with torch.set_grad_enabled(grad):
        for table in (two, nn.Parameter(two, requires_grad=False)):
            for found in (embedding_fwd(IDS, table), autograd.apply(Gather, IDS, table)):
                assert type(found) is TwoTensor
                assert torch.equal(found.a, TABLE[IDS]) and torch.equal(found.b, TABLE[IDS])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_a_tensor_without_values_is_dispatched_to_the_fake():
    fake = FakeTensorMode()
    with torch.no_grad():
        for operands in (
            (IDS.to("meta"), TABLE.to("meta")),
            (fake.from_tensor(IDS), fake.from_tensor(TABLE)),
        ):
            found = embedding_fwd(*operands)
            assert (found.shape, type(found)) == ((2, 8), type(operands[1]))


def test_a_kernel_reads_numbers_and_plain_tensors_only():
    two = TwoTensor(X, X)
    assert torch_op.plain([X, nn.Parameter(X), None, 2, 0.5, True, "nt", torch.float32])
    for other in (two, nn.Parameter(two), X.to("meta"), [X], [two]):
        assert not torch_op.plain([X, other])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")
def test_an_op_without_a_gradient_does_not_drop_one_silently():
    table = torch.randn(3, 8, requires_grad=True)
    rows = embedding_fwd(torch.tensor([2, 0]), table)
    with pytest.raises(RuntimeError, match="autograd"):
        rows.sum().backward()


def test_an_error_in_a_backward_function_is_told_before_its_caller_knows(monkeypatch):
    told = []
    monkeypatch.setattr(autograd, "_at_errors", [])
    at_backward_errors(lambda: told.append("told"))

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @once_differentiable
        def backward(ctx, *gradients):
            raise OSError("lost")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(OSError, match="lost"):
        Failing.apply(x).sum().backward()
    assert told == ["told"]
