import pytest
import torch

from rl_consistency.models.packing import ROW_ALIGNMENT, PackedBatch, lay_out, pack_padded

SEQUENCES = [[5, 6], [7], list(range(20, 57)), list(range(100, 116))]


def padded(side, extra=0):
    width = max(map(len, SEQUENCES)) + extra
    ids = torch.full((len(SEQUENCES), width), 9)
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(SEQUENCES):
        start = width - len(sequence) if side == "left" else 0
        ids[i, start : start + len(sequence)] = torch.tensor(sequence)
        mask[i, start : start + len(sequence)] = 1
    return ids, mask


def contents(batch):
    return (
        batch.input_ids.tolist(),
        batch.position_ids.tolist(),
        batch.token_rows.tolist(),
        list(batch.layout.query_starts),
        list(batch.layout.query_lens),
    )


def test_nested_lists_are_refused():
    with pytest.raises(TypeError, match="must be integers, got lists of int64"):
        PackedBatch.from_sequences([[[1, 2], [3, 4]]])


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'right-padded'; allowed: packed, packed_with_gaps"):
        lay_out([[1, 2]], "right-padded")


def test_every_sequence_starts_on_the_alignment():
    batch = PackedBatch.from_sequences(SEQUENCES)
    assert batch.layout.query_starts == [0, 16, 32, 80]
    assert batch.layout.query_lens == [2, 1, 37, 16]
    assert len(batch.input_ids) == 96 and len(batch.input_ids) % ROW_ALIGNMENT == 0
    for start, sequence in zip(batch.layout.query_starts, SEQUENCES, strict=True):
        rows = slice(start, start + len(sequence))
        assert batch.input_ids[rows].tolist() == sequence
        assert batch.position_ids[rows].tolist() == list(range(len(sequence)))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padded_batches_become_the_same_rows(side, extra, dtype):
    ids, mask = padded(side, extra)
    batch = pack_padded(ids, mask.to(dtype))
    assert contents(batch.packed) == contents(PackedBatch.from_sequences(SEQUENCES))


def test_position_resets_separate_packed_sequences():
    flat = [token for sequence in SEQUENCES for token in sequence]
    positions = [i for sequence in SEQUENCES for i in range(len(sequence))]
    batch = pack_padded(torch.tensor([flat]), position_ids=torch.tensor([positions]))
    assert contents(batch.packed) == contents(PackedBatch.from_sequences(SEQUENCES))
    shared = pack_padded(torch.tensor([[5, 6], [7, 8]]), position_ids=torch.arange(2))
    assert contents(shared.packed) == contents(PackedBatch.from_sequences([[5, 6], [7, 8]]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpacking_puts_rows_back_and_zeros_at_padding(side):
    ids, mask = padded(side, 3)
    batch = pack_padded(ids, mask)
    rows = torch.arange(1.0, len(batch.packed.input_ids) + 1)[:, None].expand(-1, 3)
    unpacked = batch.unpack(rows)
    assert unpacked.shape == (*ids.shape, 3)
    assert torch.equal(unpacked[mask.bool()], rows[batch.packed.token_rows])
    assert not unpacked[~mask.bool()].any()


def test_the_ids_of_lists_are_checked_on_the_host():
    """A meta tensor has no values: to read it is an error, as on a GPU it is a wait."""
    batch = PackedBatch.from_sequences(SEQUENCES, "meta")
    batch.require_vocabulary(116)
    with pytest.raises(ValueError, match=r"token ids span \[5, 115\], .*vocabulary has 115"):
        batch.require_vocabulary(115)


def test_ids_that_came_as_a_tensor_are_read_on_its_device():
    """Negative control."""
    with pytest.raises(RuntimeError, match="meta"):
        PackedBatch.from_tokens(torch.zeros(3, dtype=torch.int64, device="meta"), [2, 1])


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_nothing_to_pack_is_refused(sequences):
    with pytest.raises(ValueError, match=r"cannot pack .*none may be empty"):
        PackedBatch.from_sequences(sequences)


IDS = torch.ones(2, 3, dtype=torch.int64)
COUNT, SHAPE = "position_ids must count", r"position_ids \(.*\) must have the shape of"
BAD = [
    ({"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, "row 1 has a hole or no token"),
    ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "row 1 has a hole or no token"),
    ({"attention_mask": torch.ones(2, 2)}, r"\(2, 2\), input_ids \(2, 3\)"),
    *(
        ({"input_ids": IDS[:1], "position_ids": torch.tensor([positions])}, COUNT)
        for positions in ([1, 2, 3], [0, 1, 3], [0, 0, 2], [0, 2, 0], [5, 0, 1])
    ),
    *(
        ({"position_ids": torch.zeros(shape, dtype=torch.int64)}, SHAPE)
        for shape in ((2,), (1, 2), (2, 3, 1), (3, 3))
    ),
    ({"input_ids": [[1, 2]]}, "input_ids is a list"),
    ({"attention_mask": {"full_attention": None}}, "attention_mask is a dict"),
    ({"position_ids": [0, 1, 2]}, "position_ids is a list"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_batches_are_refused_by_name(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pack_padded(**{"input_ids": IDS, **arguments})
