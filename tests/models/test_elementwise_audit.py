"""What the audit calls elementwise, shown not to depend on where a value stands."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.models.modules import TABLE_POSITIONS
from rl_consistency.models.patch import patch
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.presets import PRESETS, build_preset

FUNCTIONS = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 1e-3),
    "log1p": lambda x: torch.log1p(x.abs()),
    "cos": torch.cos,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "divide": lambda x: 1.0 / (x.abs() + 0.5),
    "clamp": lambda x: x.clamp(0.8, 1.2),
    "minimum": lambda x: torch.minimum(x * 1.3, x.clamp(0.8, 1.2)),
    "sigmoid from exp": lambda x: 1.0 / (1.0 + torch.exp(-x)),
}
SPANS = [slice(i, i + n) for i in (0, 1, 3, 8, 500) for n in (1, 2, 7, 9, 31, 33, 1000)]


def moved_values(function, x):
    """Spans of x on which the function gives other bytes than within the whole."""
    whole = function(x)
    return sum(not same_bytes(function(x[s].clone()), whole[s]) for s in SPANS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions_are_positionless(name):
    x = probe((37, 51)).flatten().clamp(-80, 80)
    assert moved_values(FUNCTIONS[name], x) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_residual_addition_is_positionless(dtype):
    residual = probe((37, 51), dtype).flatten()
    update = probe((37, 51), dtype, seed=1).flatten()
    whole = residual + update
    for span in SPANS:
        assert same_bytes(residual[span].clone() + update[span].clone(), whole[span])
    exact = (residual.double() + update.double()).to(dtype)
    assert same_bytes(whole, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_rotary_table_rows_do_not_depend_on_the_call(preset, dtype):
    """Any order of positions, any shape of the call, and a table grown in between."""
    model = build_preset(preset, dtype)
    with patch(model):
        rotary = model.model.rotary_emb
        x = torch.zeros(1, 1, 96, dtype=dtype)
        positions = torch.tensor([0, 1, 5, 63, 700, 3, 1023])
        whole = rotary(x, positions[None], TABLE_POSITIONS)
        assert whole[0].dtype == torch.float32
        for i, position in enumerate(positions):
            alone = rotary(x, position.view(1, 1), int(position) + 1)
            assert all(same_bytes(a[0], w[i]) for a, w in zip(alone, whole, strict=True))
        rotary(x, torch.tensor([[TABLE_POSITIONS + 5]]), TABLE_POSITIONS + 6)
        again = rotary(x, positions.flip(0)[None], TABLE_POSITIONS)
        assert all(same_bytes(a.flip(0), w) for a, w in zip(again, whole, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_angles_do_not_depend_on_how_the_dtype_was_chosen(preset):
    """`model.to(dtype)` rounds the stock buffer of frequencies; the table does not use it."""
    tables = []
    for dtype in (torch.float32, torch.bfloat16):
        with patch(model := build_preset(preset, dtype)):
            tables.append(
                torch.stack(model.model.rotary_emb(torch.zeros(1), torch.arange(500), 500))
            )
    assert same_bytes(*tables)


@pytest.mark.parametrize("stock", [torch.sigmoid, torch.nn.functional.silu])
def test_functions_with_two_formulas_fail_the_same_check(stock):
    assert moved_values(stock, probe((37, 51)).flatten()) > 0
