import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset


@pytest.fixture(
    params=[
        pytest.param(("tiny-qwen3", torch.bfloat16), marks=pytest.mark.thorough),
        ("tiny-qwen2", torch.float32),
    ],
    ids=str,
)
def model(request):
    model = build_preset(*request.param)
    with patch(model, grad_dtype=torch.float32):
        yield model
