"""Takes docs/img/report.png: the report of a run, rendered by a real browser.

Usage: screenshot.py RUN_DIR [PICTURE]. Needs Chromium (Debian: `apt-get install chromium`); CI does
not run it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from rl_consistency.cli.report import render

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, TALLEST = 1000, 4260
"""Pixels of the window: the figures, and not the tables below. What is empty is cut off."""
COLORS = 64


def take(page: Path, picture: Path) -> None:
    """Render a page into a small PNG. FileNotFoundError without a browser, RuntimeError where
    nothing was drawn."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"none of {', '.join(BROWSERS)} is here: install one")
    with tempfile.TemporaryDirectory(prefix="screenshot_") as folder:
        raw = Path(folder, "raw.png")
        command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        command += [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{TALLEST}"]
        command += [f"--screenshot={raw}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        drawn = Image.open(raw).convert("RGB")
    empty = Image.new("RGB", drawn.size, drawn.getpixel((0, drawn.height - 1)))
    box = ImageChops.difference(drawn, empty).getbbox()
    if box is None:
        raise RuntimeError(f"the browser drew nothing of {page}")
    cut = drawn.crop((0, 0, drawn.width, min(box[3] + 24, drawn.height)))
    cut.quantize(COLORS, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    run_dir, *target = sys.argv[1:]
    take(render(run_dir), Path(*target) if target else PICTURE)
