"""Hidden states of some rows: the last layer computes these alone, and moves no byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_consistency.models import decoder
from rl_consistency.models.modules import CanonicalMLP
from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset


@pytest.fixture
def model() -> Iterator[Any]:
    with patch(built := build_preset("tiny-qwen3")):
        yield built


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-olmoe"])
def test_hidden_states_of_some_rows_are_those_among_all(name: str) -> None:
    with patch(model := build_preset(name)), torch.no_grad():
        batch = PackedBatch.from_sequences([[5, 6, 7, 8, 9], [3] * 20], "cpu")
        call = batch.input_ids, batch.position_ids, batch.layout
        everything = model.model.packed_forward(*call)
        for rows in ([0], [16, 3, 3, 35], []):
            wanted = torch.tensor(rows, dtype=torch.int64)
            found = model.model.packed_forward(*call, wanted)
            assert found.numpy().tobytes() == everything[wanted].numpy().tobytes()


@pytest.mark.parametrize("ahead", [True, False])
def test_kernels_of_all_rows_are_compiled_ahead(
    model: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """That pass runs one layer of each kind, which must not be the one that computes few rows."""
    monkeypatch.setattr(decoder, "compiles_only", lambda: ahead)
    seen: list[int] = []
    forward = CanonicalMLP.forward
    monkeypatch.setattr(
        CanonicalMLP, "forward", lambda mlp, x: (seen.append(x.shape[1]), forward(mlp, x))[1]
    )
    batch = PackedBatch.from_sequences([[5, 6, 7, 8, 9], [3] * 20], "cpu")
    wanted = torch.tensor([0, 30])
    with torch.no_grad():
        found = model.model.packed_forward(
            batch.input_ids, batch.position_ids, batch.layout, wanted
        )
    assert len(found) == 2
    assert set(seen) == ({len(batch.input_ids)} if ahead else {len(batch.input_ids), 2})


@pytest.mark.parametrize("part", ["self_attn", "self_attn.o_proj", "mlp.down_proj", "norm"])
def test_hooks_behind_the_last_attention_see_all_rows(model: Any, part: str) -> None:
    seen: list[int] = []
    owner = model.model if part == "norm" else model.model.layers[-1]
    handle = owner.get_submodule(part).register_forward_hook(
        lambda _, __, out: seen.append((out[0] if isinstance(out, tuple) else out).shape[1])
    )
    batch = PackedBatch.from_sequences([[5, 6, 7, 8, 9], [3] * 20], "cpu")
    wanted = torch.tensor([0, 30])
    with torch.no_grad():
        call = batch.input_ids, batch.position_ids, batch.layout
        found = model.model.packed_forward(*call, wanted)
        handle.remove()
        assert found.equal(model.model.packed_forward(*call, wanted))
    assert seen == [len(batch.input_ids)]
