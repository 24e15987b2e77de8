import pytest

from rl_consistency.models.patch import patch


@pytest.fixture
def model(tiny_qwen3):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    built = tiny_qwen3(vocab_size=40, max_position_embeddings=300, initializer_range=0.3, **heads)
    with patch(built):
        yield built
