"""Writes the tables of docs/metrics.md and docs/recipe.md from the code, below what stands above
the first of them; `--check` only says whether they fit.

Exit status 1 if a document does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_consistency.parity.metric_table import METRICS
from rl_consistency.trainers.config.learning_sections import SAMPLING_KEYS
from rl_consistency.trainers.config.recipe import RunConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"


def metrics() -> str:
    """The tables of docs/metrics.md."""
    lines = []
    for heading, section in METRICS.items():
        lines += ["", f"## {heading}", "", "| name | meaning | of a run |", "| --- | --- | --- |"]
        lines += [f"| `{n}` | {_line(r.text)} | {r.standing} |" for n, r in section.items()]
    return "\n".join(lines) + "\n"


def recipe() -> str:
    """The tables of docs/recipe.md."""
    schema, lines = RunConfig.model_json_schema(), []
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


_INNER = ("items", "additionalProperties")


def _nested(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a field holds, by itself, as a choice or as a list."""
    choices = [field, *field.get("anyOf", [])]
    choices += [choice[key] for choice in list(choices) for key in _INNER if key in choice]
    sections = (each for each in choices if isinstance(each, dict))
    return next((each for each in sections if "properties" in _resolved(each, defs)), None)


def _resolved(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any]:
    return defs[field["$ref"].rsplit("/", 1)[1]] if "$ref" in field else field


BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
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
    if isinstance(inner := field.get("additionalProperties"), dict):
        return f"name: {_value(inner, defs)}"
    if field.get("type") == "array":
        return f"list of {_value(field.get('items', {}), defs)}"
    if field.get("type") == "string":
        return "path" if field.get("format") == "path" else "text"
    bounds = [(sign, field[key]) for key, sign in BOUNDS.items() if key in field]
    # Those of int64 are no news.
    bounds = [f"{sign} {limit:g}" for sign, limit in bounds if limit < 2**63]
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
    for name, tables in (("metrics.md", metrics()), ("recipe.md", recipe())):
        path = DOCS / name
        held = path.read_text("utf-8") if path.is_file() else ""
        text = held.partition("\n## ")[0] + tables
        if text != held:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, "utf-8")
    if stale and "--check" in arguments:
        print(f"docs/{', docs/'.join(stale)}: run python tools/reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
