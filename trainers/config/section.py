"""What every section of a recipe is built from: its base class and the types of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

LARGEST = 1e30
"""The largest number of a recipe: torch computes with it, and some multiples of it, in float32."""


class Section(BaseModel):
    """A frozen section: no unknown keys, finite numbers, a docstring under each field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _computable(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError(f"{value:g} is beyond {LARGEST:g}, and float32 computes with it")
    return value


def _not_empty(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("the path is empty: name a file or directory, '.' for the current one")
    return value


def _absolute(path: Path) -> Path:
    try:
        absolute = path.expanduser().absolute()
        str(absolute).encode("utf-8")
    except RuntimeError as error:
        raise ValueError(f"there is no user {path.parts[0]}: write the path out") from error
    except UnicodeEncodeError as error:  # libraries that write a checkpoint take no other text
        raise ValueError(f"{absolute!r} is no text in UTF-8: give an absolute path") from error
    return absolute


Int = Annotated[int, BeforeValidator(_not_bool), Field(ge=-(2**63), lt=2**63)]
Float = Annotated[float, BeforeValidator(_not_bool), AfterValidator(_computable)]
Count = Annotated[Int, Field(ge=1)]
CountOrZero = Annotated[Int, Field(ge=0)]
Positive = Annotated[Float, Field(gt=0)]
PositiveOrZero = Annotated[Float, Field(ge=0)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]
Share = Annotated[Float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_absolute)]


def require_one(**choices: Any) -> None:
    """ValueError unless exactly one of the choices is not None."""
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        got = ", ".join(given) or "none"
        remedy = "; set the others to null" if len(given) > 1 else ""
        raise ValueError(f"exactly one of {', '.join(choices)} is needed, got {got}{remedy}")
