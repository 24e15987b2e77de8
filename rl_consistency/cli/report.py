"""`rl-consistency report`: one HTML page about a run, complete in itself and readable offline."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from rl_consistency.cli import plots
from rl_consistency.cli.markup import POLICY, Markup, markup
from rl_consistency.cli.plots import series
from rl_consistency.parity.drift import worst_tokens
from rl_consistency.parity.metric_table import EXPERTS, WORST, sections
from rl_consistency.parity.replay import LOCALIZATION, TEXTS, load_replay_bundle
from rl_consistency.trainers.data.foreign_files import parse_json_object
from rl_consistency.trainers.run_directory.directory import REPLAY, SAMPLES
from rl_consistency.trainers.run_directory.manifest import listed, require_own, write_own
from rl_consistency.trainers.run_directory.step_files import (
    Rows,
    load_rows,
    read_changes,
    read_rows,
    run_file,
)


def run(args: argparse.Namespace) -> int:
    """Render the page and print where it is."""
    print(render(args.run_dir))
    return 0


CSS = """
:root { --ink: #1f2937; --muted: #6b7280; --line: #e5e7eb; --good: #0f766e; --bad: #b91c1c; }
* { box-sizing: border-box; }
body { margin: 0; background: #f8fafc; color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 0 0 10px; }
p { margin: 4px 0 0; color: var(--muted); }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px;
          padding: 20px 22px; margin-top: 18px; overflow-x: auto; }
.verdict { border-left: 6px solid var(--good); } .verdict.bad { border-left-color: var(--bad); }
.verdict strong { font-size: 20px; color: var(--good); }
.verdict.bad strong { color: var(--bad); }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line);
         overflow-wrap: anywhere; vertical-align: top; }
