"""Every launcher that a compiler may meet, as the torch.library op that it is registered as."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing._internal.optests.generate_tests import OpCheckError

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.attention.op import attention_packed_fwd
from rl_consistency.kernels.core.kernels_hash import KERNELS
from rl_consistency.kernels.core.torch_op import NAMESPACE
from rl_consistency.kernels.experts.fold_triton import find_runs
from rl_consistency.kernels.experts.pairs_triton import expert_pairs_op
from rl_consistency.kernels.experts.route import router_choice_op
from rl_consistency.kernels.pointwise.glu import glu_bwd_op
from rl_consistency.kernels.rms_norm.norm_triton import rms_norm_fwd_op
from rl_consistency.kernels.sampling.vocabulary_triton import (
    vocabulary_combine,
    vocabulary_row_statistics,
)
from rl_consistency.kernels.token_logprobs.head_triton import token_gradient_table
from rl_consistency.kernels.token_logprobs.op import IGNORED
from rl_consistency.kernels.token_logprobs.schedules import pick

T, H, N, V, EXPERTS = 24, 64, 48, 304, 4
LAYOUT = ([0, 16], [10, 7])
"""Starts and lengths of two sequences among the T rows."""
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="the interpreter runs where there is no GPU"
            ),
        ),
    ]
)
def device(request):
    return request.param


def given(device):
    """Operands that several ops share."""

    def small(*shape, dtype=BF16, seed=0, scale=0.1):
        return probe(shape, dtype, seed, scale=scale).to(device)

    positive = torch.linspace(0.5, 2.0, T, device=device)
    logits, targets = small(T, V, dtype=FP32), torch.arange(T, device=device)
    top, log_normalizer, entropy = vocabulary_combine(
        vocabulary_row_statistics(logits, positive, False)
    )
    cotangents = small(2, T, dtype=FP32, seed=5).unbind(0)
    scores: Any = (positive, top, log_normalizer, entropy, *cotangents, targets, IGNORED)
    return SimpleNamespace(
        small=small,
        device=device,
        x=small(T, H),
        weight=small(N, H, seed=1),
        head=small(V, H, seed=2),
        columns=small(N, seed=3),
        norm=small(H, seed=3),
        logits=logits,
        temperature=positive,
        targets=targets,
        scores=scores,
        table=token_gradient_table(*scores),
        drawn_from=(logits, positive, None, top, log_normalizer),
        uniforms=torch.linspace(0.0, 0.99, T, dtype=torch.float64, device=device),
        room=lambda: torch.zeros(T, V, dtype=BF16, device=device),
    )


def rotary_operands(g):
    angles = g.small(2, T, 8, dtype=FP32).unbind(0)
    return g.small(T, 4, 16), g.small(T, 2, 16), *angles, True


def norm_operands(g):
    _, total, rstd = rms_norm_fwd_op(g.x, g.x, g.norm, 1e-6)
    return g.x, g.x, total, g.norm, rstd, 1, True


def attention_operands(g):
    return g.small(T, 4, 16), g.small(T, 2, 16, seed=1), g.small(T, 2, 16, seed=2)


def attention_gradient_operands(g):
    q, k, v = attention_operands(g)
    out, lse = attention_packed_fwd(q, k, v, *LAYOUT, 0.25, None)
    return g.small(T, 4, 16, seed=3), q, k, v, out, lse, *LAYOUT, 0.25, None


def support_operands(g):
    # The interpreter takes a second a row.
    few = 3
    top_k = torch.full((few,), 20, device=g.device)
    top_p, min_p = (torch.full((few,), value, device=g.device) for value in (0.9, 0.01))
    return g.logits[:few], g.temperature[:few], top_k, top_p, min_p, False


def buffer(g, *shape, dtype=FP32):
    return torch.zeros(shape, dtype=dtype, device=g.device)


def routed(g):
    """ids [T, 2] of four experts, the pairs, and the steps of their runs; every row has a sequence,
    so that nothing is left unwritten."""
    first = torch.arange(T, dtype=torch.int32, device=g.device) % 3
    ids = torch.stack([first, first + 1], dim=1)
    start, length = (torch.tensor([n], dtype=torch.int32, device=g.device) for n in (0, T))
    pairs, places, begins = expert_pairs_op(ids, start, length, EXPERTS)
    runs = find_runs(ids, places, PackedSequences.of([0], [T]), EXPERTS)
    return SimpleNamespace(
        ids=ids, start=start, length=length, pairs=pairs, places=places, first=begins, runs=runs,
        weights=torch.full((T, 2), 0.5, device=g.device),
        gate_up=g.small(EXPERTS, 2 * N, H, seed=1), down=g.small(EXPERTS, H, N, seed=2),
        packed=g.small(2 * T, 2 * N, seed=3), inner=g.small(2 * T, N, seed=4),
        outputs=g.small(2 * T, H, seed=5),
    )  # fmt: skip


def of_experts(names, *more):
    """Operands by their names in `routed`, and others."""
    return lambda g: (*(getattr(routed(g), name) for name in names.split()), *more)


def expert_gradient(g):
    r = routed(g)
    steps = r.runs.places, r.runs.rows, r.runs.first
    return buffer(g, EXPERTS, H, N), g.x, r.inner, *steps, True, False


def logit_gradient_operands(g):
    ids, weights, p = router_choice_op(g.logits, 3, False)
    return g.small(T, 3, dtype=FP32, seed=1), ids, weights, p, V, BF16


CASES = {
    "attention_packed_fwd": lambda g: (*attention_operands(g), *LAYOUT, 0.25, 5),
    "attention_packed_bwd": attention_gradient_operands,
    "embedding_fwd": lambda g: (g.targets, g.head),
    "expert_combine_op": of_experts("outputs places weights"),
    "expert_fold_op": expert_gradient,
    "expert_gate_up_op": lambda g: (
        g.x, *of_experts("gate_up first pairs", 2, "silu", True)(g),
    ),
    "expert_pair_bwd_op": of_experts("packed inner weights first pairs", "silu"),
    "expert_pairs_op": of_experts("ids start length", EXPERTS),
    "expert_product_op": lambda g: (
        *of_experts("inner down")(g), "nt", *of_experts("first pairs", 2, False)(g),
    ),
    "fold_step_sums": lambda g: (buffer(g, H, dtype=torch.float64), g.small(5, H, dtype=FP32)),
    "folded_step_sums": lambda g: (g.small(5, H, dtype=FP32), BF16),
    "gate_up_glu_op": lambda g: (g.x, g.weight, g.weight, "silu"),
    "glu_bwd_op": lambda g: (g.x, g.x, g.x, "gelu", True),
    "glu_fwd_op": lambda g: (g.x, g.x, "silu"),
    "gradient_fold_columns": lambda g: (buffer(g, H, dtype=torch.float64), g.x, 1),
    "gradient_fold_outer": lambda g: (buffer(g, H, H), g.x, g.x, False),
    "gradient_fold_rows": lambda g: (buffer(g, V, H), g.targets, g.x),
    "matmul_op": lambda g: (g.x, g.weight, g.columns, "nt", FP32),
    "philox_uniforms": lambda g: (
        torch.arange(5 * T, device=g.device).view(T, 5),
        g.targets,
    ),
    "qkv_op": lambda g: (g.x, *[g.weight] * 3, *[g.columns] * 3),
    "rms_norm_bwd_op": norm_operands,
    "rms_norm_fwd_op": lambda g: (g.x, g.x, g.norm, 1e-6),
    "rotary_op": rotary_operands,
    "router_choice_op": lambda g: (g.logits, 3, False),
    "router_logits_bwd_op": logit_gradient_operands,
    "token_gradient": lambda g: (
        g.x, g.head, g.table, g.room(), False, pick(g.x, g.head),
    ),
    "token_gradient_table": lambda g: g.scores,
    "token_row_gradient": lambda g: (g.logits, g.table, g.room(), False),
    "token_statistics": lambda g: (
        g.x, g.head, g.temperature, False, pick(g.x, g.head),
    ),
    "token_target_gradient": lambda g: (g.table, g.temperature, g.targets, g.room()),
    "token_target_logits": lambda g: (g.x, g.head, g.targets, g.temperature, False),
    "vocabulary_combine": lambda g: (
        vocabulary_row_statistics(g.logits, g.temperature, False),
    ),
    "vocabulary_draw": lambda g: (*g.drawn_from, g.uniforms, False),
    "vocabulary_logprobs": lambda g: (*g.drawn_from, g.targets, False),
    "vocabulary_row_statistics": lambda g: (g.logits, g.temperature, False),
    "vocabulary_shifted": lambda g: (g.logits, g.temperature, g.temperature, False),
    "vocabulary_support": support_operands,
}  # fmt: skip
"""Name of an op -> its operands."""


@pytest.fixture(scope="module", autouse=True)
def all_ops():
    """Every op is registered, whatever ran before in this process."""
    for file in KERNELS.rglob("*.py"):
        path = file.relative_to(KERNELS).with_suffix("")
        importlib.import_module(".".join(["rl_consistency.kernels", *path.parts]))


def test_every_registered_op_has_a_case():
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    assert {name for space, _, name in names if space == NAMESPACE} == set(CASES)


QUICK = ("fold_step_sums", "glu_fwd_op", "matmul_op", "router_choice_op", "vocabulary_combine")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.thorough) for n in CASES],
)
def test_a_compiler_is_told_the_truth_about_an_op(name, device):
    """What it writes, its result's shapes and dtypes without data, and the same values traced."""
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.library.opcheck(op, CASES[name](given(device)))


def test_a_fake_of_another_shape_fails_the_same_check():
    def halved(x: Tensor) -> Tensor:
        return x[::2].clone()

    op = torch.library.custom_op(f"{NAMESPACE}_test::halved", halved, mutates_args=())
    op.register_fake(torch.empty_like)
    with pytest.raises(OpCheckError, match="test_faketensor"):
        torch.library.opcheck(op, (torch.ones(4),))


def test_an_argument_that_has_its_default_reaches_the_fake():
    """The dispatcher leaves it out."""
    with FakeTensorMode():
        gate = torch.empty(T, N)
        assert len(glu_bwd_op(gate, gate, gate, "silu", False)) == 2
        assert len(glu_bwd_op(gate, gate, gate, "silu", True)) == 3
