"""What runs on a model's forward path, and why each part may be trusted.

One table serves three readers: `patch` refuses what it marks unsupported, `session.report()` prints
it for a model, and `docs/audit.md` is generated from it (`python -m rl_consistency.models.audit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import nn
from transformers import PreTrainedConfig

from rl_consistency.models import families
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.numerics.orders import ORDERS


class Verdict(StrEnum):
    """Why a part of the forward path gives the same bits in every batch, or that it may not."""

    CANONICAL = "canonical"
    """Runs in a registered reduction order."""
    AUDITED = "audited elementwise"
    """No sum across tokens or features; a test shows its bits do not depend on where a value
    stands."""
    UNSUPPORTED = "unsupported"
    """Nothing is known; `patch` refuses."""


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


_CHAIN_TEST = "tests/models/test_chain.py::test_a_token_does_not_depend_on_its_batch"

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

FUNCTIONAL = (
    AuditRow(
        "DecoderLayer.forward",
        "residual + hidden_states",
        Verdict.AUDITED,
        "one correctly rounded addition per element",
        "tests/models/test_elementwise_audit.py::test_residual_addition_is_positionless",
    ),
    AuditRow(
        "Attention.forward",
        "rotary(q, k, cos, sin)",
        Verdict.CANONICAL,
        ORDERS["rotary"].tag,
        TESTS["rotary"],
    ),
    AuditRow(
        "RotaryEmbedding.forward",
        "table[position_ids]",
        Verdict.AUDITED,
        "a gather from one table per model, made in fp64",
        "tests/models/test_elementwise_audit.py::test_rotary_table_rows_do_not_depend_on_the_call",
    ),
    AuditRow(
        "Attention.forward",
        "softmax(q k^T) v",
        Verdict.CANONICAL,
        ORDERS["attention"].tag,
        TESTS["attention"],
    ),
    AuditRow(
        "MLP.forward",
        "activation(gate) * up",
        Verdict.CANONICAL,
        ORDERS["glu"].tag,
        TESTS["glu"],
    ),
    AuditRow(
        "Model.forward",
        "pack and unpack",
        Verdict.AUDITED,
        "copies of rows, no arithmetic",
        _CHAIN_TEST,
    ),
    AuditRow(
        "token_logprobs",
        "LM head, softmax, entropy",
        Verdict.CANONICAL,
        ORDERS["token_logprobs"].tag,
        TESTS["token_logprobs"],
    ),
    AuditRow(
        "losses",
        "exp, min, clamp, products",
        Verdict.AUDITED,
        "exp measured positionless on the CPU; the rest is correctly rounded",
        "tests/models/test_elementwise_audit.py::test_elementwise_functions_are_positionless",
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
            rows.append(AuditRow(name, stock.__name__, Verdict.UNSUPPORTED, reason, ""))
            continue
        if mixin is not None and not mixin.op:
            continue
        if mixin is not None:
            rows.append(_canonical_row(name, stock, mixin))
            if mixin.op == "glu":
                # The activation alone is replaced by the op; any other child runs as it is.
                activations.add(id(module.act_fn))
        elif stock in families.containers(config):
            continue
        elif id(module) in activations:
            rows.append(
                AuditRow(name, stock.__name__, Verdict.CANONICAL, ORDERS["glu"].tag, TESTS["glu"])
            )
        else:
            rows.append(
                AuditRow(name, stock.__name__, Verdict.UNSUPPORTED, "no audit covers it", "")
            )
    return AuditTable((*rows, *FUNCTIONAL))


def _canonical_row(name: str, stock: type[nn.Module], mixin: type[CanonicalModule]) -> AuditRow:
    return AuditRow(name, stock.__name__, Verdict.CANONICAL, ORDERS[mixin.op].tag, TESTS[mixin.op])


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
        *_table(("order", "text"), ((o.tag, o.text) for o in ORDERS.values())),
        "",
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


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"| {' | '.join('---' for _ in header)} |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    print(markdown(), end="")
