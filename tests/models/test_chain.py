import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.models.forward import packed_hidden_states
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.digest import first_difference
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


def test_a_token_does_not_depend_on_what_follows(model):
    tokens = sequences(model)[4]
    whole = packed_hidden_states(model, PackedBatch.from_sequences([tokens])).detach()
    for length in (1, 16, 63, 65, 129):
        part = packed_hidden_states(model, PackedBatch.from_sequences([tokens[:length]])).detach()
        assert same_bytes(part[:length], whole[:length])


def test_padded_calls_give_the_bytes_of_single_calls(model):
    tokens = [s for s in sequences(model) if len(s) > 1]
    width = max(map(len, tokens)) + 5
    with torch.no_grad():
        alone = [model(torch.tensor([s])).logits[0] for s in tokens]
        for side in ("left", "right"):
            ids = torch.full((len(tokens), width), 9)
            mask = torch.zeros(len(tokens), width, dtype=torch.int64)
            for i, s in enumerate(tokens):
                start = width - len(s) if side == "left" else 2
                ids[i, start : start + len(s)] = torch.tensor(s)
                mask[i, start : start + len(s)] = 1
            logits = model(input_ids=ids, attention_mask=mask).logits
            assert logits.shape == (*ids.shape, model.config.vocab_size)
            assert not logits[mask == 0].any()
            for row, own, expected in zip(logits, mask.bool(), alone, strict=True):
                assert same_bytes(row[own], expected)
        flat = torch.tensor([[t for s in tokens for t in s]])
        positions = torch.cat([torch.arange(len(s)) for s in tokens])[None]
        packed = model(flat, position_ids=positions).logits[0]
        assert same_bytes(packed, torch.cat(alone))


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-llama"])
def test_the_chain_from_tokens_to_gradients_repeats_itself(preset):
    results = []
    for _ in range(2):
        model = build_preset(preset)
        with patch(model):
            scored = token_logprobs(model, sequences(model)[1:], prompt_lengths=[2] * 5)
            scored.logprobs.sum().backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append(gradients | {"logprobs": scored.logprobs.detach()})
    assert first_difference(*results) is None


def differing_prefixes(model):
    """Prefixes, run as bare rows without filler, whose bytes differ from the whole call's."""
    tokens = torch.tensor(sequences(model)[4])
    with torch.no_grad():
        whole = packed_hidden_states(model, PackedBatch.from_sequences([tokens.tolist()]))
        prefixes = {
            n: model.model.packed_forward(tokens[:n], torch.arange(n), PackedSequences.of([0], [n]))
            for n in (1, 2, 3, 7, 21, 65)
        }
    return [n for n, t in prefixes.items() if not same_bytes(t, whole[:n])]


def test_rows_need_no_filler_around_them(model):
    assert not differing_prefixes(model)


@pytest.mark.parametrize("op", ["linear", "attention"])
def test_a_stock_op_fails_the_same_check(op):
    model = build_preset("tiny-qwen3")
    with patch(model), strict(except_={op}):
        assert differing_prefixes(model)


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
