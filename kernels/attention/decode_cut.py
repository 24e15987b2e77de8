"""How a launch of paged decode on sm_90 deals the key blocks of its tiles to programs.

A `Cut` changes no bit, so the rule looks at all sizes. It compares a few cuts by a small model of
the device's memory: programs start in their order as places become free, each reads at its own
rate or at its share of the device's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rl_consistency.kernels.core.grid import cdiv

DEVICE_RATE = 23_000
"""Bytes a us that a multiprocessor reads where all of them read."""
BLOCK_US = 0.8
"""A block's time in one program, with nothing to hold it up, is this and its keys and values..."""
BLOCK_RATE = 36_000
"""... at so many bytes a us, columns of zeros counted."""
DEEP_GAIN = 0.85
"""That time through the deep ring, which tiles with a multiprocessor each take, by the other."""
START_US = 2.0
"""From a program's start to its first block."""
FOLD_US = 5.0
"""From a tile's last written block to its result, without the time of the blocks."""
FOLD_RATE = 28_000
"""Bytes a us of written blocks that a program folds."""
FEWEST_BLOCKS = 8
"""Tiles of fewer blocks are left as they are: dividing them gains less than the fold costs."""
GAIN = 0.95
"""A cut of another form must take at most this part of the plain cut's time."""
MOST_ROUNDS = 4
"""Rounds of programs over which the divided tiles are tried."""


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
    """Of the launch; at least one for each tile."""

    @classmethod
    def even(cls, tiles: int, programs: int) -> Cut:
        """`programs` for every tile."""
        return cls(tiles, tiles) if programs == 1 else cls(0, tiles * programs)

    def check(self, tiles: int) -> None:
        """ValueError unless every tile has a program, and a whole one only one."""
        if not 0 <= self.whole <= tiles <= self.programs:
            raise ValueError(f"attention: {self} for {tiles} tiles; each needs a program.")
        if self.whole == tiles < self.programs:
            raise ValueError(f"attention: {self} has more programs than its {tiles} whole tiles.")


@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """A launch as the rule sees it. All tiles count as long as the longest."""

    tiles: int  # times KV heads
    blocks: int  # of a tile
    stored: int  # rows of a tile that its written blocks have
    keys: int  # of a block
    head_dim: int
    dim: int  # as the kernel holds it
    multiprocessors: int
    resident: int  # programs that a multiprocessor holds

    @property
    def places(self) -> int:
        return self.multiprocessors * self.resident

    @property
    def block_bytes(self) -> int:
        """Of keys and values, 16 bits each."""
        return 4 * self.keys * self.head_dim

    @property
    def written_bytes(self) -> int:
        """Of a written block's m, lanes and acc."""
        return 4 * self.stored * (self.dim + 9)

    @property
    def block_us(self) -> float:
        return BLOCK_US + 4 * self.keys * self.dim / BLOCK_RATE


@lru_cache(maxsize=1024)
def cut_for(work: DecodeWork, plain: int, most_written: int) -> Cut:
    """The cut of least time in the model; `plain` programs for every tile if none is much faster.

    A cut whose written blocks exceed `most_written` bytes is not tried.
    """
    best = Cut.even(work.tiles, plain)
    if work.blocks < FEWEST_BLOCKS:
        return best
    least = GAIN * time_of(best, work)
    for cut in _candidates(work):
        if (work.tiles - cut.whole) * work.blocks * work.written_bytes > most_written:
            continue
        time = time_of(cut, work)
        if time < least:
            best, least = cut, time
    return best


def _candidates(work: DecodeWork) -> list[Cut]:
    """Cuts whose programs fill whole rounds, evenly dealt and not."""
    places, rounds = work.places, work.tiles // work.places
    found = [Cut.even(work.tiles, 1)]
    filled = [work.multiprocessors, *(places * n for n in range(1, MOST_ROUNDS + 1))]
    for whole in sorted({0, max(rounds - 1, 0) * places, rounds * places} - {work.tiles}):
        divided = work.tiles - whole
        for programs in (min(n, divided * work.blocks) for n in filled):
            each = programs // divided
            if each > 1:
                found += [Cut(whole, whole + divided * each), Cut(whole, whole + programs)]
    return found


def time_of(cut: Cut, work: DecodeWork) -> float:
    """Microseconds that a launch takes in the model."""
    divided, dealt = work.tiles - cut.whole, cut.programs - cut.whole
    most = work.block_bytes / work.block_us  # bytes a us of one program
    start = int(START_US * most)
    whole_bytes = start + work.blocks * work.block_bytes
    device = DEVICE_RATE * work.multiprocessors
    # All rounds of whole tiles but the last ones are alike.
    rounds = max(cut.whole // work.places - 2, 0)
    time = rounds * whole_bytes / min(most, device / work.places)
    queue = [(cut.whole - rounds * work.places, whole_bytes)]
    if divided == 0:
        deep = work.tiles <= work.multiprocessors
        return time + _time_of_programs(
            queue, work.places, device, most / DEEP_GAIN if deep else most
        )
    parts, more = divmod(dealt, divided)
    each = work.block_bytes + work.written_bytes
    long, short = (start + cdiv(work.blocks, n) * each for n in (parts, parts + 1))
    if dealt <= work.places:
        queue += [(more * (parts + 1), short), ((divided - more) * parts, long)]
    else:
        queue += [(more, short), (divided - more, long)] * parts + [(more, short)]
    # Programs that all run at once fold a slice of the columns each.
    sliced = parts if cut.whole == 0 and dealt <= work.places else 1
    fold = FOLD_US + work.blocks * work.written_bytes / (FOLD_RATE * sliced)
    return time + _time_of_programs(queue, work.places, device, most) + fold


def _time_of_programs(queue: list[tuple[int, int]], places: int, device: int, most: float) -> float:
    """Microseconds of (programs, bytes of each) that start in their order, up to `places` at once;
    the device reads `device` bytes a us and one program `most`."""
    time, free, running = 0.0, places, []
    waiting = [group for group in reversed(queue) if group[0]]
    while waiting or running:
        while waiting and free:
            count, size = waiting.pop()
            started = min(count, free)
            running.append((started, float(size)))
            free -= started
            if count > started:
                waiting.append((count - started, size))
        step = min(size for _, size in running)
        time += step / min(most, device / (places - free))
        free += sum(count for count, size in running if size == step)
        running = [(count, size - step) for count, size in running if size > step]
    return time
