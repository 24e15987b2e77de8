"""The registry of canonical orders: a text changes only together with its version."""

import ast
import hashlib
from pathlib import Path

from rl_consistency.distributed import gradient_norm, ordered_sum
from rl_consistency.numerics.orders import ORDERS

GOLDEN = {
    "matmul/v3 cpu": "b90549f1f9e43bd9",
    "matmul/v3 cuda": "6278d62dcb632037",
    "row_reduction/v1 cpu": "187d8f2f212dc3c1",
    "gradient_fold/v3 cpu": "aacfe59ea8551c7a",
    "gradient_fold/v3 cuda": "3a0ed0bc3f4a2f68",
    "linear/v1 cpu": "71f95e0545e7e515",
    "rms_norm/v2 cpu": "cd0a06d772a60164",
    "rms_norm/v2 cuda": "0345d1eca8cc3040",
    "rotary/v1 cpu": "ae89852732f63dfd",
    "glu/v2 cpu": "f2c46969ebd53a5f",
    "glu/v2 cuda": "18386c8242533b6f",
    "embedding/v1 cpu": "d4af34f2939b8fb4",
    "attention/v3 cpu": "81506b30265b051a",
    "attention/v3 cuda": "f652f5a31122f6a5",
    "router/v1 cpu": "c6c98f1156fada53",
    "router/v1 cuda": "4d2ca3fa42a47dae",
    "experts/v1 cpu": "f635cac8ec220815",
    "sampling_support/v3 cpu": "4d3699aa2692d397",
    "sampling_support/v3 cuda": "e6245ebb5b90a740",
    "token_logprobs/v2 cpu": "38062997902fc6a3",
    "token_logprobs/v2 cuda": "e1718b93385af186",
    "masked_reduction/v1 cpu": "dfa46690c0a83b45",
    "gradient_norm/v1 cpu": "80bdb8becf7103fc",
    "gradient_norm/v2 cpu": "0c1286c0e399880b",
    "leaf_sum/v1 cpu": "32140fa275a2ce3b",
}
"""Tag and device -> SHA-256 of the order's text; `cuda` where it differs from `cpu`.

Another text is another order: raise the version, say so in the changelog, and only then change the
line here.
"""

ABOVE_THE_KERNELS = (ordered_sum.ORDER, gradient_norm.ORDER)

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def digests():
    return {
        f"{order.tag} {device}": hashlib.sha256(order.on(device).encode()).hexdigest()[:16]
        for order in (*ORDERS.values(), *ABOVE_THE_KERNELS)
        for device in ("cpu", "cuda")
        if device == "cpu" or order.cuda is not None
    }


def test_a_text_changes_only_with_its_version():
    assert digests() == GOLDEN


def test_every_order_in_a_kernel_file_is_registered():
    orders = [
        (path.relative_to(KERNELS).as_posix(), node.lineno)
        for path in KERNELS.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "ReductionOrder"
    ]
    assert len(orders) == len(ORDERS), orders
