"""How a launch of paged decode on sm_90 deals the key blocks of its tiles to programs.

A `Cut` changes no bit, so the rule looks at all sizes. It was read off 14 shapes with up to ten
cuts each on an H100 (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

FEWEST_BLOCKS = 4
"""Tiles of fewer blocks stay whole."""
FILLED = 0.95
"""The part of the multiprocessors that has to have a program, else tiles are divided further."""
LONG_SHARE = 8
"""Blocks of a program from which all tiles shared by two rounds of programs are faster."""
FOLD_BYTES = 256 << 10
"""The most written bytes of a tile that one program should fold: some 10 us."""


@dataclass(frozen=True)
class Cut:
    """The programs of a launch.

    The first `whole` tiles, counted once per KV head, have one program each, which folds in
    registers. The other tiles are divided: the rest of the programs are dealt to them in turn, they
    write every block to memory, and a tile's last one folds. Example: Cut(0, 264) gives the first
    40 of 56 tiles 5 programs each and the others 4.
    """

    whole: int
    programs: int
    """Programs of the launch; at least one for each tile."""

    @classmethod
    def even(cls, tiles: int, programs: int) -> Cut:
        """A cut with `programs` for every tile."""
        return cls(tiles, tiles) if programs == 1 else cls(0, tiles * programs)

    def check(self, tiles: int) -> None:
        """ValueError unless every tile has a program, and a whole one only one."""
        if not 0 <= self.whole <= tiles <= self.programs:
            raise ValueError(f"attention: {self} for {tiles} tiles; each needs a program.")
        if self.whole == tiles < self.programs:
            raise ValueError(f"attention: {self} has more programs than its {tiles} whole tiles.")


def cut_for(
    tiles: int,
    blocks: int,
    written_bytes: int,
    *,
    multiprocessors: int,
    resident: int,
    plain: int,
    exact: bool,
) -> Cut:
    """The cut of `tiles`, counted once per KV head, of `blocks` key blocks each on average.

    `written_bytes` are those of a written block, `resident` the programs that a multiprocessor
    holds. `plain` is the number of programs for each tile that fills the device once, or 1.
    Unless the number of blocks is `exact`, and not just a bound, no tile is divided that `plain`
    leaves whole, but those of a round that would be hardly begun.
    """
    places = multiprocessors * resident
    whole = tiles // places * places
    rest = tiles - whole
    even = Cut.even(tiles, plain)
    filled = FILLED * multiprocessors <= even.programs <= multiprocessors
    if filled or blocks < FEWEST_BLOCKS:
        return even
    if whole:
        hardly_begun = 0 < 2 * rest <= places
        return Cut(whole, whole + min(places, rest * blocks)) if hardly_begun else even
    long = tiles * blocks >= 2 * places * LONG_SHARE and blocks * written_bytes <= FOLD_BYTES
    if exact and long:
        return Cut(0, 2 * places)
    return even if plain == 1 else Cut(0, max(even.programs, min(places, tiles * blocks)))
