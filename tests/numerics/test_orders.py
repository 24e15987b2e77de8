import ast
import hashlib
from pathlib import Path

import pytest

from rl_consistency.numerics.orders import ORDERS, order

GOLDEN = {
    "matmul/v3": "73d084c8702a94b9",
    "row_reduction/v1": "187d8f2f212dc3c1",
    "gradient_fold/v3": "e8fa6d3bdc755c2e",
    "linear/v1": "71f95e0545e7e515",
    "rms_norm/v2": "454e38f1f3d907f9",
    "rotary/v1": "e2972e84bb90ff1a",
    "glu/v2": "86a18d72da5e919d",
    "embedding/v1": "391fba717c26b627",
    "attention/v3": "f232c100fdedf463",
    "sampling_support/v3": "1250b1d5be76a86c",
    "token_logprobs/v2": "d373f10ce82bb4ce",
    "masked_reduction/v1": "dfa46690c0a83b45",
    "gradient_norm/v1": "80bdb8becf7103fc",
}
"""Tag -> SHA-256 of the order's text. Another text is another order: raise the version, say so in
the changelog, and only then change the line here."""

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def test_a_text_changes_only_with_its_version():
    digests = {
        o.tag: hashlib.sha256((o.cpu + (o.cuda or "")).encode()).hexdigest()[:16]
        for o in ORDERS.values()
    }
    assert digests == GOLDEN


def test_every_kernel_file_with_an_order_is_registered():
    with_order = {
        path.relative_to(KERNELS).as_posix()
        for path in KERNELS.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "ORDER" for t in node.targets)
    }
    assert len(with_order) == len(ORDERS), with_order


def test_orders_are_found_by_name():
    assert order("linear") is ORDERS["linear"]
    assert all(order(name).id == name for name in ORDERS)
    with pytest.raises(ValueError, match="no canonical order 'softmax'; known: matmul"):
        order("softmax")


def test_the_registry_cannot_be_changed():
    with pytest.raises(TypeError):
        ORDERS["linear"] = ORDERS["glu"]  # pyright: ignore[reportIndexIssue]
