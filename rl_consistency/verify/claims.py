"""The claims that are verified, and how one check of a claim keeps its count."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.bytes import bits, same_bytes

CLAIMS: Mapping[str, str] = {
    "C1": "a token's output does not depend on what else is in the call",
    "C2": "rollout logprobs are the bytes that training recomputes",
    "C3": "gradients do not depend on how the batch is cut",
    "C6": "the canonical order is as accurate as the stock op",
    "C7": "both sides run one order, and a difference is named",
}
"""Claims that one process can judge. C4 (processes) is judged by `verify --world`, C5 (resume) by
tests of training runs."""


@dataclass(kw_only=True)
class Tally:
    """Counts the comparisons of one check and keeps the first failure."""

    cases: int = 0
    """Comparisons made."""
    mismatches: int = 0
    """Comparisons that failed."""
    detail: str = ""
    """The first failure: which case, which place, both values; or a remark."""
    figure: float | None = None
    """Largest error ratio, for C6; None where bytes judge."""

    @property
    def passed(self) -> bool:
        """Whether there was a comparison and none failed."""
        return self.cases > 0 and self.mismatches == 0

    def equal(
        self,
        case: str,
        expected: Tensor,
        actual: Tensor,
        row_name: Callable[[int], str] = "row {}".format,
    ) -> bool:
        """Compare two tensors [rows, ...] byte by byte; a NaN or an infinity is a failure too."""
        if expected.shape != actual.shape or expected.dtype != actual.dtype:
            kinds = [f"{x.dtype} {list(x.shape)}" for x in (expected, actual)]
            return self.expect(case, False, " against ".join(kinds))
        if same_bytes(expected, actual) and bool(actual.isfinite().all()):
            return self.expect(case, True)
        differs = (bits(expected) != bits(actual)) | ~actual.isfinite()
        first = tuple(differs.nonzero()[0].tolist())
        place = row_name(first[0]) if first else "value"
        inside = f" element {list(first[1:])}" if len(first) > 1 else ""
        values = f"{expected[first].item()!r} against {actual[first].item()!r}"
        count = f"{int(differs.sum())} of {differs.numel()} values"
        return self.expect(case, False, f"{place}{inside}: {values} ({count})")

    def expect(self, case: str, holds: bool, detail: str = "") -> bool:
        """Count one comparison that was judged elsewhere."""
        self.cases += 1
        if not holds:
            self.mismatches += 1
            if self.mismatches == 1:
                self.detail = f"{case}: {detail}" if detail else case
        return holds

    def result(self, seconds: float, **row: str) -> Result:
        """What was found, as a row of `verify`."""
        return Result(**row, **asdict(self), passed=self.passed, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class _Row:
    claim: str
    subject: str
    """The op, or the part of the chain."""
    scope: str
    """Model and dtype it is checked in."""
    what: str
    """What is varied."""

    @property
    def key(self) -> str:
        """`claim subject`, the name a negative control knows the check by."""
        return f"{self.claim} {self.subject}"


@dataclass(frozen=True, kw_only=True)
class Result(_Row):
    """What one check found; see `Tally`."""

    cases: int
    mismatches: int
    passed: bool
    detail: str
    figure: float | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Check(_Row):
    """A claim about a subject, and the comparisons that judge it."""

    body: Callable[[Tally], None]

    def run(self) -> Result:
        """Make the comparisons. A `ConsistencyError` of the program under test is a failed one;
        other errors pass through."""
        tally, start = Tally(), time.perf_counter()
        try:
            self.body(tally)
        except ConsistencyError as error:
            tally.expect("refused", False, str(error))
        if not tally.cases:
            tally.detail = "nothing was compared"
        row = {"claim": self.claim, "subject": self.subject, "scope": self.scope, "what": self.what}
        return tally.result(time.perf_counter() - start, **row)
