import pytest

from tests.integrations.vllm import fake_requests, fake_vllm

__all__ = ["fake_requests"]  # whose names the stubs take up


@pytest.fixture(autouse=True, scope="module")
def vllm():
    """The stubs in the place of vLLM."""
    with fake_vllm.installed() as module:
        yield module
