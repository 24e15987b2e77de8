"""Short and tall tiles: every row of every expert is computed, however many rows it has. Operands
are small integers, so every order of adding gives the same bytes, also in the interpreter."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Findings, Winner, forget_picks
from rl_consistency.kernels.experts import products_triton
from rl_consistency.kernels.experts.pairs_triton import activate_pairs, expert_pairs_op
from rl_consistency.kernels.experts.products_triton import gate_up_fwd, product_fwd
from rl_consistency.kernels.experts.schedules import (
    GATE_UP,
    GATE_UP_TMA,
    PRODUCTS,
    PRODUCTS_FP32,
    PRODUCTS_TMA,
    ProductSchedule,
    fold_candidates,
    fold_work,
    pick_fold,
    pick_product,
    product_candidates,
    product_work,
)
from rl_consistency.kernels.linear.op import linear
from rl_consistency.parity.bytes import same_bytes
from tests.kernels.experts.cases import EDGES, ids_of_counts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU interpreter")

INNER, WIDTH = 20, 72
"""K, and columns of a gate: more than a tall tile has."""
FILLER = 9
MIXED, ONE_EXPERT = (16, 3, 135, 0, 17), (0, 130, 0)


@pytest.fixture(autouse=True)
def missing_rows_are_nan(monkeypatch):
    """Memory that is not written holds NaN, not an earlier result."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def integers(*shape, seed):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))


def case(counts, dtype):
    """x and weights of gate and up, and the pairs of rows behind some of filler, at one expert
    each."""
    ids = ids_of_counts(counts, 1)
    ids = torch.cat([ids.new_zeros(FILLER, 1), ids])
    x = integers(len(ids), INNER, seed=1).to(dtype)
    weights = integers(len(counts), 2 * WIDTH, INNER, seed=2).to(dtype)
    tables = PackedSequences.of([FILLER], [sum(counts)]).tables(x.device)
    pairs, _, first = expert_pairs_op(ids, tables.query_start, tables.tokens, len(counts))
    return x, weights, pairs, first


def by_linear(x, weights, pairs, first):
    """Each expert's rows times its weights by the public op."""
    parts = [
        linear(x[pairs[begin:end].long()], weights[expert])
        for expert, (begin, end) in enumerate(itertools.pairwise(first.tolist()))
    ]
    return torch.cat(parts)


def wrong_products(schedule, counts, dtype):
    """Which calls differ from `by_linear`."""
    x, weights, pairs, first = case(counts, dtype)
    expected, count = by_linear(x, weights, pairs, first), int(first[-1])
    own = x[pairs[:count].long()]
    own = torch.cat([own, own.new_full((len(pairs) - count, INNER), torch.nan)])
    turned = weights.transpose(1, 2).contiguous()
    found = {
        "nt": product_fwd(x, weights, "nt", first, pairs, 1, True, schedule),
        "nn, by pair": product_fwd(own, turned, "nn", first, pairs, 1, False, schedule),
    }
    return [name for name, y in found.items() if not same_bytes(y[:count], expected)]


def wrong_gate_up(schedule, counts, dtype):
    """The same of gate and up and their activation."""
    x, weights, pairs, first = case(counts, dtype)
    expected, count = by_linear(x, weights, pairs, first), int(first[-1])
    y, both = gate_up_fwd(x, weights, first, pairs, 1, "silu", True, schedule)
    activated = activate_pairs(torch.cat([expected, both[count:]]), first, "silu")
    right = same_bytes(both[:count], expected), same_bytes(y[:count], activated[:count])
    return [name for name, alike in zip(("packed", "y"), right, strict=True) if not alike]


def every(schedules):
    """Parameters: the first, and the others among what takes long."""
    first, *others = schedules
    marked = [pytest.param(s, marks=pytest.mark.thorough) for s in others]
    return pytest.mark.parametrize("schedule", [first, *marked], ids=lambda s: s.name)


@every([*PRODUCTS, PRODUCTS_FP32[0]])
def test_a_product_has_every_row_of_every_expert(schedule):
    dtype = torch.float32 if schedule in PRODUCTS_FP32 else torch.bfloat16
    for counts in (EDGES, MIXED, ONE_EXPERT) if schedule == PRODUCTS[0] else (EDGES,):
        assert wrong_products(schedule, counts, dtype) == []


