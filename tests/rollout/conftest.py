import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture(scope="session")
def tiny_qwen3():
    """Builds a small stock model, the same weights each time; changes to its config by name."""

    def build(**changes):
        sizes = {
            "vocab_size": 60,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Qwen3ForCausalLM(Qwen3Config(**sizes | changes)).eval()

    return build
