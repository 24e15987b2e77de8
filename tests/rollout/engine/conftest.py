from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.rollout.engine import RolloutEngine
from tests.rollout.engine.engines import engine_of


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Qwen3ForCausalLM]) -> Iterator[Qwen3ForCausalLM]:
    with patch(built := tiny_qwen3()):
        yield built


@pytest.fixture
def engine(model: Any) -> RolloutEngine:
    return engine_of(model, num_kv_blocks=64)
