"""What the CUDA path computes, by a sort and by torch, with the exp of CUDA."""

import dataclasses

import torch
import triton
import triton.language as tl

from rl_consistency.kernels.reduction.tree_fold_triton import exp_fp32
from rl_consistency.kernels.sampling.op import distribution, inverse_cdf, sorted_support
from rl_consistency.kernels.sampling.support_triton import vocabulary_support
from rl_consistency.kernels.sampling.vocabulary_triton import vocabulary_shifted

LAST = 1.0 - 2.0**-53


@triton.jit
def exp_kernel(x, y, count, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y + i, exp_fp32(tl.load(x + i, mask=i < count)), mask=i < count)


def pinned_exp(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    exp_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), N=1024, enable_fp_fusion=False)
    return y


KINDS = ("plain", "flat", "peaked", "ties", "zeros", "masked")


def logits(kind, rows, vocabulary, seed=0, device="cpu"):
    """[rows, vocabulary] of a kind; "zeros" have both signs, and one value on either side."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(rows, vocabulary, generator=generator, device=device)
    if kind == "masked":
        out = torch.rand(rows, vocabulary, generator=generator, device=device) < 0.6
        values[out] = -torch.inf
        values[:, vocabulary // 2] = 0.3
    elif kind == "ties":
        return (values * 2).round() / 2
    elif kind == "zeros":
        return values.round().clamp(-1, 1) * torch.where(values > 0.2, 0.5, -0.0)
    return values * {"flat": 0.01, "peaked": 12.0, "masked": 1.0}.get(kind, 3.0)


def by_sort(values, rows):
    """[T, V] bool by a sort, with the min_p of CUDA."""
    nothing = torch.zeros_like(rows.min_p)
    z = vocabulary_shifted(values, rows.divisor, nothing, False)
    kept = sorted_support(z, dataclasses.replace(rows, min_p=nothing), pinned_exp)
    kept &= z - z.amax(1, keepdim=True) >= rows.min_p.double().log().float()[:, None]
    return kept & (z > -torch.inf)


def by_selection(values, rows):
    """[T, V] bool by the kernels."""
    parameters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    support = vocabulary_support(values, *parameters, rows.unit_temperature)
    nothing = torch.zeros_like(rows.min_p)
    return vocabulary_shifted(values, rows.divisor, nothing, False, support) > -torch.inf


def sample(values, rows, uniforms):
    return distribution(values, rows).sample(uniforms)


def by_torch(one, uniforms):
    """Ids and logprobs that are sampled from a distribution on a CPU."""
    log_normalizer = one.log_normalizer.unsqueeze(1)
    token_ids = inverse_cdf(pinned_exp(one.scaled - log_normalizer), uniforms)
    return token_ids, (one.scaled.gather(1, token_ids.unsqueeze(1)) - log_normalizer).squeeze(1)


def uniforms_of(count):
    """Random numbers, the smallest and the largest first."""
    u = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u[:2] = torch.tensor([0.0, LAST], dtype=torch.float64)[:count]
    return u
