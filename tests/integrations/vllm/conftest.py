import pytest

from tests.integrations.vllm import fake_vllm


@pytest.fixture(autouse=True, scope="module")
def vllm():
    """The stubs in the place of vLLM."""
    with fake_vllm.installed() as module:
        yield module
