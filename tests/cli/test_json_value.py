"""Whether a value read from JSON is what a type says."""

from collections.abc import Mapping

import pytest

from rl_consistency.cli.json_value import require_type


@pytest.mark.parametrize(
    ("kind", "fitting", "others"),
    [
        (str, ["", "x"], [None, 1, ["x"]]),
        (float, [1, 1.5, float("inf")], [True, "1", None]),
        (int, [0], [1.0, False, "0"]),
        (bool, [True], [1, None]),
        (float | None, [None, 2], ["x", False]),
        (Mapping[str, int | str], [{}, {"a": 1, "b": "x"}], [[], None, {"a": 1.5}, {"a": None}]),
        (list, [[], [1]], [{}, "", None]),
    ],
)
def test_values_are_told_by_their_type(kind, fitting, others):
    for value in fitting:
        require_type("figures", value, kind)
    for value in others:
        with pytest.raises(TypeError, match="figures is"):
            require_type("figures", value, kind)
