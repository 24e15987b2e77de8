"""Hidden states of some rows: the last layer computes these alone, and moves no byte."""

import pytest
import torch

from rl_consistency.models import decoder
from rl_consistency.models.modules import CanonicalMLP
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset


def call_of():
    batch = PackedBatch.from_sequences([[5, 6, 7, 8, 9], [3] * 20])
    return batch.input_ids, batch.position_ids, batch.layout


@pytest.fixture
def model():
    with patch(built := build_preset("tiny-qwen3")):
        yield built


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-olmoe"])
def test_hidden_states_of_some_rows_are_those_among_all(name):
    with patch(model := build_preset(name)), torch.no_grad():
        call = call_of()
        everything = model.model.packed_forward(*call)
        for rows in ([0], [16, 3, 3, 35], []):
            wanted = torch.tensor(rows, dtype=torch.int64)
            found = model.model.packed_forward(*call, wanted)
            assert found.numpy().tobytes() == everything[wanted].numpy().tobytes()


@pytest.mark.parametrize("ahead", [True, False])
def test_kernels_of_all_rows_are_compiled_ahead(model, monkeypatch, ahead):
    """That pass runs one layer of each kind, which must not be the one that computes few rows."""
    monkeypatch.setattr(decoder, "compiles_only", lambda: ahead)
    seen = []
    forward = CanonicalMLP.forward
    monkeypatch.setattr(
        CanonicalMLP, "forward", lambda mlp, x: (seen.append(x.shape[1]), forward(mlp, x))[1]
    )
    with torch.no_grad():
        found = model.model.packed_forward(*call_of(), torch.tensor([0, 30]))
    assert len(found) == 2
    assert set(seen) == ({48} if ahead else {48, 2})


@pytest.mark.parametrize("part", ["self_attn", "self_attn.o_proj", "mlp.down_proj", "norm"])
def test_hooks_behind_the_last_attention_see_all_rows(model, part):
    seen = []
    owner = model.model if part == "norm" else model.model.layers[-1]
    handle = owner.get_submodule(part).register_forward_hook(
        lambda _, __, out: seen.append((out[0] if isinstance(out, tuple) else out).shape[1])
    )
    call = *call_of(), torch.tensor([0, 30])
    with torch.no_grad():
        found = model.model.packed_forward(*call)
        handle.remove()
        assert found.equal(model.model.packed_forward(*call))
    assert seen == [48]
