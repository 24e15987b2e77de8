"""Without vLLM there is nothing here to test."""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def need_vllm() -> None:
    # Importing it here would come before its environment is set.
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed: pip install 'rl-consistency[vllm]'")
