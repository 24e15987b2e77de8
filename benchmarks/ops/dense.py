"""Products and dW against cuBLAS, attention against torch's SDPA, token_logprobs against Liger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import peer
from benchmarks.shapes import CACHE_BLOCK, HEAD_DIM
from benchmarks.suite import gradients, normal, stepped
from benchmarks.timing import Call, Contestant, Machine, Race
from benchmarks.tune.shipped import winners_of
from rl_consistency.cases import launches
from rl_consistency.cases.case import Setting
from rl_consistency.kernels.attention.layout import PackedSequences, PagedAttention
from rl_consistency.kernels.attention.op import attention_paged, attention_varlen
from rl_consistency.kernels.attention.paged_cache_triton import zero_cache
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.core.findings import rows_bucket
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.cublaslt import LIBRARY_ROWS, certified_to_the_row
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.matmul.schedules import pick
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import token_logprobs
from rl_consistency.tuning.policy_works import fewer_rows, with_fewer

GRAPH_ROWS = 256
"""Up to so many rows a product is timed in a CUDA graph, as rollout runs it."""

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The efficient backend takes no grouped heads; it then appears under `unavailable`."""

MAX_LAYERS = 24


def product(
    layout: str, bench: Machine, m: int, n: int, k: int, graph_rows: int = GRAPH_ROWS
) -> dict[str, Any]:
    """[m, k] times a weight that gives n columns; in a graph for up to `graph_rows` rows.

    Layout "nt" is y = x weight^T with a weight [n, k]; "nn" is dx = dy weight with a weight [k, n].
    """
    graph = m <= graph_rows
    copies = bench.copies(2 * (m * k + n * k)) if graph else 1
    weight_shape = (n, k) if layout == "nt" else (k, n)
    operands = [(normal(bench, m, k), normal(bench, *weight_shape)) for _ in range(copies)]
    ours = partial(matmul_nt if layout == "nt" else matmul_nn, out_dtype=torch.bfloat16)
    as_stock = [(x, w.t() if layout == "nt" else w) for x, w in operands]
    ways = {"cublas": torch.mm}
    if module := peer("batch_invariant_ops"):
        ways["batch_invariant_ops"] = module.matmul_persistent
    others = {n: Contestant([partial(way, *pair) for pair in as_stock]) for n, way in ways.items()}
    race = Race(
        ours=Contestant(
            [partial(ours, x, w) for x, w in operands],
            context=certified_to_the_row if graph else nullcontext,
        ),
        stock={"cublas": others.pop("cublas")},
        peers=others,
        clock="graph" if graph else "events",
        moved_bytes=2.0 * (m * k + n * k + m * n),
        operations=2.0 * m * n * k,
    )
    fields = bench.measure(race)
    sizes = m, n, k, torch.bfloat16, layout
    schedule = pick(*sizes, has_tma(bench.device), device=bench.device).name
    if m >= LIBRARY_ROWS:
        schedule = f"library where certified, else {schedule}"
    return fields | {"schedule": schedule}


def tuned_product(
    layout: str, bench: Machine, m: int, n: int, k: int, graph_rows: int = GRAPH_ROWS
) -> dict[str, Any]:
    """`product` once `tune` has measured its bucket of rows, as it does for a policy."""
    bucket, setting = rows_bucket(m), Setting(dtype=torch.bfloat16, device=bench.device)
    largest, fewer = (
        launches.product(setting, layout, rows, n, k) for rows in (bucket, fewer_rows(bucket))
    )
    (work,) = with_fewer([largest], [fewer])
    with winners_of(bench, [work]):
        return product(layout, bench, m, n, k, graph_rows)


def gradient_fold(bench: Machine, tokens: int, n: int, k: int) -> dict[str, Any]:
    """dW continued in an fp32 buffer."""
    dy, x = normal(bench, tokens, n), normal(bench, tokens, k)
    ours, stock = (torch.zeros(n, k, device=bench.device) for _ in range(2))

    def fold() -> Tensor:
        fold_outer(ours, dy, x)
        return ours

    def multiply_and_add() -> Tensor:
        return stock.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))

    race = Race(
        ours=Contestant.of(fold),
        stock={"cublas fp32 + add": Contestant.of(multiply_and_add)},
        moved_bytes=2.0 * tokens * (n + k) + 8.0 * n * k,
        operations=2.0 * tokens * n * k,
    )
    return bench.measure(race)


