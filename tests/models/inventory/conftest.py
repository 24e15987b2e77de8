import pytest

from rl_consistency.verify.presets import build_preset


@pytest.fixture
def model():
    return build_preset("tiny-qwen3")
