import pytest

from rl_consistency.cli import report


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without plots, which take most of the time of a page."""
    monkeypatch.setattr(report, "_svg", lambda figure, title: "")
