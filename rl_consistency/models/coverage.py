"""What runs on a model's forward path, and why each part may be trusted.

`patch` refuses a model that would have an unsupported row, `session.report()` returns the table,
and `python -m rl_consistency.models.coverage` prints both with every order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from typing import Any

from torch import nn

from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.models import families, installed_code
from rl_consistency.models.inventory import ACTIVATIONS, faults
from rl_consistency.numerics.orders import ORDERS


class Verdict(StrEnum):
    """Why a part of the forward path gives the same bits in every batch, or that it may not."""

    CANONICAL = "canonical"  # runs in a registered reduction order
    AUDITED = "audited elementwise"  # adds nothing; a test shows that no value's place matters
    INSTALLED = "as installed"  # code that stock stands on, and that the patch replaces or reads
    UNSUPPORTED = "unsupported"  # no order and no audit covers it; `patch` refuses


@dataclass(frozen=True)
class CoverageRow:
    """One leaf module, by qualified name and class, or functional op, by place and expression."""

    name: str
    kind: str
    verdict: Verdict
    basis: str  # the order's tag, or the reason
    test: str = ""  # the test behind an audit, `file::name`; `verify` checks the orders


@dataclass(frozen=True)
class CoverageTable:
    """Rows of one model; prints as a table."""

    rows: tuple[CoverageRow, ...]

    @property
    def unsupported(self) -> tuple[CoverageRow, ...]:
        return tuple(row for row in self.rows if row.verdict is Verdict.UNSUPPORTED)

    def __str__(self) -> str:
        header = ("name", "kind", "verdict", "basis")
        cells = [header, *((r.name, r.kind, str(r.verdict), r.basis) for r in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
        return "\n".join(lines)


def _canonical(name: str, kind: str, op: str) -> CoverageRow:
    return CoverageRow(name, kind, Verdict.CANONICAL, ORDERS[op].tag)


def _audited(name: str, kind: str, basis: str, test: str) -> CoverageRow:
    return CoverageRow(name, kind, Verdict.AUDITED, basis, f"tests/models/{test}")


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


def coverage(model: nn.Module, *, patched: bool = False) -> CoverageTable:
    """The table of one model of a covered class; `patched`: its modules have to be canonical."""
    config: Any = model.config
    found = faults(model, patched=patched)
    rows = [CoverageRow(f.name, f.kind, Verdict.UNSUPPORTED, f.reason) for f in found]
    refused, mixins = {row.name for row in rows}, families.mixins(config)
    for name, module in model.named_modules():
        stock = families.stock_class(type(module))
        mixin = mixins.get(stock)
        op = mixin.op if mixin is not None else "glu" if name.endswith(ACTIVATIONS) else ""
        if op and name not in refused:
            rows.append(_canonical(name, stock.__name__, op))
    return CoverageTable((*rows, *FUNCTIONAL, *_installed(config)))


def _installed(config: Any) -> Iterator[CoverageRow]:
    """What `families.stands_on` lists, each with its package and the digest of its file."""
    for module, names in families.stands_on(config).items():
        file = installed_code.installed(module)
        basis = f"{file.package} {metadata.version(file.package)}, sha256 {file.digest[:16]}"
        for name in sorted(names):
            every = name == installed_code.EVERY
            kind = "class" if name in file.classes else "function"
            place, kind = (module, "all functions") if every else (f"{module}.{name}", kind)
            yield CoverageRow(place, kind, Verdict.INSTALLED, basis)


def markdown() -> str:
    """A page of Markdown: orders, module classes per family, functional ops."""
    modules = (
        (part, str(Verdict.CANONICAL), ORDERS[mixin.op].tag)
        for part, mixin in families.module_kinds().items()
        if mixin.op
    )
    ops = (
        (r.name, f"`{r.kind}`", str(r.verdict), r.basis, r.test and f"`{r.test}`")
        for r in FUNCTIONAL
    )
    sections = [
        "# Audit of the forward path",
        "Every part of a covered model's forward path is listed with the reason its bits do not\n"
        "depend on the batch: an order, which `rl-consistency verify` checks, or an audit and its\n"
        "test. Anything else makes `patch` refuse.",
        "## Canonical orders",
        *(section for order in ORDERS.values() for section in _order(order)),
        "## Modules",
        _table(("module", "verdict", "basis"), modules),
        f"Families: {', '.join(families.FAMILIES.values())}; the module names carry that prefix.\n"
        f"RoPE types: {', '.join(families.ROPE_TYPES)}. Layer types: "
        f"{', '.join(families.LAYER_TYPES)}. Activations: {', '.join(families.ACTIVATIONS)}.",
        "## Functional ops",
        _table(("where", "op", "verdict", "basis", "test"), ops),
    ]
    return "\n\n".join(sections) + "\n"


def _order(order: ReductionOrder) -> list[str]:
    """Heading and pseudocode of one order, once for each device that has its own."""
    devices = {"cpu": "On a CPU", "cuda": "On CUDA"} if order.cuda else {"cpu": "On both devices"}
    texts = [f"{place}:\n\n```text\n{order.on(d).strip()}\n```" for d, place in devices.items()]
    return [f"### {order.tag}", *texts]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(r)} |" for r in (header, ("---",) * len(header), *rows))


if __name__ == "__main__":
    print(markdown(), end="")
