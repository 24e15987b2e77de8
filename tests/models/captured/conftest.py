import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset


@pytest.fixture(params=[("tiny-qwen3", torch.bfloat16), ("tiny-qwen2", torch.float32)], ids=str)
def model(request):
    model = build_preset(*request.param)
    with patch(model, grad_dtype=torch.float32):
        yield model
