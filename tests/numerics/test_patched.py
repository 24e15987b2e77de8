from types import SimpleNamespace

import pytest

from rl_consistency.numerics.patched import replaced


class Base:
    inherited = 1

    @staticmethod
    def static():
        return "static"

    @property
    def read_only(self):
        return "property"


class Derived(Base):
    own = 2


@pytest.mark.parametrize("owner", [Derived, Derived()], ids=["class", "object"])
@pytest.mark.parametrize("name", ["own", "inherited", "read_only", "missing"])
def test_what_the_owner_itself_held_comes_back_after_an_error(owner, name):
    before = dict(vars(owner))
    with pytest.raises(ZeroDivisionError), replaced(owner, name, 3):
        assert vars(owner)[name] == 3
        1 / 0  # noqa: B018
    assert dict(vars(owner)) == before


def test_a_static_method_is_one_again():
    with replaced(Base, "static", staticmethod(lambda: "other")):
        assert Base().static() == "other"
    assert Base().static() == "static"


def test_blocks_nest_and_a_value_may_stay():
    owner = SimpleNamespace(a=0)
    with replaced(owner, "a", 1), replaced(owner, "a", 2):
        assert owner.a == 2
    assert owner.a == 0
    with replaced(owner, "a", 1, unless=lambda: True):
        pass
    assert owner.a == 1
