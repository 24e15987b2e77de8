import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.linear.few_rows_triton import (
    gate_up_glu_fwd,
    qkv_fwd,
)
from rl_consistency.kernels.linear.op import linear, linear_qkv
from rl_consistency.kernels.linear.schedules import GATE_UP, QKV
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.parity.bytes import same_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_certificates")]

DEVICE = torch.device("cuda", 0)
ROWS, K, N = 320, 1024, 392


def operands(dtype=torch.bfloat16, rows=ROWS, n=N):
    x = probe((rows, K), dtype, scale=0.25).to(DEVICE)
    weight = probe((n, K), dtype, seed=1, scale=K**-0.5).to(DEVICE)
    return x, weight, probe((n,), dtype, seed=2).to(DEVICE)


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
