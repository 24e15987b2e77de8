"""Without vLLM there is nothing here to test; with it, tests share an engine of a process."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def need_vllm() -> None:
    # Importing it here would come before its environment is set.
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install 'rl-consistency[vllm]'")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--dist loadgroup` gives the tests of one engine to one process."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            spec = getattr(item, "callspec", None)
            engine = spec.params.get("run", "") if spec else ""
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {engine}"))