th { font-weight: 600; color: var(--muted); font-size: 13px; }
td.number, th.number { text-align: right; padding-right: 0; padding-left: 12px; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
td code { white-space: pre-wrap; }
pre { margin: 12px 0 0; white-space: pre-wrap; } summary { cursor: pointer; font-weight: 600; }
"""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{name} · rl_consistency</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>
<body><main>
<h1>{name}</h1><p>{steps}</p>
{verdict}
{changes}
{sections}
{samples}
{summary}
<section><details><summary>Configuration</summary>
<pre>{config}</pre></details></section>
</main></body></html>
"""

MOST_ROWS = 20
"""Worst tokens that the page shows."""


def render(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run directory, whose run need not have ended; returns its path.

    FileNotFoundError on a missing file, ValueError, naming file and line, on a damaged one.
    """
    run_dir = Path(run_dir)
    rows = load_rows(run_dir)
    config = run_file(run_dir, "config.yaml")
    page = markup(
        PAGE,
        name=os.fsencode(run_dir.resolve().name).decode("utf-8", errors="replace"),
        policy=POLICY,
        style=Markup(CSS),
        steps=f"{len(rows)} steps, {rows[0]['step']} to {rows[-1]['step']}",
        verdict=_verdict(rows),
        changes=_changes(run_dir),
        sections=_sections(run_dir, rows),
        samples=samples_section(run_dir / SAMPLES),
        summary=_summary(run_dir / "summary.json"),
        config=config.read_text("utf-8", errors="replace"),
    )
    target = run_dir / "report.html"
    require_own(target, listed(run_dir))
    write_own(target, page)
    return target


def _verdict(rows: Rows) -> Markup:
    """The whole run in one line: every token the same bits, or how many are not."""
    counts = plots.drift_counts(rows)
    ours, stock = counts.get("rl_consistency"), counts.get("stock")
    checks = series(rows, "consistency/gradient_check/passed")[1]
    rerouted = sum(series(rows, "consistency/rerouted_tokens")[1])
    drifted = any(series(rows, "consistency/mismatched_tokens")[1]) or rerouted
    bad = ours is None or drifted or not all(checks)
    if ours is not None and rerouted:
        ours += f", {rerouted:,.0f} met other experts"
    passed = f" passed: {sum(checks):.0f} of {len(checks)}" if checks else ": none in this run"
    if empty := sum(series(rows, "consistency/gradient_check/without_gradient")[1]):
        passed += f"; in {empty:.0f} there was no gradient, nothing checked"
    details = (
        f"Stock path{f' on the same model: {stock}' if stock else ': not measured'}. "
        f"Gradient checks{passed}."
    )
    return markup(
        '<section class="verdict{}"><strong>{}</strong><p>{}</p></section>',
        *(" bad" if bad else "", ours or "Drift was not measured", details),
    )


def _changes(run_dir: Path) -> Markup:
    """What was changed in the recipe where the run was resumed; "" without a change."""
    if not (found := read_changes(run_dir)):
        return Markup()
    lines = [[step, key, _shown(old), _shown(new)] for step, key, old, new in found]
    table = _table(["from step", "key", "before", "since"], lines, numbers=99)
    title = "Changes of the recipe on resuming"
    return markup("<section><h2>{}</h2>{}</section>", title, table)


def _sections(run_dir: Path, rows: Rows) -> Markup:
    parts = []
    routed = {key for panel in EXPERTS.panels for key in panel.keys}
    for section in sections(of_experts=any(routed & row.keys() for row in rows)):
        if section is WORST:
            content = _worst_tokens(run_dir)
        else:
            content = _svg(plots.section_figure(section, rows), section.title)
        shown = section.title, section.caption, content
        parts.append(markup("<section><h2>{}</h2><p>{}</p>\n{}</section>", *shown))
    return Markup("\n".join(parts))


def _worst_tokens(run_dir: Path) -> Markup:
    """The table of the first bundle, or of another if that one was not localized."""
    bundles = sorted((run_dir / REPLAY).glob("bundle-*"))
    bundles.sort(key=lambda path: not (path / LOCALIZATION).is_file())
    if not bundles:
        return Markup("<p>No replay bundle is here: no token differed.</p>")
    try:
        bundle = load_replay_bundle(bundles[0])
    except (ValueError, OSError) as error:  # the page is about the run, not about this file
        return markup("<p>{}</p>", error)
    rows = worst_tokens(bundle.samples, lambda ids: str(ids[0]), most=MOST_ROWS)
    heads = ["token id", "sequence", "position", "rollout", "training", "training − rollout"]
    # Nine digits tell two fp32 values apart.
    lines = [[r.token, r.prompt_id, r.position, *(f"{x:.9g}" for x in r[4:])] for r in rows]
    where = f"Step {bundle.config.get('step')}, {REPLAY}/{bundles[0].name}."
    try:
        if (file := bundles[0] / TEXTS).is_file() and (texts := _texts(file)):
            heads.insert(1, "token")
            for line in lines:
                line.insert(1, markup("<code>{}</code>", texts.get(line[0], "")))
    except (ValueError, OSError) as error:  # as above
        where += f" {TEXTS}: {error}."
    return markup("<p>{}</p>{}", where, _table(heads, lines, numbers=0))


def _table(heads: Sequence[str], lines: Iterable[Sequence[Any]], numbers: int) -> Markup:
    """A table; numbers stand in the columns from `numbers` on."""

    def row(tag: str, cells: Sequence[Any]) -> str:
        found = []
        for index, cell in enumerate(cells):
            kind = Markup(" class=number" if index >= numbers else "")
            found.append(markup("<{0}{1}>{2}</{0}>", tag, kind, cell))
        return f"<tr>{''.join(found)}</tr>"

    rows = [row("th", heads)] if heads else []
    return Markup(f"<table>{''.join([*rows, *(row('td', line) for line in lines)])}</table>")


def _texts(file: Path) -> dict[str, str]:
    """Token id -> its text as Python writes it; ValueError for a damaged file."""
    texts = parse_json_object(file.read_bytes())
    for token, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"the text of token {token} is {type(text).__name__}, not str")
    return {token: repr(text) for token, text in texts.items()}


def _svg(figure: Figure, title: str) -> Markup:
    """The figure as an inline SVG element; its ids are hashes of what they name."""
    stream = io.StringIO()
    # No date, and the style's fixed salt: the same run gives the same page.
    with rc_context(plots.STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    opened = markup('<svg role="img" aria-label="{}" ', title)
    return Markup(text[text.index("<svg") :].replace("<svg ", opened, 1))


def _summary(path: Path) -> Markup:
    if not path.is_file():
        return Markup(
            "<section><h2>Summary</h2><p>There is no summary.json: the run has not finished. "
            "The figures above are those of the steps so far.</p></section>"
        )
    try:
        summary = parse_json_object(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}: resume the run to rewrite it") from error
    flat = {name: _shown(value) for name, value in _flattened(summary)}
    paths = ("consistency/", "stock/")
    figures = dict.fromkeys(name.split("/", 1)[1] for name in flat if name.startswith(paths))
    lines = [[n, *(flat.get(path + n, "") for path in paths)] for n in figures]
    rest = [[n, value] for n, value in flat.items() if not n.startswith(paths)]
    tables = [(["figure", "rl_consistency", "stock"], lines), ([], rest)]
    shown = [_table(heads, cells, numbers=1) for heads, cells in tables if cells]
    return Markup(f"<section><h2>Summary</h2>{'<p>&nbsp;</p>'.join(shown)}</section>")


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        # Exact 0 and 1 are claims: a number that only rounds to them must not look like them.
        if not math.isfinite(value) or value in (0.0, 1.0):
            return repr(value)
        return f"{value:.6g}" if f"{value:.6g}" not in ("0", "1") else repr(value)
    return value if isinstance(value, str) else json.dumps(value)


SAMPLE_COLUMNS = ("step", "prompt", "completion", "answer", "reward", "tokens", "finish_reason")
SAMPLE_STEPS = 3
"""Steps that are shown at either end of the run."""


def samples_section(file: Path) -> Markup:
    """Completions of the first and the last steps with their rewards; "" where a run has none."""
    rows = read_rows(file, _check_samples) if file.is_file() else []
    if not rows:
        return Markup()
    shown = rows if len(rows) <= 2 * SAMPLE_STEPS else [*rows[:SAMPLE_STEPS], *rows[-SAMPLE_STEPS:]]
    heads = [name.replace("_", " ") for name in SAMPLE_COLUMNS]
    lines = []
    for row in shown:
        for sample in row["samples"]:
            cells = {**sample, "step": row["step"], "reward": f"{sample['reward']:.6g}"}
            lines.append([markup("<code>{}</code>", cells[name]) for name in SAMPLE_COLUMNS])
    return markup(
        "<section><h2>Samples</h2><p>Completions of the first and the last steps, the best and the "
        "worst of a group. All are in {}.</p>{}</section>",
        *(file.name, _table(heads, lines, numbers=99)),
    )


def _check_samples(row: dict[str, Any]) -> None:
    samples = row.get("samples")
    needed = {*SAMPLE_COLUMNS} - {"step"}
    for s in samples if isinstance(samples, list) else [None]:
        if isinstance(s, dict) and needed <= s.keys() and isinstance(s["reward"], int | float):
            continue
        raise TypeError('"samples" must be a list of completions with their rewards')
