from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.linear.few_rows_triton import (
    gate_up_glu_fwd,
    qkv_fwd,
)
from rl_consistency.kernels.linear.glu_linear import glu_linear
from rl_consistency.kernels.linear.op import linear, linear_glu, linear_qkv, linear_reference
from rl_consistency.kernels.linear.schedules import GATE_UP, QKV
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within
from rl_consistency.verify.laws import cuts_alike, judged, leaf_gradients, rows_alike

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICE = torch.device("cuda", 0)
ROWS, K, N = 320, 1024, 392


@pytest.fixture(autouse=True)
def fresh_certificates(monkeypatch, tmp_path):
    """No certificate of this machine is read, none of a test is left on it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(findings_module, "_by_device", {})
    monkeypatch.setattr(audit, "_counts", audit._Counts())


def operands(dtype=torch.bfloat16, rows=ROWS, n=N):
    x = probe((rows, K), dtype, scale=0.25).to(DEVICE)
    weight = probe((n, K), dtype, seed=1, scale=K**-0.5).to(DEVICE)
    return x, weight, probe((n,), dtype, seed=2).to(DEVICE)


def judged_cuts(op, dtype):
    """The law of cuts for weight and bias."""
    x, weight, bias = operands(dtype)
    weight, bias = nn.Parameter(weight), nn.Parameter(bias)
    weight.grad_dtype = bias.grad_dtype = torch.float32
    buffers = {"weight_grad": GradientBuffer(weight), "bias_grad": GradientBuffer(bias)}
    options = buffers if op is linear else {}

    def backward(x, dy):
        op(x, weight, bias, **options).backward(dy)

    inputs = x, probe((ROWS, N), dtype, seed=3, scale=0.02).to(DEVICE)
    return judged(cuts_alike, (weight, bias), backward, inputs, (1.0, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64, ROWS])
def test_output_and_gradients_match_fp64(dtype, rows):
    leaves = [t.requires_grad_() for t in operands(dtype, rows)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    # Small enough for fp16 to hold the gradients.
    dy = probe((rows, N), dtype, seed=3, scale=0.02).to(DEVICE)
    y = linear(*leaves)
    assert_within(y, linear_reference(*exact), "reduction", dtype)
    y.backward(dy)
    linear_reference(*exact).backward(dy.double())
    for ours, reference in zip(leaves, exact, strict=True):
        assert_within(ours.grad, reference.grad, "reduction", dtype, gradient=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(dtype):
    x, weight, bias = operands(dtype)
    with numeric_settings():
        op = partial(linear, weight=weight, bias=bias)
        assert judged(rows_alike, "y", op, x, counts=(2, 7, 33, 64, 65, 129)).passed
        whole = linear(x, weight, bias)
        assert same_bytes(linear(x.view(4, 80, K), weight, bias).view(ROWS, N), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_do_not_depend_on_the_cut(dtype):
    with numeric_settings():
        assert judged_cuts(linear, dtype).passed
        x, weight, _ = operands(dtype)
        dy = probe((ROWS, N), dtype, seed=3, scale=0.02).to(DEVICE)
        op = partial(linear, weight=weight)
        dx = lambda x, dy: leaf_gradients(op, (x,), dy)[0]  # noqa: E731
        assert judged(rows_alike, "dx", dx, x, dy, counts=(16, 48, 160)).passed


@pytest.mark.parametrize("schedule", QKV, ids=lambda s: s.name)
@pytest.mark.parametrize("rows", [1, 19, 64])
def test_every_fused_qkv_schedule_gives_the_unfused_bytes(schedule, rows):
    x, wq, bq = operands(rows=rows, n=2048)
    wk, wv, bk, bv = wq[:1024], wq[1000:2000], bq[:1024], bq[1000:2000]
    for biases in ((bq, bk, bv), (None, None, None)):
        results = qkv_fwd(x, wq, wk, wv, *biases, schedule)
        for y, weight, bias in zip(results, (wq, wk, wv), biases, strict=True):
            assert same_bytes(y, linear(x, weight, bias))


@pytest.mark.skipif(not torch.cuda.is_available() or not has_tma(DEVICE), reason="needs sm_90")
@pytest.mark.parametrize("schedule", [*QKV, *GATE_UP], ids=lambda s: s.name)
def test_a_fused_launch_reads_what_the_kernel_ahead_has_just_written(schedule):
    """Rows and weights, the latter while the launch asks for them in the cache."""
    x, weight, _ = operands(rows=19, n=2048)
    scale = torch.ones(K, device=DEVICE, dtype=torch.bfloat16)
    fresh, plain = weight.clone(), weight.clone()

    def fused(x, weight):
        if schedule in QKV:
            return qkv_fwd(x, weight, weight, weight, None, None, None, schedule)[0]
        return gate_up_glu_fwd(x, weight, weight, "silu", schedule)

    def chain():
        rows = fused(x, rms_norm(fresh, scale, 1e-6))
        return fused(rms_norm(rows[:, :K], scale, 1e-6), rms_norm(fresh, scale, 1e-6))

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for i in range(5):
        fresh.copy_(plain.roll(i, 0))
        normed = rms_norm(fresh, scale, 1e-6)
        torch.cuda.synchronize()
        rows = fused(x, normed)
        torch.cuda.synchronize()
        rows = rms_norm(rows[:, :K], scale, 1e-6)
        torch.cuda.synchronize()
        expected = fused(rows, normed)
        found.zero_()
        graph.replay()
        assert same_bytes(found, expected)


@pytest.mark.parametrize("schedule", GATE_UP, ids=lambda s: s.name)
@pytest.mark.parametrize("rows", [1, 19, 64])
def test_every_fused_gate_up_schedule_gives_the_unfused_bytes(schedule, rows):
    if schedule.kind == "tma" and not has_tma(DEVICE):
        pytest.skip("needs an NVIDIA GPU of sm_90 or later")
    x, w_gate, _ = operands(rows=rows, n=3072)
    w_up = w_gate.flip(0).contiguous()
    for activation in ACTIVATIONS:
        expected = glu(linear(x, w_gate), linear(x, w_up), activation)
        assert same_bytes(gate_up_glu_fwd(x, w_gate, w_up, activation, schedule), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 64, 65, ROWS])
def test_fused_forms_give_the_bytes_of_the_ops_they_stand_for(dtype, rows):
    x, weight, bias = operands(dtype, rows)
    weights, biases = (weight, weight[:16], weight.flip(0)), (bias, bias[:16], bias)
    for y, w, b in zip(linear_qkv(x, weights, biases), weights, biases, strict=True):
        assert same_bytes(y, linear(x, w, b))
    expected = glu(linear(x, weight), linear(x, weights[2]))
    assert same_bytes(linear_glu(x, weight, weights[2]), expected)
    shifted = torch.empty(weight.numel() + 1, dtype=dtype, device=DEVICE)[1:].view_as(weight)
    assert same_bytes(linear_glu(x, shifted.copy_(weight), weights[2]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 65, ROWS])
def test_a_gated_product_gives_the_bytes_of_both_ops_and_of_their_gradients(dtype, rows):
    weight = operands(dtype)[1]
    gate, up, dy = (torch.randn(rows, n, dtype=dtype, device=DEVICE) for n in (K, K, len(weight)))
    for activation in ACTIVATIONS:
        found = []
        for fused in (False, True):
            leaves = [x.clone().requires_grad_() for x in (gate, up, weight)]
            if fused:
                y = glu_linear(*leaves, activation=activation)
            else:
                y = linear(glu(*leaves[:2], activation), leaves[2])
            y.backward(dy)
            found.append([y, *(x.grad for x in leaves)])
        assert all(map(same_bytes, *found))


def test_no_rows_give_no_rows_and_zero_gradients():
    _, weight, bias = (t.requires_grad_() for t in operands())
    y = linear(torch.zeros(0, K, dtype=weight.dtype, device=DEVICE), weight, bias)
    assert y.shape == (0, N)
    y.sum().backward()
    assert not weight.grad.any() and not bias.grad.any()
    with torch.no_grad():
        empty = torch.zeros(3, 0, K, dtype=weight.dtype, device=DEVICE)
        assert linear_qkv(empty, (weight,) * 3)[2].shape == (3, 0, N)
        assert linear_glu(empty, weight, weight).shape == (3, 0, N)


def test_non_contiguous_operands_give_the_same_bytes():
    x, weight, bias = operands()
    expected = linear(x, weight, bias)
    strided = [t.t().contiguous().t() for t in (x, weight)]
    assert same_bytes(linear(*strided, bias), expected)


def test_compiled_equals_eager():
    x, weight, bias = operands(rows=48)

    def forms(x):
        q, k, v = linear_qkv(x, (weight,) * 3, (bias,) * 3)
        return linear(q + k + v, weight[:, :N].contiguous()), linear_glu(x, weight, weight)

    compiled = torch.compile(forms, fullgraph=True)
    with torch.no_grad():
        for ours, expected in zip(compiled(x), forms(x), strict=True):
            assert same_bytes(ours, expected)


def test_the_fused_forms_in_a_captured_graph_equal_eager():
    x, weight, bias = operands(rows=9)
    with torch.no_grad():
        expected = (*linear_qkv(x, (weight,) * 3, (bias,) * 3), linear_glu(x, weight, weight))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = (*linear_qkv(x, (weight,) * 3, (bias,) * 3), linear_glu(x, weight, weight))
    for y in results:
        y.zero_()
    graph.replay()
    for ours, y in zip(results, expected, strict=True):
        assert same_bytes(ours, y)


def test_the_registered_ops_say_shapes_without_data():
    x, weight, bias = operands(rows=8)
    torch.library.opcheck(
        torch.ops.rl_consistency.qkv_op.default,
        (x, weight, weight[:16], weight, bias, bias[:16], bias),
    )
    torch.library.opcheck(
        torch.ops.rl_consistency.gate_up_glu_op.default, (x, weight, weight, "silu")
    )


def test_bad_operands_are_refused():
    x, weight, bias = operands()
    with pytest.raises(ValueError, match=r"linear: weight is on cpu but x is on cuda:0"):
        linear(x, weight.cpu())
    with pytest.raises(TypeError, match="float8"):
        linear(x.to(torch.float8_e4m3fn), weight)
    with pytest.raises(ValueError, match="computes no gradients"):
        linear_qkv(x, (weight.requires_grad_(),) * 3)
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        linear(x, weight, bias)


def test_torch_linear_fails_the_same_checks():
    x = probe((ROWS, 12288), torch.bfloat16, scale=0.25).to(DEVICE)
    weight = probe((4096, 12288), torch.bfloat16, seed=1).to(DEVICE)
    torch.backends.cuda.preferred_blas_library("default")
    whole = F.linear(x, weight)
    assert any(not same_bytes(F.linear(x[:m], weight), whole[:m]) for m in (1, 7, 16, 64))
    assert judged_cuts(F.linear, torch.bfloat16).mismatches > 0
