"""Writes docs/metrics.md and docs/recipe.md from the code; `--check` only says whether they fit.

Exit status 1 if a document does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_consistency.parity.metrics import METRICS
from rl_consistency.trainers.config.learning_sections import SAMPLING_KEYS
from rl_consistency.trainers.config.recipe import RunConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
METRICS_HEAD = """\
# Metrics

What a step of `rl-consistency train` logs to `metrics.jsonl`, to the report and to wandb. The last
column says which value stands for the run in wandb's summary.

`rl-consistency report RUN` draws them into one HTML page, complete in itself
([a picture](img/report.png)). `rl-consistency dashboard
push --entity E --project P` makes a page of the same panels in wandb, and `dashboard show` prints
that page as JSON; `--trl` is for runs of TRL with `attach`, `--experts` for mixtures of experts, of
which the report too shows rerouted tokens and the balance loss. The panels are described in
`parity/metrics.py`.

With `tracking.wandb` a run also shows in wandb, offline too, histograms of |training - rollout|
(its log10; the lowest bin holds equal logprobs) and of r. Where tokens differ it shows the worst of
them in a table, keeps what `localize` found as an artifact, and raises an alert, of which wandb
sends one in half an hour. Where wandb is missing, has no key or cannot write, the run goes on
without it after one warning.

Written by `python tools/reference.py`; a test holds it equal to the code.
"""
RECIPE_HEAD = """\
# Recipes

Every key of a recipe. `--set section.key=value` overrides one on the command line;
`rl-consistency train RECIPE --print-config` prints a recipe with its defaults.
Written by `python tools/reference.py`; a test holds it equal to the code.
"""


def metrics() -> str:
    """docs/metrics.md."""
    lines: list[str] = [*METRICS_HEAD.splitlines()]
    for heading, section in METRICS.items():
        lines += ["", f"## {heading}", "", "| name | meaning | of a run |", "| --- | --- | --- |"]
        lines += [f"| `{n}` | {_line(r.text)} | {r.standing} |" for n, r in section.items()]
    return "\n".join(lines) + "\n"


def recipe() -> str:
    """docs/recipe.md."""
    schema = RunConfig.model_json_schema()
    lines: list[str] = [*RECIPE_HEAD.splitlines()]
    for name, section in schema["properties"].items():
        lines += _section(name, section, schema["$defs"])
    return "\n".join(lines) + "\n"


def _section(path: str, given: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    """The table of a section's keys, then those of the sections in it."""
    section = _resolved(given, defs)
    yield from ("", f"## `{path}`", "", _line(section.get("description", "")), "")
    yield from ("| key | value | default | meaning |", "| --- | --- | --- | --- |")
    inner = []
    required, defaults = section.get("required", []), given.get("default") or {}
    for key, field in section["properties"].items():
        if path == "rollout.sampling" and key not in SAMPLING_KEYS:
            continue  # SamplingParams has more than a recipe takes
        field = {**field, "default": defaults[key]} if key in defaults else field
        nested = _nested(field, defs)
        inner += [(f"{path}.{key}", nested)] if nested else []
        default = "required" if key in required else _default(field, bool(nested))
        value = _value(field, defs) + (f", see `{path}.{key}`" if nested else "")
        yield f"| `{key}` | {value} | {default} | {_line(field.get('description', ''))} |"
    for below, nested in inner:
        yield from _section(below, nested, defs)


def _nested(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a field holds, by itself, as a choice or as a list."""
    choices = [field, *field.get("anyOf", []), field.get("items", {})]
    for choice in choices:
        resolved = _resolved(choice, defs)
        if "properties" in resolved:
            return choice
    return None


def _resolved(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any]:
    return defs[field["$ref"].rsplit("/", 1)[1]] if "$ref" in field else field


BOUNDS = {"minimum": ">=", "ge": ">=", "exclusiveMinimum": ">", "gt": ">"}
UPPER = {"maximum": "<=", "le": "<=", "exclusiveMaximum": "<", "lt": "<"}
PLAIN = {"integer": "integer", "number": "number", "boolean": "true or false", "null": "null"}


def _value(field: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """What a key may be, in words."""
    if "anyOf" in field:
        return " or ".join(_value(choice, defs) for choice in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        resolved = _resolved(field, defs)
        return _value(resolved, defs) if "enum" in resolved else "section"
    if "prefixItems" in field:
        return f"[{', '.join(_value(item, defs) for item in field['prefixItems'])}]"
    if field.get("type") == "array":
        return f"list of {_value(field.get('items', {}), defs)}"
    if field.get("type") == "string":
        return "path" if field.get("format") == "path" else "text"
    bounds = [f"{sign} {field[key]:g}" for key, sign in BOUNDS.items() if key in field]
    # Those of int64 are no news.
    upper = [(field[key], sign) for key, sign in UPPER.items() if key in field]
    bounds += [f"{sign} {limit:g}" for limit, sign in upper if limit < 2**63]
    return " ".join([PLAIN.get(field.get("type", ""), "section"), *bounds])


def _default(field: Mapping[str, Any], nested: bool) -> str:
    if nested and isinstance(field.get("default"), dict):
        return "its defaults"
    return f"`{json.dumps(field['default'])}`" if "default" in field else ""


def _line(text: str) -> str:
    """The first paragraph, in one line."""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write or check both."""
    stale = []
    for name, text in (("metrics.md", metrics()), ("recipe.md", recipe())):
        path = DOCS / name
        if not path.is_file() or path.read_text("utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, "utf-8")
    if stale and "--check" in arguments:
        print(f"docs/{', docs/'.join(stale)}: run python tools/reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
