"""Prompts of a group scored once on a GPU: the bytes of sequences scored whole."""

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.presets import build_preset

pytestmark = pytest.mark.gpu


def tokens(seed, count):
    return torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-mistral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shared_prompts_give_the_bytes_of_whole_sequences(name, dtype):
    model = build_preset(name).to("cuda", dtype)
    prompts = [300] * 4 + [130] * 3 + [17, 40]
    first, second = tokens(0, 300), tokens(1, 130)
    sequences = [[*first, *tokens(i + 2, 20 + 90 * i)] for i in range(4)]
    sequences += [[*second, *tokens(i + 9, 200 - 70 * i)] for i in range(3)]
    sequences += [tokens(20, 90), tokens(21, 41)]
    with patch(model), torch.no_grad():
        shared, whole = (
            token_logprobs(model, sequences, prompt_lengths=prompts, share_prompts=share)
            for share in (True, False)
        )
    assert same_bytes(shared.logprobs, whole.logprobs)
    assert same_bytes(shared.entropy, whole.entropy)
