"""Every op on a GPU, forward and backward: compiled, captured, or on operands that lie askew, it
gives the bytes of a plain call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import (
    BackendCompilerFailed,
    InternalTorchDynamoError,
    TorchDynamoException,
)
from torch._dynamo.testing import CompileCounterWithBackend

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_varlen
from rl_consistency.kernels.core.torch_op import NAMESPACE
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.pointwise.embedding import embedding
from rl_consistency.kernels.pointwise.glu import glu
from rl_consistency.kernels.pointwise.rotary import rotary
from rl_consistency.kernels.rms_norm.op import add_rms_norm, rms_norm
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import IGNORED, token_logprobs
from tests.comparison import first_difference

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float32)
T, H, N, V, EPS = 176, 256, 72, 1003, 1e-6
LAYOUT = PackedSequences.of([0, 144], [131, 20])


def angles(seed):
    return list(probe((2, T, 32), seed=seed + 50).clamp(-1, 1).to(DEVICE).unbind(0))


def token_ids(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (T,), generator=generator)
    ids[::5] = ids[0]
    return [ids.to(DEVICE)]


def targets(seed):
    (ids,) = token_ids(seed)
    ids[::7] = IGNORED
    return [ids]


def sampled(hidden, weight, ids, **options):
    rows = SamplingRows.uniform(T, temperature=0.7, device=DEVICE)
    return token_logprobs(hidden, weight, ids, rows, **options)


@dataclass(frozen=True)
class Op:
    """One op, and operands for it."""

    call: Callable[..., Any]
    """(differentiable operands, then the others) -> a tensor or several."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the differentiable operands."""
    others: Callable[[int], list[Tensor]] = lambda seed: []
    """seed -> the other operands."""
    traceable: bool = True
    """Whether a compiler gets through without a break."""

    def operands(self, dtype, seed=0):
        drawn = [
            probe(shape, dtype, seed=10 * seed + i, scale=0.05).to(DEVICE)
            for i, shape in enumerate(self.shapes)
        ]
        return [*drawn, *self.others(seed)]

    def results(self, operands, call=None, place=lambda x: x):
        """Outputs and gradients, each [as its tensor]; cotangents are functions of the outputs."""
        count = len(self.shapes)
        leaves = [x.detach().requires_grad_() for x in operands[:count]]
        y = (call or self.call)(*leaves, *operands[count:])
        outputs = (y,) if isinstance(y, Tensor) else y
        scored = [x for x in outputs if x.requires_grad]
        cotangents = [place(x.detach() * 0.25) for x in scored]
        gradients = torch.autograd.grad(scored, leaves, cotangents)
        return [x.detach() for x in (*outputs, *gradients)]


OPS = {
    "linear": Op(linear, ((T, H), (N, H), (N,))),
    "glu": Op(glu, ((T, H), (T, H))),
    "rms_norm": Op(lambda x, w: rms_norm(x, w, EPS), ((T, H), (H,))),
    "head_norm": Op(lambda x, w: rms_norm(x, w, EPS, rows_per_token=4), ((T, 4, 64), (64,))),
    "add_rms_norm": Op(lambda x, r, w: add_rms_norm(x, r, w, EPS), ((T, H), (T, H), (H,))),
    "rotary": Op(rotary, ((T, 4, 64), (T, 2, 64)), angles),
    "embedding": Op(lambda w, ids: embedding(ids, w), ((V, H),), token_ids),
    "attention": Op(
        lambda q, k, v: attention_varlen(q, k, v, LAYOUT, scale=0.125),
        ((T, 4, 64), (T, 2, 64), (T, 2, 64)),
    ),
    # Targets are looked at on the host before anything is computed.
    "token_logprobs": Op(sampled, ((T, H), (V, H)), targets, traceable=False),
}


def differing(found, expected):
    """The first difference of two lists of results, None where there is none."""
    named = [{str(i): x for i, x in enumerate(xs)} for xs in (found, expected)]
    return first_difference(*named)


def doubled(call, *operands):
    """An op with something beside it that a compiler can fuse."""
    y = call(*operands)
    return y * 2.0 if isinstance(y, Tensor) else tuple(x * 2.0 for x in y)


@pytest.fixture
def compiling():
    """Graphs of other tests count against the number that one function may have."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_compiled_gives_the_eager_bytes(name, dtype):
    op = OPS[name]
    eager = partial(doubled, op.call)
    backend = CompileCounterWithBackend("inductor")
    compiled = torch.compile(eager, fullgraph=op.traceable, backend=backend)
    for seed in range(2):
        operands = op.operands(dtype, seed)
        found = op.results(operands, compiled)
        assert differing(found, op.results(operands, eager)) is None, seed
    traced = [graph.print_readable(print_output=False) for graph in backend.graphs]
    assert any(f"ops.{NAMESPACE}." in text for text in traced)


@pytest.mark.usefixtures("compiling")
def test_a_compiled_stock_activation_fails_the_same_check():
    op = Op(lambda gate, up: F.silu(gate) * up, ((T, H), (T, H)))
    operands = op.operands(torch.bfloat16)
    found = op.results(operands, torch.compile(op.call, fullgraph=True))
    assert differing(found, op.results(operands)) is not None


FOLDED = {
    "linear": lambda x, w, ids, b: linear(x, w, weight_grad=b),
    "embedding": lambda x, w, ids, b: embedding(ids, w, weight_grad=b),
    "token_logprobs": lambda x, w, ids, b: sampled(x, w, ids, weight_grad=b)[0],
}


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", FOLDED)
def test_a_compiled_fold_into_a_parameter_is_refused_or_right(name, fullgraph, started):
    """Nothing promises that it compiles; a gradient that is there must be the eager one."""
    x, weight = OPS["token_logprobs"].operands(torch.bfloat16)[:2]
    (ids,) = token_ids(0)

    def gradient(wrap):
        parameter = nn.Parameter(weight.clone())
        call = partial(FOLDED[name], b=GradientBuffer(parameter))
        wrapped = wrap(call)
        for i in range(3):
            y = (call if started and i == 0 else wrapped)(x, parameter, ids)
            y.backward(y.detach() * 0.25)
        return parameter.grad

    try:
        found = gradient(partial(torch.compile, fullgraph=fullgraph))
    except TorchDynamoException as refusal:
        assert not isinstance(refusal, (BackendCompilerFailed, InternalTorchDynamoError))
        return
    assert differing([found], [gradient(lambda call: call)]) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_a_captured_step_gives_the_eager_bytes_for_new_operands(name, dtype):
    op = OPS[name]
    static = op.operands(dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op.results(static)  # kernels are compiled and tables copied
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.results(static)
    for seed in (1, 2):
        operands = op.operands(dtype, seed)
        for held, given in zip(static, operands, strict=True):
            held.copy_(given)
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert differing(captured, op.results(operands)) is None, seed


def askew(x):
    """A copy that begins one element after an aligned address."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    moved = room[1:].view(x.shape).copy_(x)
    assert moved.data_ptr() % 16
    return moved


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_operands_that_lie_askew_give_the_bytes_of_aligned_ones(name, dtype):
    """Each alone, and all of them together with the cotangents."""
    op = OPS[name]
    operands = op.operands(dtype)
    expected = op.results(operands)
    for i, one in enumerate(operands):
        moved = [*operands[:i], askew(one), *operands[i + 1 :]]
        assert differing(op.results(moved), expected) is None, i
    found = op.results([askew(x) for x in operands], place=askew)
    assert differing(found, expected) is None
