"""JSON that holds its own SHA-256, so that no bit of it changes unseen; and that of files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL = "sha256"


def seal(content: Mapping[str, Any]) -> str:
    """The text of `content` and, first in it, the SHA-256 of all the rest."""
    return _text({SEAL: hashlib.sha256(_text(content).encode()).hexdigest(), **content})


def unseal(file: Path) -> dict[str, Any]:
    """What was sealed; ValueError, which says how, if one byte of the file is another one now."""
    if not file.is_file():
        raise ValueError(f"{file} is missing or no regular file")
    try:
        text = file.read_bytes().decode("utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.pop(SEAL, None), str):
        raise ValueError(
            f"{file} does not hold its own SHA-256: it is damaged, or an older rl_consistency "
            "wrote it"
        )
    if seal(content) != text:
        raise ValueError(f"{file} is damaged: its content does not have the SHA-256 it holds")
    return content


def file_digest(file: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1)
