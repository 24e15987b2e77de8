"""How decode deals tiles to programs: the rule, its model, and how the kernel reads a cut."""

import random
from types import SimpleNamespace

import pytest

from rl_consistency.kernels.attention.decode_cut import Cut, DecodeWork, cut_for, time_of
from rl_consistency.kernels.attention.hopper import decode
from rl_consistency.kernels.attention.schedules import SPLIT_BYTES

FORMS = [(7, Cut(7, 7)), (7, Cut(0, 21)), (7, Cut(0, 17)), (7, Cut(0, 7)), (7, Cut(4, 11))]
FORMS += [(7, Cut(4, 13)), (7, Cut(6, 19)), (1, Cut(0, 5)), (330, Cut(264, 528)), (56, Cut(0, 132))]


def work(tiles, blocks, stored=4, head_dim=128, resident=2):
    return DecodeWork(
        tiles=tiles,
        blocks=blocks,
        stored=stored,
        keys=128,
        head_dim=head_dim,
        dim=64 if head_dim == 64 else 128,
        multiprocessors=132,
        resident=resident,
    )


@pytest.mark.parametrize("tiles, cut", FORMS, ids=str)
def test_the_kernel_gives_every_tile_all_of_its_programs_once(tiles, cut, monkeypatch):
    """Its own lines run, with numbers in place of tensors."""
    cut.check(tiles)
    met = {}
    for program in range(cut.programs):
        device = SimpleNamespace(
            program_id=lambda axis, program=program: program,
            num_programs=lambda axis: cut.programs,
            where=lambda condition, yes, no: yes if condition else no,
        )
        monkeypatch.setattr(decode, "gl", device)
        forms = cut.whole > 0, cut.whole < tiles
        tile, part, parts = decode.place_of.fn(cut.whole, tiles - cut.whole, *forms)
        met.setdefault(tile, []).append((part, parts))
        if program < cut.whole:
            assert (tile, part, parts) == (program, 0, 1)
    assert sorted(met) == list(range(tiles))
    counts = [len(met[tile]) for tile in range(tiles)]
    for places in met.values():
        assert sorted(places) == [(part, len(places)) for part in range(len(places))]
    divided = counts[cut.whole :]
    assert divided == sorted(divided, reverse=True) and max(divided, default=0) <= 1 + min(
        divided, default=0
    )


@pytest.mark.parametrize(
    "tiles, cut", [(7, Cut(8, 9)), (7, Cut(0, 6)), (7, Cut(7, 8)), (7, Cut(-1, 9))]
)
def test_a_cut_that_leaves_a_tile_out_is_refused(tiles, cut):
    with pytest.raises(ValueError, match="attention: Cut"):
        cut.check(tiles)


def test_every_cut_of_the_rule_is_one_and_keeps_to_the_memory():
    draw = random.Random(0)
    for _ in range(2000):
        tiles, blocks = int(2 ** draw.uniform(0, 14)), int(2 ** draw.uniform(0, 9))
        job = work(tiles, blocks, draw.choice([1, 4, 16]), draw.choice([64, 80, 128]))
        cut = cut_for(job, 1, SPLIT_BYTES)
        cut.check(tiles)
        divided = tiles - cut.whole
        assert divided * blocks * job.written_bytes <= SPLIT_BYTES
        assert cut.programs - cut.whole <= divided * blocks
        assert time_of(cut, job) <= time_of(Cut.even(tiles, 1), job)


def test_a_round_that_is_hardly_begun_is_divided():
    assert cut_for(work(330, 149, 1, 80), 1, SPLIT_BYTES) == Cut(264, 528)
    cut = cut_for(work(576, 64), 1, SPLIT_BYTES)
    assert cut.whole in (264, 528) and cut.programs > 576


def test_few_tiles_fill_the_device_with_more_programs_for_some():
    plain = Cut.even(56, 2)
    cut = cut_for(work(56, 63), 2, SPLIT_BYTES)
    assert cut.whole == 0 and plain.programs < cut.programs <= 264


def test_short_tiles_and_full_rounds_are_left_as_they_are():
    assert cut_for(work(330, 4), 1, SPLIT_BYTES) == Cut.even(330, 1)
    assert cut_for(work(40, 4), 3, SPLIT_BYTES) == Cut.even(40, 3)
    assert cut_for(work(264, 100), 1, SPLIT_BYTES) == Cut.even(264, 1)
    assert cut_for(work(14450, 10), 1, SPLIT_BYTES) == Cut.even(14450, 1)


def test_the_model_counts_rounds_and_what_the_device_reads():
    job = work(264, 100)
    one, two = (time_of(Cut.even(n, 1), work(n, 100)) for n in (264, 528))
    assert two == pytest.approx(2 * one)
    assert time_of(Cut.even(2640, 1), work(2640, 100)) == pytest.approx(10 * one)
    fewest = 264 * 100 * job.block_bytes / (132 * 23_000)
    assert fewest < one < 1.1 * fewest
