import ast
from pathlib import Path

import pytest
from torch import nn

from rl_consistency.models.coverage import FUNCTIONAL, Verdict, coverage, markdown
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.numerics.orders import ORDERS
from rl_consistency.verify.presets import PRESETS, build_preset

ROOT = Path(__file__).resolve().parents[2]


def functions_in(path):
    return {
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_the_page_has_every_order():
    assert all(order.tag in markdown() for order in ORDERS.values())


@pytest.mark.parametrize("name", sorted({row.test for row in FUNCTIONAL} - {""}))
def test_every_test_that_the_audit_names_exists(name):
    path, function = name.split("::")
    assert function in functions_in(path)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_leaf_of_a_covered_model_is_listed(preset):
    model = build_preset(preset)
    leaves = {name for name, module in model.named_modules() if not list(module.children())}
    stock = coverage(model)
    with patch(model) as session:
        patched = session.report()
    assert patched == stock
    assert leaves <= {row.name for row in stock.rows}
    assert {row.verdict for row in stock.rows} == {*Verdict} - {Verdict.UNSUPPORTED}
    assert set(FUNCTIONAL) <= set(stock.rows)


class Adapter(nn.Linear):
    pass


@pytest.mark.parametrize("place", ["model.layers.1.mlp.up_proj", "lm_head"])
def test_an_adapter_anywhere_is_unsupported(place):
    model = build_preset("tiny-llama")
    model.set_submodule(place, Adapter(96, 96))
    assert [row.name for row in coverage(model).unsupported] == [place]
    with pytest.raises(UnsupportedModelError, match=rf"module {place} \(Adapter\) has no canonica"):
        patch(model)
