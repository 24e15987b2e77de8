import pytest

from rl_consistency.models.patch import patch
from tests.rollout.engine.engines import engine_of


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    with patch(built := tiny_qwen3()):
        yield built


@pytest.fixture
def engine(model):
    return engine_of(model, num_kv_blocks=64)