@pytest.mark.thorough
@every([*GATE_UP, PRODUCTS_FP32[0]])
def test_gate_and_up_have_every_row_of_every_expert(schedule):
    dtype = torch.float32 if schedule in PRODUCTS_FP32 else torch.bfloat16
    for counts in (EDGES, MIXED, ONE_EXPERT) if schedule == GATE_UP[0] else (EDGES,):
        assert wrong_gate_up(schedule, counts, dtype) == []


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((1,) * 16, marks=pytest.mark.thorough),
        pytest.param((1,) * 17, marks=pytest.mark.thorough),
        (16, 0, 0),
        (17, 0, 0),
    ],
)
def test_a_call_has_as_many_tiles_as_any_routing_needs(counts, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FILLER", 0)
    for schedule in (PRODUCTS[0], PRODUCTS[-1]):
        assert wrong_products(schedule, counts, torch.bfloat16) == []
    if len(counts) > 3:  # these need every tile of the grid
        stock = products_triton.most_tiles
        monkeypatch.setattr(products_triton, "most_tiles", lambda *sizes: stock(*sizes) - 1)
        assert wrong_products(PRODUCTS[0], counts, torch.bfloat16)
        assert wrong_gate_up(GATE_UP[0], counts, torch.bfloat16)


MUTANTS = {
    "a short tile for one row more": {"stop - start <= BLOCK_M": "stop - start <= BLOCK_M + 1"},
    "an expert in neither list": {
        "tiles = tl.cdiv(end - begin, TALL_M)": "tiles = tl.cdiv(end - begin, TALL_M) * "
        "(end - begin != BLOCK_M)"
    },
    "an expert in both lists": {
        "tall == (tile < ahead).to(tl.int32)": "(tall == (tile < ahead).to(tl.int32)) | "
        "(end - begin == BLOCK_M)"
    },
    "short tiles do not follow tall ones": {"tile -= tl.where(tile < ahead, 0, ahead)": "pass"},
    "tiles as high as short ones": {"(tile - before) * TALL_M": "(tile - before) * BLOCK_M"},
}
"""What each one replaces."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=pytest.mark.thorough if i else ()) for i, m in enumerate(MUTANTS)],
)
def test_a_wrong_tile_is_noticed(mutant, tmp_path, monkeypatch):
    source = Path(products_triton.__file__).read_text()
    functions = (
        source.index("@triton.jit\ndef expert_tile"),
        source.index("@triton.jit\ndef operand_rows"),
    )
    source = "import triton\nimport triton.language as tl\n" + source[slice(*functions)]
    for old, new in MUTANTS[mutant].items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    path = tmp_path / "tiles.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("tiles", path)
    assert spec is not None and spec.loader is not None
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    for name in ("expert_tile", "takes_short"):
        monkeypatch.setattr(products_triton, name, getattr(wrong, name))
    assert wrong_products(PRODUCTS[0], MIXED, torch.bfloat16)
    assert wrong_gate_up(GATE_UP[0], MIXED, torch.bfloat16)


def test_a_call_of_few_rows_has_no_tall_tile():
    schedule = ProductSchedule.named("tma-16x64x128-w4-s5+tma-64x128x64-w4-s4")
    assert [tile.block_m for tile in schedule.tiles(16)] == [16, 16]
    assert [tile.block_m for tile in schedule.tiles(17)] == [16, 64]
    alike = ProductSchedule.named("tma-64x128x64-w4-s4")
    assert alike.tiles(1) == alike.tiles(1000)


def test_both_tiles_of_a_schedule_fit_one_kernel():
    tables = PRODUCTS, PRODUCTS_TMA, GATE_UP, GATE_UP_TMA, PRODUCTS_FP32
    for table in tables:
        assert [s.mean for s in table] == sorted({s.mean for s in table})
        assert len({s.name for s in table}) == len(table)
        for schedule in table:
            short, tall = schedule.short, schedule.tall
            assert (short.kind, short.warps) == (tall.kind, tall.warps)
            assert short == tall or short.block_m < tall.block_m
            assert tall.block_n % short.block_n == 0
            assert ProductSchedule.named(schedule.name, schedule.mean) == schedule


def test_the_rule_picks_by_the_mean_rows_of_an_expert():
    for pairs, name in ((8, 0), (64 * 128, 0), (64 * 128 + 1, 1), (97 * 128, 2), (1 << 20, -1)):
        own = pick_product("nt", pairs, 128, 768, 2048, torch.bfloat16, True)
        assert own == PRODUCTS_TMA[name]


def test_a_winner_of_tune_goes_before_the_rule(monkeypatch):
    store, cpu = Findings(None, {}), torch.device("cpu")
    monkeypatch.setitem(findings_module._by_device, cpu, store)
    sizes = 2048, 128, 768, 2048
    for product in ("gate_up", "nt", "nn"):
        last = product_candidates(product, torch.bfloat16, tma=True)[-1]
        work = product_work(product, torch.bfloat16, True, *sizes)
        store.keep(work, Winner(last.name, 1.0, 2.0))
        assert pick_product(product, *sizes, torch.bfloat16, True, cpu) == last
    last = fold_candidates(torch.bfloat16, tma=True)[-1]
    store.keep(fold_work(torch.bfloat16, True, *sizes), Winner(last.name, 1.0, 2.0))
    assert pick_fold(*sizes, torch.bfloat16, tma=True, processors=132, device=cpu) == last
    forget_picks()