def attention(
    backward: bool, bench: Machine, length: int, batch: int, heads: str, head_dim: int = HEAD_DIM
) -> dict[str, Any]:
    """Causal self-attention over packed sequences of one length, or its gradients; `heads` are
    those of queries, and of keys and values: "16/8"."""
    layout = PackedSequences.of(range(0, length * batch, length), [length] * batch)
    query, kv = map(int, heads.split("/"))
    leaves = [normal(bench, length * batch, size, head_dim) for size in (query, kv, kv)]
    q, k, v = (x.requires_grad_(backward) for x in leaves)
    do = torch.randn_like(q)

    def ours() -> Tensor:
        return attention_varlen(q, k, v, layout, scale=_scale(q))[0]

    def stock() -> Tensor:
        return _sdpa(*(_batched(x, batch) for x in leaves), causal=True)

    def theirs() -> Sequence[Call]:
        return [gradients(stock, leaves, [_batched(do, batch)]) if backward else stock]

    moved = float(sum(x.nbytes for x in (*leaves, q)))
    race = Race(
        ours=Contestant.of(gradients(ours, leaves, [do]) if backward else ours),
        stock=_backends(theirs),
        moved_bytes=2 * moved if backward else moved,
        # Causal: two products over half of the square; five in backward.
        operations=(2.5 if backward else 1.0) * 2.0 * q.numel() * length,
    )
    return bench.measure(race)


def attention_decode(
    bench: Machine, batch: int, context: int, heads: str, head_dim: int = HEAD_DIM
) -> dict[str, Any]:
    """One new token per sequence: ours from a paged cache, stock from contiguous tensors."""
    query_heads, kv_heads = map(int, heads.split("/"))
    blocks = batch * -(-context // CACHE_BLOCK)
    cached_bytes = 2 * 2 * batch * context * kv_heads * head_dim
    layers = range(min(bench.copies(cached_bytes), MAX_LAYERS))
    size = (blocks, CACHE_BLOCK, kv_heads, head_dim)
    kind = {"dtype": torch.bfloat16, "device": bench.device}
    caches = [[zero_cache(*size, **kind).copy_(normal(bench, *size)) for _ in layers] for _ in "kv"]
    # A cache in use is scattered: consecutive tokens of a sequence lie in unrelated blocks.
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).view(batch, -1)
    last = tables[:, -1] * CACHE_BLOCK + (context - 1) % CACHE_BLOCK
    paged = PagedAttention(
        query_starts=range(batch),
        query_lens=[1] * batch,
        context_lens=[context] * batch,
        block_tables=tables.tolist(),
        slot_mapping=last.to(bench.device),
        key_cache=caches[0],
        value_cache=caches[1],
        block_size=CACHE_BLOCK,
    )
    q, rows = normal(bench, batch, query_heads, head_dim), tables.to(bench.device)
    contiguous = [
        [cache[rows].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for cache in side]
        for side in caches
    ]

    def ours(layer: int) -> Tensor:
        return attention_paged(q, paged, layer, scale=_scale(q))[0]

    calls = [partial(_sdpa, q.unsqueeze(2), *kv, causal=False) for kv in zip(*contiguous)]
    race = Race(
        ours=Contestant([partial(ours, layer) for layer in layers]),
        stock=_backends(lambda: calls),
        clock="graph",
        moved_bytes=float(cached_bytes + 2 * q.nbytes),
        operations=4.0 * batch * query_heads * context * head_dim,
    )
    return bench.measure(race)


def _backends(calls: Callable[[], Sequence[Call]]) -> dict[str, Contestant]:
    """Every backend, with calls of its own."""
    return {name: Contestant(calls(), partial(sdpa_kernel, b)) for name, b in BACKENDS.items()}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=_scale(q), enable_gqa=True
    )


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5


def _batched(x: Tensor, count: int) -> Tensor:
    """[T, H, D] -> [count, H, T / count, D], a view."""
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)


def logprobs_and_gradients(
    bench: Machine, tokens: int, width: int, vocabulary: int
) -> dict[str, Any]:
    """The mean of all logprobs and its gradients, from no gradient present; stock takes the
    log_softmax of all logits."""
    hidden, weight = normal(bench, tokens, width), normal(bench, vocabulary, width) * width**-0.5
    targets = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    rows = SamplingRows.uniform(tokens, device=bench.device)

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Contestant:
        """One way to compute the loss, on its own leaves that share the data."""
        leaves = [nn.Parameter(x) for x in (hidden, weight)]
        return Contestant.of(stepped(lambda: loss(*leaves), leaves))

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        assert isinstance(weight, nn.Parameter)
        weight.grad_dtype = torch.float32  # as the trainer has it
        buffer = GradientBuffer(weight)
        # As training calls it: the check of ids would wait for the device, and no other way has it.
        scored, _ = token_logprobs(
            hidden, weight, targets, rows, weight_grad=buffer, check_targets=False
        )
        return -scored.mean()

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs = F.linear(hidden, weight).float().log_softmax(dim=-1)
        return -logprobs.gather(1, targets.unsqueeze(1)).mean()

    peers = {}
    if module := peer("liger_kernel.transformers.fused_linear_cross_entropy"):
        for name, accumulator in (("liger", None), ("liger fp32", torch.float32)):
            loss = module.LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulator)
            peers[name] = step(lambda hidden, weight, f=loss: f(weight, hidden, targets))
    race = Race(
        ours=step(ours),
        stock={"log_softmax": step(stock)},
        peers=peers,
        # Forward, dhidden and dweight; recomputing the logits is a choice, not the work.
        operations=6.0 * tokens * width * vocabulary,
        memory=True,
    )
    return bench.measure(race)
