"""What runs on a model's forward path, and why each part may be trusted.

One table serves three readers: `patch` refuses a model with an unsupported row, `session.report()`
returns the table of a model, and `python -m rl_consistency.models.audit` prints `docs/audit.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import nn
from transformers import PreTrainedConfig

from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.models import families
from rl_consistency.numerics.orders import ORDERS


class Verdict(StrEnum):
    """Why a part of the forward path gives the same bits in every batch, or that it may not."""

    CANONICAL = "canonical"
    """Runs in a registered reduction order."""
    AUDITED = "audited elementwise"
    """Adds nothing across tokens or features; a test shows that the place of a value in its tensor
    does not change its bits."""
    UNSUPPORTED = "unsupported"
    """No order and no audit covers it; `patch` refuses."""


@dataclass(frozen=True)
class AuditRow:
    """One leaf module or functional op."""

    name: str
    """Qualified module name, or the place of a functional op."""
    kind: str
    """Module class or expression."""
    verdict: Verdict
    basis: str
    """The order's tag, or the reason."""
    test: str
    """The test behind the verdict, `file::name`."""


@dataclass(frozen=True)
class AuditTable:
    """Rows of one model; prints as a table."""

    rows: tuple[AuditRow, ...]

    @property
    def unsupported(self) -> tuple[AuditRow, ...]:
        """Rows that no order or audit covers."""
        return tuple(row for row in self.rows if row.verdict is Verdict.UNSUPPORTED)

    def require_supported(self) -> None:
        """Raise if any row is unsupported.

        Raises:
            UnsupportedModelError: names the first such module and how many there are.
        """
        if self.unsupported:
            row = self.unsupported[0]
            raise families.UnsupportedModelError(
                f"module {row.name} ({row.kind}) has no canonical order, and {row.basis} "
                f"({len(self.unsupported)} such modules). Remove or merge it (adapters, "
                "quantized layers), or use a dense Llama, Mistral, Qwen2 or Qwen3."
            )

    def __str__(self) -> str:
        header = ("name", "kind", "verdict", "basis")
        cells = [header, *((r.name, r.kind, str(r.verdict), r.basis) for r in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )


TESTS = {
    op: f"tests/kernels/{op}/test_{op}.py::{test}"
    for op, test in {
        "linear": "test_rows_do_not_depend_on_the_batch",
        "rms_norm": "test_rows_do_not_depend_on_the_batch",
        "embedding": "test_gradient_does_not_depend_on_the_cut",
        "rotary": "test_rotation_is_bitwise_per_position",
        "glu": "test_values_do_not_depend_on_where_they_stand",
        "attention": "test_decode_and_chunks_equal_prefill",
        "token_logprobs": "test_rows_do_not_depend_on_the_batch",
    }.items()
}
"""Op -> the test that its verdict rests on."""


def _canonical(name: str, kind: str, op: str) -> AuditRow:
    return AuditRow(name, kind, Verdict.CANONICAL, ORDERS[op].tag, TESTS[op])


def _unsupported(name: str, kind: str, reason: str) -> AuditRow:
    return AuditRow(name, kind, Verdict.UNSUPPORTED, reason, "")


def _audited(name: str, kind: str, basis: str, test: str) -> AuditRow:
    return AuditRow(name, kind, Verdict.AUDITED, basis, f"tests/models/{test}")


FUNCTIONAL = (
    _audited(
        "DecoderLayer.forward",
        "residual + hidden_states",
        "one correctly rounded addition per element",
        "test_elementwise_audit.py::test_residual_addition_is_positionless",
    ),
    _canonical("Attention.forward", "rotary(q, k, cos, sin)", "rotary"),
    _audited(
        "RotaryEmbedding.forward",
        "table[position_ids]",
        "a gather from one table per model, made in fp64",
        "test_elementwise_audit.py::test_rotary_table_rows_do_not_depend_on_the_call",
    ),
    _canonical("Attention.forward", "softmax(q k^T) v", "attention"),
    _canonical("MLP.forward", "activation(gate) * up", "glu"),
    _audited(
        "Model.forward",
        "pack and unpack",
        "copies of rows, no arithmetic",
        "test_chain.py::test_a_token_does_not_depend_on_its_batch",
    ),
    _canonical("token_logprobs", "LM head, softmax, entropy", "token_logprobs"),
    _audited(
        "losses",
        "exp, min, clamp, products",
        "exp measured positionless on the CPU; the rest is correctly rounded",
        "test_elementwise_audit.py::test_elementwise_functions_are_positionless",
    ),
)
"""Ops on the forward path that are not modules, for every covered family."""


def audit(model: nn.Module, stock_classes: Mapping[str, type[nn.Module]]) -> AuditTable:
    """The table of one model.

    Args:
        model: stock or patched.
        stock_classes: what each patched module, by name, was before; empty for a stock model.
    """
    config = model.config
    assert isinstance(config, PreTrainedConfig)
    rows: list[AuditRow] = []
    activations: set[int] = set()
    mixins = families.mixins(config)
    for name, module in model.named_modules():
        stock = stock_classes.get(name, type(module))
        mixin = mixins.get(stock)
        if "forward" in vars(module):
            reason = "its forward was replaced on the instance (by a hook or a wrapper)"
            rows.append(_unsupported(name, stock.__name__, reason))
        elif mixin is not None:
            if mixin.op:
                rows.append(_canonical(name, stock.__name__, mixin.op))
            if mixin.op == "glu":
                # The op replaces the activation only; any other child runs as it is.
                activations.add(id(module.act_fn))
        elif id(module) in activations:
            rows.append(_canonical(name, stock.__name__, "glu"))
        elif stock is not nn.ModuleList:
            rows.append(_unsupported(name, stock.__name__, "no audit covers it"))
    return AuditTable((*rows, *FUNCTIONAL))


def markdown() -> str:
    """The text of docs/audit.md: orders, module classes per family, functional ops."""
    lines = [
        "# Audit of the forward path",
        "",
        "Generated by `python -m rl_consistency.models.audit`; a test fails when it is stale.",
        "Every part of a covered model's forward path is listed with the reason its bits do not",
        "depend on the batch, and the test behind that reason. Anything else makes `patch` refuse.",
        "",
        "## Canonical orders",
        "",
        *(line for order in ORDERS.values() for line in _order(order)),
        "## Modules",
        "",
        *_table(
            ("module", "verdict", "basis", "test"),
            (
                (part, str(Verdict.CANONICAL), ORDERS[mixin.op].tag, f"`{TESTS[mixin.op]}`")
                for part, mixin in families.module_kinds().items()
                if mixin.op
            ),
        ),
        "",
        f"Families: {', '.join(families.FAMILIES.values())}; the module names carry that prefix.",
        f"RoPE types: {', '.join(families.ROPE_TYPES)}. Layer types: "
        f"{', '.join(families.LAYER_TYPES)}. Activations: {', '.join(families.ACTIVATIONS)}.",
        "",
        "## Functional ops",
        "",
        *_table(
            ("where", "op", "verdict", "basis", "test"),
            ((r.name, f"`{r.kind}`", str(r.verdict), r.basis, f"`{r.test}`") for r in FUNCTIONAL),
        ),
        "",
    ]
    return "\n".join(lines)


def _order(order: ReductionOrder) -> list[str]:
    """Heading and pseudocode of one order, once for each device that has its own."""
    devices = {"cpu": "On a CPU" if order.cuda else "On both devices", "cuda": "On CUDA"}
    lines = [f"### {order.tag}", ""]
    for device in ("cpu", "cuda") if order.cuda else ("cpu",):
        lines += [f"{devices[device]}:", "", "```text", order.on(device).strip(), "```", ""]
    return lines


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"| {' | '.join('---' for _ in header)} |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    print(markdown(), end="")
