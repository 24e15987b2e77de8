"""Small models of any configuration, and tokens for them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency.cases.probe import probe_tokens


def tiny(model_type="llama", **options):
    shape = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    config = AutoConfig.for_model(model_type, **(shape | options))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(model, length=130):
    return torch.tensor(probe_tokens([length], model.config.vocab_size))
