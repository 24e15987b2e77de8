"""The errors that the FAQ names are errors that the code raises."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAQ = (ROOT / "docs" / "faq.md").read_text("utf-8")
ERRORS = re.findall(r"^\| `([^`]+)` \|", FAQ, re.M)
OF_TORCH = {"CUDA out of memory"}


def test_the_faq_has_ten_errors():
    assert len(ERRORS) == 10 and set(ERRORS) >= OF_TORCH


@pytest.mark.parametrize("error", sorted({*ERRORS} - OF_TORCH))
def test_an_error_of_the_faq_stands_in_the_code(error):
    files = (ROOT / "trainers").rglob("*.py")
    assert any(error in re.sub(r'"\s*f?"', "", file.read_text("utf-8")) for file in files)


def test_every_key_that_the_faq_names_is_one():
    recipe = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    sections = dict(re.findall(r"^## `([a-z_]+)`\n(.*?)(?=^## |\Z)", recipe, re.S | re.M))
    named = re.findall(r"`([a-z]+)\.([a-z_]+)(?::[^`]*)?`", FAQ)
    keys = [(section, key) for section, key in named if section in sections]
    assert len(keys) > 8
    for section, key in keys:
        assert f"| `{key}` |" in sections[section], f"{section}.{key}"
