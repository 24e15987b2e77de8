"""What bars are held against: figures over the rows of their suites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rows import Row, geometric_mean, lacks_memory

Figure = Callable[[Sequence[Row]], float | None]
"""The figure of a bar from the rows of its suites; None where they do not give one."""


def of_all(pick: Callable[..., Any], value: Callable[[Row], float | None]) -> Figure:
    """The lowest or highest value of the rows without an error, or what else `pick` makes of all;
    None unless each of them has it, NaN if one is."""

    def figure(rows: Sequence[Row]) -> float | None:
        values = [value(row) for row in rows if row.error is None]
        found = [each for each in values if each is not None]
        if not found or len(found) < len(values):
            return None
        return math.nan if any(map(math.isnan, found)) else pick(found)

    return figure


def bandwidth(rows: Sequence[Row]) -> float | None:
    """The lowest share of the copy bandwidth of wide rows; narrow ones are left out."""
    return lowest_share([row for row in rows if int(row.shape["width"]) >= 4096])


def further(name: str) -> Callable[[Row], float | None]:
    """One of a row's further figures."""
    return lambda row: float(row.figures[name]) if name in row.figures else None


def highest(name: str) -> Figure:
    """The highest of one of the rows' further figures."""
    return of_all(max, further(name))


def of_strategies(zero: bool, name: str) -> Figure:
    """The highest of a further figure, of DeepSpeed's strategies or of the others."""
    of_rows = highest(name)
    return lambda rows: of_rows(
        [r for r in rows if str(r.shape["strategy"]).startswith("zero") == zero]
    )


def scaling(rows: Sequence[Row]) -> float | None:
    """The lowest of completions of 1,024 tokens; the host's share of shorter steps is larger."""
    long = [row for row in rows if int(row.shape["new_tokens"]) >= 1024]
    return of_all(min, further("scaling"))(long)


def peak_against(peer: str) -> Figure:
    """The highest peak of ours / the peer's."""
    return of_all(
        max, lambda r: r.peak_bytes["ours"] / p if (p := r.peak_bytes.get(peer)) else None
    )


def peer_ratio(peer: str) -> Callable[[Row], float | None]:
    """The peer's time / ours; None where the row has not both."""
    return lambda row: row.peers[peer] / row.ours_us if row.ours_us and peer in row.peers else None


def against_vllm(peer: str, work: str, new_tokens: int | None = None) -> Figure:
    """The lowest ratio to vLLM of some works, each within one run: a row may hold its two modes
    from two runs. None where one of them lacks it."""
    lowest = of_all(min, further(f"{peer}/ratio"))

    def figure(rows: Sequence[Row]) -> float | None:
        found = [row for row in rows if row.work == work]
        if new_tokens is not None:
            size = {"sequences": 256, "new_tokens": new_tokens}
            found = [row for row in found if size.items() <= row.shape.items()]
        return lowest(found)

    return figure


def stock_drifts(rows: Sequence[Row]) -> float | None:
    """Mismatched tokens of strict; infinite where stock has none, because then nothing is shown,
    and None where stock's were not counted."""
    strict, stock = (highest(f"{m}/mismatched_tokens")(rows) for m in ("strict", "stock"))
    return None if stock is None else strict if stock > 0 else math.inf


def in_band(low: int, high: int, figure: Figure) -> Figure:
    """A figure of the rows with so many rows of a matmul."""
    return lambda rows: figure([row for row in rows if low <= int(row.shape["m"]) <= high])


def long(figure: Figure) -> Figure:
    """A figure of the rows whose sequences have 1,024 tokens or more."""
    return lambda rows: figure([row for row in rows if int(row.shape["length"]) >= 1024])


def many(figure: Figure) -> Figure:
    """A figure of the rows of 32 sequences or more."""
    return lambda rows: figure([row for row in rows if int(row.shape["sequences"]) >= 32])


def of_16k(figure: Figure) -> Figure:
    """A figure of the rows whose steps have 16,384 tokens."""
    return lambda rows: figure(
        [row for row in rows if int(row.shape["sequences"]) * int(row.shape["length"]) == 16384]
    )


def where_stock_fits(rows: Sequence[Row]) -> float | None:
    """The lowest of the rows in which stock does not run out of memory; these name it."""

    def too_large(row: Row) -> bool:
        return row.ratio is None and any(map(lacks_memory, row.unavailable.values()))

    return lowest([row for row in rows if not too_large(row)])


def where_liger_fits(figure: Figure) -> Figure:
    """A figure of the rows in which Liger does not run out of memory."""
    return lambda rows: figure(
        [row for row in rows if not lacks_memory(row.unavailable.get("liger", ""))]
    )


def against_liger_if_covered(rows: Sequence[Row]) -> float | None:
    """The lowest of the rows whose family Liger has."""
    return against_liger([r for r in rows if "liger" in r.peers or "liger" in r.unavailable])


geomean = of_all(geometric_mean, lambda r: r.ratio)
lowest = of_all(min, lambda r: r.ratio)
lowest_share = of_all(min, lambda r: r.ceiling_fraction)
largest_error = of_all(max, lambda r: r.error_ratio)
against_liger = of_all(min, peer_ratio("liger"))
