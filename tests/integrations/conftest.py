import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rl_consistency
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from tests.ranks import run_ranks

__all__ = ["run_ranks"]


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A saved tiny Qwen3 with random weights, and a byte tokenizer."""
    path = tmp_path_factory.mktemp("tiny-qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def attach():
    """`rl_consistency.attach`, undone when the test ends."""
    attachments = []

    def attached(trainer, **options):
        attachments.append(rl_consistency.attach(trainer, **options))
        return attachments[-1]

    yield attached
    for attachment in attachments:
        attachment.detach()


@pytest.fixture
def make(directory, tmp_path):
    """Trainers, TRL's GRPOTrainer if no other is named, with options of their own."""

    def made(build=None, **options):
        from tests.integrations.trainers import grpo

        return (build or grpo)(directory, tmp_path, **options)

    return made


@pytest.fixture
def run(make, attach):
    """A trainer that has trained with `attach`, and its attachment."""

    def trained(build=None, *, attached=None, **options):
        trainer = make(build, **options)
        attachment = attach(trainer, **(attached or {}))
        trainer.train()
        return trainer, attachment

    return trained
