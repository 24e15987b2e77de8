import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.verify.presets import PRESETS, build_preset

LENGTHS = (1, 7, 31, 33, 130, 64)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[(p, d) for p in PRESETS for d in DTYPES], ids=lambda p: f"{p[0]}-{p[1]}")
def model(request):
    model = build_preset(*request.param)
    with patch(model):
        yield model


def sequences(model):
    return probe_tokens(LENGTHS, model.config.vocab_size)


def by_sequence(model, members, *, gap=0):
    """Hidden states and logits of each member of one packed call."""
    tokens = sequences(model)
    batch = PackedBatch.from_sequences([tokens[i] for i in members], gap=gap)
    with torch.no_grad():
        hidden = packed_hidden_states(model, batch)[batch.token_rows]
        logits = model.lm_head(hidden)
    lens = list(batch.layout.query_lens)
    parts = zip(members, hidden.split(lens), logits.split(lens), strict=True)
    return {f"{i} {name}": t for i, *pair in parts for name, t in zip(("hidden", "logits"), pair)}


def differing(one, other):
    return [n for n in one.keys() & other.keys() if not same_bytes(one[n], other[n])]


def test_a_token_does_not_depend_on_its_batch(model):
    whole = by_sequence(model, range(len(LENGTHS)))
    assert not differing(by_sequence(model, range(len(LENGTHS))), whole)
    for i in range(len(LENGTHS)):
        assert not differing(by_sequence(model, [i]), whole)
    for members in ([5, 3, 1, 0, 4, 2], [2, 4], [4, 4, 1]):
        assert not differing(by_sequence(model, members), whole)
    assert not differing(by_sequence(model, [3, 0, 4], gap=2), whole)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen3-moe"])
def test_a_token_of_no_sequence_has_no_part_in_the_gradients(preset):
    """Rows of filler are tokens of the batch: 0 times what is not finite would be NaN."""
    model, tokens = build_preset(preset), list(range(1, 16))
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.nan
    with patch(model):
        token_logprobs(model, [tokens], prompt_lengths=[1]).logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter is not model.get_output_embeddings().weight:
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
