import gc
import sys

import pytest

from rl_consistency.cli.train import uncollected_imports


@pytest.fixture
def frozen(monkeypatch):
    """Whether collections were on, each time that what is in memory was taken out of them."""
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(gc.isenabled()))
    return calls


def test_the_first_imports_are_never_searched_for_garbage(frozen, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError), uncollected_imports():
        assert not gc.isenabled()
        raise ImportError
    assert frozen == [False] and gc.isenabled()


def test_what_is_in_memory_before_the_imports_stays_in_reach(frozen, monkeypatch):
    with uncollected_imports():
        assert gc.isenabled()
    monkeypatch.delitem(sys.modules, "torch")
    gc.disable()
    try:
        with uncollected_imports():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert frozen == []
