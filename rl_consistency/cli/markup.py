"""HTML made of templates and values: a value is escaped, whatever file it was read from."""

from __future__ import annotations

import html
from string import Formatter
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"  # noqa: E501 - one value
"""Content security policy of a page: its own styles, and no script, frame, form or address."""


class Markup(str):
    """Text that is HTML already."""


def markup(template: str, *values: Any, **named: Any) -> Markup:
    """`template.format(...)` as HTML: all that is no `Markup` enters as text."""
    return Markup(_ESCAPING.vformat(template, values, named))


class _Escaping(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        text = format(value, format_spec)
        return text if isinstance(value, Markup) else html.escape(text)


_ESCAPING = _Escaping()
