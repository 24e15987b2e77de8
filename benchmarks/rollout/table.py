"""The rows of `bench rollout` as a table, for the terminal and for the README."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.results_file import Row

HEADS = ("work", "ours, tokens/s", "others, tokens/s", "ratio", "roofline", "GPU idle", "more")
OWN = "rollout_own"
"""The suite of a caller's workload; it stands behind no bar."""


def rollout_cells(row: Row) -> tuple[str, ...]:
    """One row's cells under `HEADS`; the roofline is the share of the measured copy bandwidth."""
    rates = {way: rate for way, rate in row.tokens_per_second.items() if way != "ours"}
    others = [f"{rate:,.0f}" if way == "stock" else f"{way} {rate:,.0f}"
              for way, rate in rates.items()]  # fmt: skip
    ours = row.tokens_per_second.get("ours")
    idle = row.figures.get("idle_share", row.figures.get("strict/idle_share"))
    return (
        _work(row),
        "-" if ours is None else f"{ours:,.0f}",
        "; ".join(others) or "-",
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        "-" if row.ceiling_fraction is None else f"{row.ceiling_fraction:.0%}",
        "-" if idle is None else f"{float(idle):.1%}",
        _more(row),
    )


def _work(row: Row) -> str:
    shape = row.shape
    if "long" in shape:
        return f"{shape['model']}: {row.work}, {shape['long']} tokens of context"
    sizes = f"{shape['sequences']} x ({shape['prompt']} + {shape['new_tokens']})"
    return f"{shape['model']}: {row.work}, {sizes}"


def _more(row: Row) -> str:
    """What the other columns do not say."""
    figures = row.figures
    parts = {
        "times_short": "{:.2f} x the time of a token at 1k",
        "strict/first_token_seconds": "first token {:.3f} s",
        "strict/mean_first_token_seconds": "mean {:.3f} s",
        "strict/prefill_tokens_per_second": "prefill {:,.0f} tokens/s",
        "strict/new_tokens_per_second": "with prefill {:,.0f} tokens/s",
        "strict/steps": "{:,.0f} steps",
        "acceptance_rate": "{:.0%} of the drafts accepted",
        "strict/mismatched_tokens": "mismatched tokens: {:,.0f}",
        "stock/mismatched_tokens": "stock {:,.0f}",
        "strict/tokens": "of {:,.0f}",
        "context": "context {:,.0f}",
    }
    said = [text.format(figures[key]) for key, text in parts.items() if key in figures]
    if "ours" in row.tokens_per_second and row.work.startswith("decode step") and row.ours_us:
        said.append(f"{row.ours_us / 1e3:.2f} ms a step")
    said += [f"{name}: {reason}" for name, reason in row.unavailable.items()]
    return row.error or ", ".join(said) or "-"


def rollout_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    table = Table(title="Rollout")
    for head in HEADS:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*rollout_cells(row))
    return table


def rollout_markdown(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table; none without rows."""
    if not rows:
        return []
    lines = ["", f"| {' | '.join(HEADS)} |", f"| --- |{' ---: |' * 5} --- |"]
    for row in rows:
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in rollout_cells(row))} |")
    return lines
