"""Products and dW against cuBLAS, token_logprobs against Liger, drawing tokens against torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import peer
from benchmarks.timing import Contestant, Machine
from rl_consistency.kernels.core.device import has_tma
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul.cublaslt import LIBRARY_ROWS, certified_to_the_row
from rl_consistency.kernels.matmul.op import matmul_nn, matmul_nt
from rl_consistency.kernels.matmul.schedules import pick
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.op import token_logprobs


def normal(bench: Machine, *shape: int) -> Tensor:
    """Normal values in bf16 on the device under test."""
    return torch.randn(shape, device=bench.device, dtype=torch.bfloat16)


def stepped(
    way: Callable[..., Tensor], operands: Sequence[Tensor], dy: Tensor | None = None
) -> Contestant:
    """Forward, backward in this thread, gradients dropped, on leaves of its own that share the
    operands' data: the result, and the gradient of the first leaf."""
    leaves: Any = [nn.Parameter(x) for x in operands]

    def run() -> Sequence[Tensor]:
        y = way(*leaves)
        with torch.autograd.set_multithreading_enabled(False):
            y.backward(dy)
        found = y.detach(), leaves[0].grad
        for leaf in leaves:
            leaf.grad = None
        return found

    return Contestant([run])


def product(layout: str, bench: Machine, m: int, n: int, k: int) -> dict[str, Any]:
    """[m, k] times a weight that gives n columns: "nt" is y = x weight^T with a weight [n, k], "nn"
    is dx = dy weight with a weight [k, n]."""
    weight_shape = (n, k) if layout == "nt" else (k, n)
    copies = range(bench.copies(2 * (m * k + n * k)))
    operands = [(normal(bench, m, k), normal(bench, *weight_shape)) for _ in copies]
    ours = partial(matmul_nt if layout == "nt" else matmul_nn, out_dtype=torch.bfloat16)

    stock = [partial(torch.mm, x, w.t() if layout == "nt" else w) for x, w in operands]
    fields = bench.measure(
        ours=Contestant([partial(ours, *each) for each in operands], certified_to_the_row),
        stock={"cublas": Contestant(stock)},
        clock="graph",
        moved_bytes=2.0 * (m * k + n * k + m * n),
        operations=2.0 * m * n * k,
    )
    if bench.cuda:
        sizes = m, n, k, torch.bfloat16, layout, has_tma(bench.device)
        fields["schedule"] = pick(*sizes, device=bench.device).name
        if m >= LIBRARY_ROWS:
            fields["schedule"] = f"library where certified, else {fields['schedule']}"
    return fields


def gradient_fold(bench: Machine, tokens: int, n: int, k: int) -> dict[str, Any]:
    """dW continued in an fp32 buffer."""
    dy, x = normal(bench, tokens, n), normal(bench, tokens, k)
    buffer, total = (torch.zeros(n, k, device=bench.device) for _ in range(2))

    def ours() -> Tensor:
        fold_outer(buffer, dy, x)
        return buffer

    def stock() -> Tensor:
        return total.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))

    return bench.measure(
        ours=Contestant([ours]),
        stock={"cublas fp32 + add": Contestant([stock])},
        moved_bytes=2.0 * tokens * (n + k) + 8.0 * n * k,
        operations=2.0 * tokens * n * k,
    )


def logprobs_and_gradients(
    bench: Machine, tokens: int, width: int, vocabulary: int
) -> dict[str, Any]:
    """The mean of all logprobs and its gradients, from no gradient present; stock takes the
    log_softmax of all logits."""
    operands = normal(bench, tokens, width), normal(bench, vocabulary, width) * width**-0.5
    targets = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    rows = SamplingRows.uniform(tokens, device=bench.device)

    def ours(hidden: Tensor, weight: Any) -> Tensor:
        weight.grad_dtype = torch.float32  # as the trainer has it
        # As training calls it: the check of ids would wait for the device, and no other way has it.
        scored, _ = token_logprobs(
            hidden, weight, targets, rows, weight_grad=GradientBuffer(weight), check_targets=False
        )
        return -scored.mean()

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs = F.linear(hidden, weight).float().log_softmax(dim=-1)
        return -logprobs.gather(1, targets.unsqueeze(1)).mean()

    peers = {}
    if module := peer("liger_kernel.transformers.fused_linear_cross_entropy"):
        for name, accumulator in (("liger", None), ("liger fp32", torch.float32)):
            loss = module.LigerFusedLinearCrossEntropyLoss(accum_dtype=accumulator)
            way = partial(lambda loss, hidden, weight: loss(weight, hidden, targets), loss)
            peers[name] = stepped(way, operands)
    return bench.measure(
        ours=stepped(ours, operands),
        stock={"log_softmax": stepped(stock, operands)},
        peers=peers,
        # Forward, dhidden and dweight; recomputing the logits is a choice, not the work.
        operations=6.0 * tokens * width * vocabulary,
        memory=True,
    )


def drawn_tokens(bench: Machine, tokens: int, vocabulary: int) -> dict[str, Any]:
    """A token of each row of fp32 logits and its logprob, nothing truncated."""
    logits = normal(bench, tokens, vocabulary).float()
    rows = SamplingRows.uniform(tokens, device=bench.device)
    uniforms = torch.rand(tokens, dtype=torch.float64, device=bench.device)

    def multinomial() -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(dim=-1)
        ids = torch.multinomial(logprobs.exp(), 1)
        return ids.squeeze(1), logprobs.gather(1, ids).squeeze(1)

    return bench.measure(
        ours=Contestant([lambda: distribution(logits, rows).sample(uniforms)]),
        stock={"softmax + multinomial": Contestant([multinomial])},
        moved_bytes=4.0 * tokens * vocabulary,
    )
