"""The operands of the accuracy suite, and how each op is computed in three ways; see `accuracy`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_reference, attention_varlen
from rl_consistency.kernels.embedding.op import embedding, embedding_reference
from rl_consistency.kernels.experts.op import experts, experts_reference
from rl_consistency.kernels.glu.op import ACTIVATIONS, glu, glu_reference
from rl_consistency.kernels.linear.op import linear, linear_reference
from rl_consistency.kernels.matmul.op import matmul_nt
from rl_consistency.kernels.reduction.gradient_norm import gradient_norm
from rl_consistency.kernels.reduction.masked_reduction import masked_mean
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.kernels.rms_norm.op import rms_norm, rms_norm_reference
from rl_consistency.kernels.rotary.op import rotary, rotary_reference, rotary_table
from rl_consistency.kernels.router.op import route_with_logits
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.kernels.token_logprobs.op import token_logprobs, token_logprobs_reference
from rl_consistency.verify.checks.attention import SCORE_SCALE
from rl_consistency.verify.checks.op_setup import Heads, OpSetup
from rl_consistency.verify.checks.ops import EPS, token_logprob_probe, weight_scale
from rl_consistency.verify.checks.routing import EXPERTS, experts_probe
from rl_consistency.verify.probe import probe

Op = Callable[..., Tensor | tuple[Tensor, ...]]

Draw = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""(operands, one gradient per output)."""

ROWS = 512
"""Tokens of one draw."""

MANY = 32
"""Draws where an error is a mean over few elements (a bias, a norm's weight)."""


@dataclass(frozen=True, kw_only=True)
class AccuracyCase:
    """One op at one size, computed in three ways from the same operands."""

    size: str
    operands: tuple[str, ...]
    outputs: tuple[str, ...] = ("y",)
    ours: Op
    stock: Op
    reference: Op
    """The op in fp64."""
    draws: Iterable[Draw]


def _matmul(setup: OpSetup) -> Iterator[AccuracyCase]:
    operands = tuple(setup.drawn((ROWS, ROWS), seed, weight_scale(ROWS)) for seed in (1, 2))
    yield AccuracyCase(
        size=f"{ROWS} x {ROWS} x {ROWS}",
        operands=("x", "weight"),
        ours=lambda x, weight: matmul_nt(x, weight, out_dtype=x.dtype),
        stock=F.linear,
        reference=F.linear,
        draws=[(operands, ())],
    )


def _row_reduction(setup: OpSetup) -> Iterator[AccuracyCase]:
    if setup.device.type != "cpu":
        return  # a GPU's kernels hold sums of their own
    yield AccuracyCase(
        size=f"{ROWS} x {ROWS}",
        operands=("x",),
        ours=tree_sum,
        stock=lambda x: x.float().sum(-1),
        reference=lambda x: x.sum(-1),
        draws=[((setup.drawn((ROWS, ROWS), 1),), ())],
    )


def _linear(setup: OpSetup) -> Iterator[AccuracyCase]:
    shapes = setup.shapes.linear
    if not setup.shapes.name:
        yield linear_case(setup, ROWS, 96, 208, draws=MANY)
        shapes = ((1000, 331),)
    for inner, columns in shapes:
        # The bias sees no K; one draw of it would be judged by a few outlier channels.
        yield linear_case(setup, ROWS, inner, columns, draws=1, bias=False)


def linear_case(
    setup: OpSetup, rows: int, inner: int, columns: int, *, draws: int, bias: bool = True
) -> AccuracyCase:
    count = 3 if bias else 2

    def draw(seed: int) -> Draw:
        x = setup.drawn((rows, inner), seed, weight_scale(inner))
        operands = x, setup.drawn((columns, inner), seed + 1), setup.drawn((columns,), seed + 2)
        return operands[:count], (setup.drawn((rows, columns), seed + 3, 0.02),)

    return AccuracyCase(
        size=f"{rows} x {inner} x {columns}",
        operands=("x", "weight", "bias")[:count],
        ours=linear,
        stock=F.linear,
        reference=linear_reference,
        draws=[draw(10 * i + 1) for i in range(draws)],
    )


def _rms_norm(setup: OpSetup) -> Iterator[AccuracyCase]:
    for width in setup.shapes.norm_widths if setup.shapes.name else (96, 1000):
        yield rms_norm_case(setup, ROWS, width, draws=MANY)


