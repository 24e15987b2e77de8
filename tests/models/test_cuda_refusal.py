"""Until an op has a GPU schedule of its order, a GPU tensor is refused, not approximated."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_consistency.models.patch import patch
from rl_consistency.models.token_logprobs import token_logprobs
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.numerics.strict import strict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **sizes, **heads)).cuda()


def test_a_canonical_op_names_itself_and_the_device(model):
    with patch(model), pytest.raises(ValueError, match=r"embedding: no schedule .* cuda:0"):
        token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])


def test_the_stock_path_runs_on_the_gpu_with_finite_gradients(model):
    with patch(model), strict(False):
        token_logprobs(model, [[1, 2, 3], [4, 5]], prompt_lengths=[1, 1]).logprobs.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_fingerprint_names_the_gpu():
    difference = fingerprint("cuda").difference(fingerprint("cpu"))
    assert any(torch.cuda.get_device_name() in line for line in difference)
