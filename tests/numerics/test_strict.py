import os
import subprocess
import sys
import threading

import pytest

from rl_consistency.numerics.strict import (
    OPS,
    VARIABLE,
    _from_environment,
    current,
    is_canonical,
    strict,
)


@pytest.fixture
def environment(monkeypatch):
    """Sets the variable and lets it be read anew, inside one test."""

    def set_to(text):
        if text is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, text)
        _from_environment.cache_clear()

    yield set_to
    monkeypatch.undo()
    _from_environment.cache_clear()


def stock_ops():
    return {op for op in OPS if not is_canonical(op)}


def test_a_block_switches_all_or_some():
    with strict(False):
        assert stock_ops() == set(OPS)
    with strict(except_={"attention", "linear"}):
        assert stock_ops() == {"attention", "linear"}
    with strict(False, except_=["glu"]):
        assert stock_ops() == set(OPS) - {"glu"}


def test_blocks_nest_and_the_innermost_decides():
    with strict(False):
        with strict(except_={"glu"}) as inner:
            assert stock_ops() == {"glu"}
            assert inner == current()
            with strict():
                assert stock_ops() == set()
            assert stock_ops() == {"glu"}
        assert stock_ops() == set(OPS)


def test_another_thread_keeps_its_own_choice():
    seen = []
    with strict(False):
        thread = threading.Thread(target=lambda: seen.append(is_canonical("linear")))
        thread.start()
        thread.join()
    assert seen == ["linear" not in _from_environment().stock]


@pytest.mark.parametrize("choice", ["no", "false", 0, None])
def test_a_choice_that_is_no_bool_is_refused(choice):
    """Any text would be true."""
    with pytest.raises(TypeError, match="give True or False"), strict(choice):
        pass


def test_unknown_names_are_refused():
    unknown = r"unknown op 'atention', 'mlp'; known: linear, rms_norm"
    with pytest.raises(ValueError, match=unknown), strict(except_={"mlp", "atention"}):
        pass
    a_string = r"except_='attention'; give a set .*\{'attention'\}"
    with pytest.raises(ValueError, match=a_string), strict(except_="attention"):
        pass


@pytest.mark.parametrize(
    "text, expected",
    [
        (None, set()),
        ("1", set()),
        (" 0 ", set(OPS)),
        ("-attention,-linear", {"attention", "linear"}),
        ("-glu , -rotary", {"glu", "rotary"}),
    ],
)
def test_the_variable_chooses_where_no_block_does(text, expected, environment):
    environment(text)
    assert stock_ops() == expected
    with strict():
        assert stock_ops() == set()


@pytest.mark.parametrize("text", ["true", "", "attention", "-attention,linear", "-atention"])
def test_a_mistyped_variable_is_refused(text, environment):
    environment(text)
    with pytest.raises(ValueError, match="allowed: 1, 0, or ops|unknown op 'atention'"):
        is_canonical("linear")


def test_the_variable_reaches_a_new_process():
    code = "from rl_consistency.numerics.strict import current; print(current().as_record())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, VARIABLE: "-attention"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "{'strict': False, 'stock_ops': ['attention']}"