def rms_norm_case(setup: OpSetup, rows: int, width: int, *, draws: int) -> AccuracyCase:
    def stock(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return weight * wide.to(x.dtype)

    def draw(seed: int) -> Draw:
        x, dy = (setup.drawn((rows, width), seed + i) for i in (0, 1))
        return (x, setup.drawn((width,), seed + 2)), (dy * 0.02,)

    return AccuracyCase(
        size=f"{rows} x {width}",
        operands=("x", "weight"),
        ours=lambda x, weight: rms_norm(x, weight, EPS),
        stock=stock,
        reference=lambda x, weight: rms_norm_reference(x, weight, EPS),
        draws=(draw(10 * i) for i in range(draws)),
    )


def _rotary(setup: OpSetup) -> Iterator[AccuracyCase]:
    """Rotation at positions up to 4096."""
    head_dim = setup.shapes.attention[0].head_dim if setup.shapes.name else 64
    frequencies = setup.shapes.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    reach = torch.arange(ROWS) * 8
    table = rotary_table(frequencies, int(reach.max()) + 1)[:, reach].to(setup.device)
    inv_freq, positions = frequencies.to(setup.device), reach.to(setup.device)

    def stock(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        angles = positions[:, None].float() * inv_freq
        twice = torch.cat([angles, angles], dim=-1)[:, None]
        cos, sin = twice.cos().to(q.dtype), twice.sin().to(q.dtype)

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin

        return rotated(q), rotated(k)

    q, k, dq, dk = (setup.drawn((ROWS, n, head_dim), s) for s, n in enumerate((4, 2, 4, 2)))
    yield AccuracyCase(
        size=f"{ROWS} x 4 and 2 heads of {head_dim}",
        operands=("q", "k"),
        outputs=("q rotated", "k rotated"),
        ours=lambda q, k: rotary(q, k, *table),
        stock=stock,
        reference=lambda *qk: tuple(rotary_reference(x, inv_freq, positions) for x in qk),
        draws=[((q, k), (dq, dk))],
    )


def _glu(setup: OpSetup) -> Iterator[AccuracyCase]:
    stock = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    width = setup.shapes.glu_width if setup.shapes.name else 208
    # Three outliers multiplied together must fit fp16; a wide layer has larger ones.
    divisor = 64 if setup.shapes.name else 32

    def draw(seed: int) -> Draw:
        gate, up, dy = (setup.drawn((ROWS, width), seed + i) for i in range(3))
        return (gate, up / divisor), (dy / divisor,)

    draws = [draw(10 * i) for i in range(4)]
    for activation in ACTIVATIONS:
        yield AccuracyCase(
            size=f"{ROWS} x {width}, {activation}",
            operands=("gate", "up"),
            ours=lambda gate, up, a=activation: glu(gate, up, a),
            stock=lambda gate, up, a=activation: stock[a](gate) * up,
            reference=lambda gate, up, a=activation: glu_reference(gate, up, a),
            draws=draws,
        )


def _embedding(setup: OpSetup) -> Iterator[AccuracyCase]:
    """Every token occurs many times."""
    tokens = torch.arange(8 * ROWS, device=setup.device) * 7 % 61
    width = setup.shapes.hidden_size
    dy = setup.drawn((len(tokens), width), 2, 0.02)
    yield AccuracyCase(
        size=f"{len(tokens)} x {width}",
        operands=("weight",),
        ours=lambda weight: embedding(tokens, weight),
        stock=lambda weight: F.embedding(tokens, weight),
        reference=lambda weight: embedding_reference(tokens, weight),
        draws=[((setup.drawn((61, width), 1),), (dy,))],
    )


def _attention(setup: OpSetup) -> Iterator[AccuracyCase]:
    """One causal sequence."""
    real = bool(setup.shapes.name)
    yield _attention_case(setup, setup.shapes.attention[0] if real else Heads(4, 2, 64))
    # A GPU's fp32 order errs more than the library where few keys are seen: docs/limits.md.
    if not real and setup.device.type == "cpu":
        yield _attention_case(setup, Heads(4, 2, 64, 48))


def _attention_case(setup: OpSetup, shape: Heads) -> AccuracyCase:
    layout, scale, window = PackedSequences.of([0], [ROWS]), shape.scale, shape.window
    places = torch.arange(ROWS, device=setup.device)
    distance = places[:, None] - places
    mask = None if window is None else (distance >= 0) & (distance < window)

    def stock(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    queries, keys = ((ROWS, n, shape.head_dim) for n in (shape.heads, shape.kv_heads))
    q, k = setup.drawn(queries, 1, SCORE_SCALE), setup.drawn(keys, 2, SCORE_SCALE)
    return AccuracyCase(
        size=f"{ROWS} x {shape}",
        operands=("q", "k", "v"),
        outputs=("o",),
        ours=lambda q, k, v: attention_varlen(q, k, v, layout, scale=scale, window=window)[0],
        stock=stock,
        reference=lambda q, k, v: attention_reference(q, k, v, scale=scale, window=window),
        draws=[((q, k, setup.drawn(keys, 3, 0.1)), (setup.drawn(queries, 4, 0.1),))],
    )


def _router(setup: OpSetup) -> Iterator[AccuracyCase]:
    """Weights of all experts: stock rounds its logits, and may choose others among fewer."""
    hidden = setup.shapes.hidden_size
    count = EXPERTS

    def stock(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).softmax(-1, dtype=torch.float32).to(x.dtype)

    def draw(seed: int) -> Draw:
        x = setup.drawn((ROWS, hidden), seed, 0.1)
        weight = setup.drawn((count, hidden), seed + 1, weight_scale(hidden))
        return (x, weight), (setup.drawn((ROWS, count), seed + 2, 0.02),)

    yield AccuracyCase(
        size=f"{ROWS} x {hidden} x {count}",
        operands=("x", "weight"),
        outputs=("weights",),
        ours=lambda x, weight: route_with_logits(x, weight, count, normalize=False)[1],
        stock=stock,
        reference=lambda x, weight: (x @ weight.t()).softmax(-1),
        draws=[draw(10 * i) for i in range(MANY)],
    )


def _experts(setup: OpSetup) -> Iterator[AccuracyCase]:
    """Experts against transformers' loop over them, for the same choice of experts."""
    x, ids, weights, gate_up, down = experts_probe(setup, ROWS)
    layout = PackedSequences.of([0], [ROWS])

    def stock(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(len(gate_up)):
            rows, place = torch.where(ids == expert)
            gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
            own = F.linear(F.silu(gate) * up, down[expert]) * weights[rows, place, None]
            total = total.index_add(0, rows, own.to(x.dtype))
        return total

    yield AccuracyCase(
        size=f"{ROWS} x {x.shape[1]} x {down.shape[2]}, {ids.shape[1]} of {len(down)}",
        operands=("x", "weights", "gate_up", "down"),
        ours=lambda x, weights, gate_up, down: experts(
            x, ids, weights, gate_up, down, layout, activation="silu"
        ),
        stock=stock,
        reference=lambda x, weights, *both: experts_reference(x, ids, weights, *both),
        draws=[((x, weights, gate_up, down), (setup.drawn((ROWS, x.shape[1]), 9, 0.02),))],
    )


def _token_logprobs(setup: OpSetup) -> Iterator[AccuracyCase]:
    """Logprobs against log_softmax of the logits that the stock model gives, in its dtype."""
    hidden, weight, targets, _ = token_logprob_probe(ROWS, setup)
    rows = SamplingRows.uniform(ROWS, device=setup.device)

    def stock(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = F.linear(hidden, weight).float().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy

    def gradients(seed: int) -> tuple[Tensor, Tensor]:
        dlogprobs, dentropy = (probe((ROWS,), seed=seed + i, device=setup.device) for i in (0, 1))
        return dlogprobs, 0.1 * dentropy

    # A small head has so few weights that the errors of one draw are a matter of luck.
    draws = 1 if setup.shapes.name else 8
    yield AccuracyCase(
        size=f"{ROWS} x {hidden.shape[1]} x {len(weight)}",
        operands=("hidden", "weight"),
        outputs=("logprobs", "entropy"),
        ours=lambda hidden, weight: token_logprobs(hidden, weight, targets, rows),
        stock=stock,
        reference=lambda hidden, weight: token_logprobs_reference(hidden, weight, targets),
        draws=[((hidden, weight), gradients(10 * i + 4)) for i in range(draws)],
    )


def _masked_reduction(setup: OpSetup) -> Iterator[AccuracyCase]:
    """Means of many batches: the error of one number would be a matter of luck. Always fp32."""
    values = probe((256, 4097), seed=1, device=setup.device)
    active = torch.arange(4097, device=setup.device) % 3 != 0
    if setup.device.type != "cpu":  # the library's sum of a part errs less: docs/limits.md
        active = torch.ones_like(active)

    def of_rows(mean: Callable[[Tensor], Tensor]) -> Op:
        return lambda values: torch.stack([mean(row) for row in values.unbind(0)])

    stock = of_rows(lambda row: row[active].mean())
    yield AccuracyCase(
        size=f"256 x 4097, {int(active.sum())} active",
        operands=("values",),
        outputs=("mean",),
        ours=of_rows(lambda row: masked_mean(row, active)),
        stock=stock,
        reference=stock,
        draws=[((values,), (probe((256,), seed=2, device=setup.device),))],
    )


def _gradient_norm(setup: OpSetup) -> Iterator[AccuracyCase]:
    """Norms of many sets of gradients, which are fp32 whatever the model is."""
    rows, device = (3, 96, 331), setup.device
    sets = [[probe((n, 96), seed=64 * i + n, device=device) for n in rows] for i in range(64)]

    def of_sets(norm: Callable[[list[Tensor]], Tensor]) -> Op:
        return lambda: torch.stack([norm(gradients) for gradients in sets])

    yield AccuracyCase(
        size="64 sets of 430 x 96",
        operands=(),
        outputs=("norm",),
        ours=of_sets(gradient_norm),
        stock=of_sets(torch.nn.utils.get_total_norm),
        reference=of_sets(lambda gradients: torch.cat([g.double() for g in gradients]).norm()),
        draws=[((), ())],
    )


ACCURACY_CASES: Mapping[str, Callable[[OpSetup], Iterator[AccuracyCase]]] = {
    "matmul": _matmul,
    "row_reduction": _row_reduction,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "glu": _glu,
    "embedding": _embedding,
    "attention": _attention,
    "router": _router,
    "experts": _experts,
    "token_logprobs": _token_logprobs,
    "masked_reduction": _masked_reduction,
    "gradient_norm": _gradient_norm,
}
"""Op -> its cases at the sizes of a setup."""

FP32_ONLY = ("masked_reduction", "gradient_norm")
"""Ops whose operands are fp32 whatever the model is."""

PARTS = ("matmul", "row_reduction")
"""Parts of other ops: reported, and judged as those."""
