"""How decode deals tiles to programs: the rule, and how the kernel reads a cut."""

import random
from types import SimpleNamespace

import pytest

from rl_consistency.kernels.attention.hopper import decode
from rl_consistency.kernels.attention.schedules import Cut, cut_for

FORMS = [(7, Cut(7, 7)), (7, Cut(0, 21)), (7, Cut(0, 17)), (7, Cut(0, 7)), (7, Cut(4, 11))]
FORMS += [(7, Cut(4, 13)), (7, Cut(6, 19)), (1, Cut(0, 5)), (330, Cut(264, 528)), (56, Cut(0, 132))]


def chosen(tiles, blocks, plain=1, stored=1, dim=128, exact=True):
    return cut_for(
        tiles,
        blocks,
        4 * stored * (dim + 9),
        multiprocessors=132,
        resident=3 if dim == 64 else 2,
        plain=plain,
        exact=exact,
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


def test_every_cut_of_the_rule_is_one():
    draw = random.Random(0)
    for _ in range(3000):
        tiles, blocks = int(2 ** draw.uniform(0, 14)), int(2 ** draw.uniform(0, 9))
        plain = max(1, min(blocks, 132 // tiles))
        sizes = draw.choice([1, 4, 16]), draw.choice([64, 128, 256]), draw.random() < 0.5
        cut = chosen(tiles, blocks, plain, *sizes)
        cut.check(tiles)
        divided = tiles - cut.whole
        assert cut.programs - cut.whole <= max(divided * blocks, plain * divided)


@pytest.mark.parametrize(
    "tiles, blocks, plain, stored, dim, cut",
    [
        (330, 149, 1, 1, 128, Cut(264, 528)),
        (576, 6, 1, 2, 128, Cut(528, 792)),
        (850, 10, 1, 1, 128, Cut(792, 1056)),
        (920, 64, 1, 2, 64, Cut(792, 1188)),
        (56, 140, 2, 1, 128, Cut(0, 528)),
        (152, 47, 1, 2, 128, Cut(0, 528)),
        (152, 43, 1, 2, 64, Cut(0, 792)),
        (207, 32, 1, 1, 128, Cut(0, 528)),
        (48, 24, 2, 8, 64, Cut(0, 396)),
        (48, 24, 2, 8, 128, Cut(0, 264)),
        (20, 225, 6, 8, 256, Cut(0, 264)),
        (200, 12, 1, 8, 64, Cut(200, 200)),
        (200, 12, 1, 8, 128, Cut(200, 200)),
        (121, 8, 1, 8, 128, Cut(121, 121)),
    ],
)
def test_the_rule_takes_what_was_fastest_or_nearly_so_on_an_h100(
    tiles, blocks, plain, stored, dim, cut
):
    """docs/log.md has the times."""
    assert chosen(tiles, blocks, plain, stored, dim) == cut


def test_full_rounds_nearly_full_ones_and_short_tiles_are_left_as_they_are():
    for tiles in (128, 264, 410, 528):
        assert chosen(tiles, 100) == Cut.even(tiles, 1)
    assert chosen(16, 100, plain=8) == Cut.even(16, 8)
    assert chosen(330, 3) == Cut.even(330, 1)
    assert chosen(2, 3, plain=3) == Cut.even(2, 3)


def test_tiles_whose_lengths_are_bounds_are_divided_only_where_the_device_would_be_idle():
    assert chosen(152, 256, exact=False) == Cut.even(152, 1)
    assert chosen(56, 256, plain=2, exact=False) == Cut(0, 264)
    assert chosen(330, 256, exact=False) == Cut(264, 528)
