"""tools/screenshot.py, with a stand-in for the browser."""

import shutil
import sys

import pytest
from PIL import Image

from tools import screenshot


def stand_in(tmp_path, drawn):
    """A browser that "renders" the picture `drawn` whatever it is asked for."""
    source = tmp_path / "drawn.png"
    drawn.save(source)
    program = tmp_path / "browser"
    program.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        "(target,) = [a[13:] for a in sys.argv if a.startswith('--screenshot=')]\n"
        f"assert sys.argv[-1].startswith('file://')\nshutil.copy({str(source)!r}, target)\n"
    )
    program.chmod(0o755)
    return str(program)


def test_the_picture_is_cut_where_the_page_ends(tmp_path, monkeypatch):
    drawn = Image.new("RGB", (40, 200), "white")
    drawn.paste("red", (5, 5, 20, 60))
    program = stand_in(tmp_path, drawn)
    monkeypatch.setattr(shutil, "which", lambda name: program)
    screenshot.take(tmp_path / "report.html", tmp_path / "report.png")
    picture = Image.open(tmp_path / "report.png")
    assert picture.size == (40, 84) and len(picture.convert("RGB").getcolors()) == 2


def test_an_empty_page_and_a_missing_browser_are_errors(tmp_path, monkeypatch):
    program = stand_in(tmp_path, Image.new("RGB", (40, 200), "white"))
    monkeypatch.setattr(shutil, "which", lambda name: program)
    with pytest.raises(RuntimeError, match="drew nothing of .*report.html"):
        screenshot.take(tmp_path / "report.html", tmp_path / "report.png")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="none of chromium"):
        screenshot.take(tmp_path / "report.html", tmp_path / "report.png")
