"""YAML for recipes: the 1.2 core scalars, no duplicate keys, `a.b=value` overrides.

YAML 1.1, which PyYAML reads by default, turns `1e-3` into a string, `on` into a boolean, `010`
into 8 and `12:30` into 750. Here a scalar is null, a boolean (true, false), a decimal integer, a
float or a string. Aliases and tags are refused, and size and depth are bounded: a recipe is a small
tree, and an override of one place must not change another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

LARGEST, DEEPEST = 2**18, 32
"""Bytes of a recipe, and sections within sections; ours have 3,000 and 4."""


class RecipeSyntaxError(ValueError):
    """The text is not acceptable YAML, or an override cannot be applied to it."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of this module and duplicate keys refused."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event, problem = self.peek_event(), None
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            problem = "an alias (& or *): write the value out at each place"
        elif event.tag is not None:
            problem = f"the tag {event.tag.replace('tag:yaml.org,2002:', '!!')}: leave it out"
        elif self.depth == DEEPEST:
            problem = f"nested deeper than {DEEPEST} levels"
        elif isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            problem = "a text with the character 0 or half a surrogate pair"
        if problem:
            raise yaml.MarkedYAMLError(None, None, problem, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        digits = self.construct_scalar(node)
        if len(digits) > 100:
            problem = f"a number of {len(digits)} digits"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return int(digits, 10)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, mark = self.construct_object(key_node, deep=True), key_node.start_mark
            line, problem = mark.line + 1, None
            if not isinstance(key, str):
                problem = f"the key {key!r} is not a string: quote it"
            elif key in first_line:
                problem = f"the key {key!r} stands twice, on lines {first_line[key]} and {line}"
            if problem:
                raise yaml.MarkedYAMLError(None, None, problem, mark)
            first_line[key] = line
        return super().construct_mapping(node, deep=deep)


_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)


class _StrictDumper(yaml.SafeDumper):
    """SafeDumper that quotes the texts which `_StrictLoader` would read as something else."""

    yaml_implicit_resolvers = _StrictLoader.yaml_implicit_resolvers


for _tag, _pattern, _first in _SCALARS:
    # PyYAML looks a resolver up by the scalar's first character, "" for an empty scalar.
    _StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_decimal)


def dump(tree: Any) -> str:
    """The YAML that `parse` reads as the tree."""
    return yaml.dump(tree, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True, width=100)


def read(path: Path) -> Any:
    """The value of a YAML file; RecipeSyntaxError, OSError or UnicodeDecodeError."""
    with path.open("rb") as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise RecipeSyntaxError(f"{path} has more than {LARGEST:,} bytes: it is no recipe")
    return parse(data.decode("utf-8"), str(path))


def parse(text: str, source: str) -> Any:
    """The value of one YAML document. `source` names it in errors (RecipeSyntaxError)."""
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = error.problem or error.context
        raise RecipeSyntaxError(f"{source} is not valid YAML{line}: {problem}") from error
    except yaml.reader.ReaderError as error:
        line, character = text.count("\n", 0, error.position) + 1, f"U+{error.character:04X}"
        problem = f"line {line}: the character {character} is not allowed"
        raise RecipeSyntaxError(f"{source} is not valid YAML, {problem}") from error


def apply_overrides(
    tree: dict[str, Any], overrides: Sequence[str], texts: Collection[str] = ()
) -> None:
    """Sets each `a.b=value` in `tree`, in order; the value is YAML; a list is entered by index. The
    value of a key in `texts` stands for itself there, unless it is quoted or null."""
    problems: list[str] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        source, keys = f"override {override:.60}", path.strip().split(".")
        try:
            if not equals or not all(keys):
                problem = "expected section.key=value: training.steps=10, say"
                raise RecipeSyntaxError(f"{source}: {problem}")
            # Of four keys the third is an index, or the name of an evaluation set.
            key = ".".join(keys if len(keys) < 4 else [*keys[:2], *keys[3:]])
            _set(tree, keys, (_text if key in texts else parse)(text, source), source)
        except RecipeSyntaxError as error:
            problems.append(str(error))
    if problems:
        raise RecipeSyntaxError("\n".join(problems))


def _text(text: str, source: str) -> Any:
    """The text that a value is, or quotes, without blanks around it; or null."""
    try:
        value = parse(text, source)
    except RecipeSyntaxError:
        value = ...
    quoted = isinstance(value, str) and text.lstrip().startswith(("'", '"', "|", ">"))
    is_null = value is None and "#" not in text  # which begins a comment
    return value if quoted or is_null else parse(dump(text.strip()), source)


def merge(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Sets the value at `keys` in `tree`; of a mapping each of its keys, the others stay.

    RecipeSyntaxError where a key leads into something that is no section.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            merge(tree, [*keys, str(key)], inner)
    else:
        _set(tree, list(keys), value, f"{'.'.join(keys)}")


def _set(tree: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    node: Any = tree
    for depth, key in enumerate(keys):
        place = f"{source}: {'.'.join(keys[:depth])} is"
        index: Any = key
        if isinstance(node, list):
            if not (key.isdecimal() and int(key) < len(node)):
                raise RecipeSyntaxError(f"{place} a list of {len(node)}: {key!r} is no index")
            index = int(key)
        elif not isinstance(node, dict):
            raise RecipeSyntaxError(f"{place} the value {node!r}, not a section")
        if depth == len(keys) - 1:
            node[index] = value
        elif isinstance(node, dict) and node.get(index) is None:
            node[index] = {}  # an absent or null section is opened by its first override
        node = node[index]
