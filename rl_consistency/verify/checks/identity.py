"""C7: one process, one order; what differs is named and refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from rl_consistency.kernels.sampling.op import distribution
from rl_consistency.kernels.token_logprobs import op as kernel
from rl_consistency.models import forward
from rl_consistency.models.scoring import scored_rows as training
from rl_consistency.numerics import fingerprint as fingerprint_module
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.numerics.orders import ORDERS
from rl_consistency.numerics.settings import numeric_settings, verify_settings
from rl_consistency.numerics.strict import OPS, strict
from rl_consistency.rollout.device import model_runner, sampling_table
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.substitution import substituted


def check_fingerprint(tally: Tally, device: torch.device) -> None:
    """Equal here and now; another order, strictness or setting is named."""

    now = partial(fingerprint_module.fingerprint, device)
    first = now()
    tally.expect("the same process twice", first == now() and first.digest == now().digest)
    tally.expect("no difference from itself", first.difference(now()) == [])
    for op in OPS:
        with strict(except_={op}):
            _expect_named(tally, f"{op} on its stock path", first, now(), "stock_ops")
    for order in ORDERS.values():
        reversed_ = replace(order, cpu="reversed", cuda="reversed")
        for changed in (replace(order, version=order.version + 1), reversed_):
            others = MappingProxyType(dict(ORDERS) | {order.id: changed})
            with substituted(ORDERS, others):
                _expect_named(tally, f"another {order.id}", first, now(), f"order.{order.id}")
    with numeric_settings():
        before, precision = now(), torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            _expect_named(tally, "matmul precision", before, now(), "float32_matmul_precision")
            refused = False
            try:
                verify_settings()
            except ConsistencyError:
                refused = True
            tally.expect("a changed setting is refused", refused)
        finally:
            torch.set_float32_matmul_precision(precision)
        tally.expect("the setting put back", before.difference(now()) == [])


def check_one_function(tally: Tally, device: torch.device) -> None:
    """Rollout and training name the same functions for the quantities both need."""
    del device  # names do not depend on it
    tally.expect("distribution", sampling_table.distribution is distribution)
    tally.expect("LM head weight", forward.lm_head_weight is training.lm_head_weight)
    tally.expect("LM head logits", forward.lm_head_logits is kernel.lm_head_logits)
    tally.expect("rollout's logits", model_runner.next_token_logits is forward.next_token_logits)


def _expect_named(
    tally: Tally, case: str, ours: Fingerprint, theirs: Fingerprint, name: str
) -> None:
    named = ours.difference(theirs)
    holds = any(name in line for line in named) and ours.digest != theirs.digest
    tally.expect(case, holds, f"named {named or 'nothing'}, expected {name}")
