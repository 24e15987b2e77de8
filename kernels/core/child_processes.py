"""Work in copies of this process, for what leaves its results on disk.

A child is a fork: it has all that this process has read, and no lock of an interpreter to share. It
must not use a GPU, whose driver does not survive a fork, so it collects no garbage and ends without
destructors.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator

PATIENCE = 120.0
"""Seconds in which one of the children must finish something. A fork copies locks that other
threads held; a child that needs one waits for ever."""
MOST = 4096
"""Works of one call; their numbers fit into a pipe."""
_SIZE = 4


def finished_in_children(
    work: Callable[[int], object],
    count: int,
    processes: int,
    patience: float = PATIENCE,
) -> Iterator[int]:
    """The numbers below `count` for which a child has returned from `work`, as they finish.

    Numbers that never come are left to the caller: a child ends at its first error, and all end
    when the caller stops asking, when none finishes anything for `patience` seconds (with a
    warning), or where the system allows no process.
    """
    queue, fill = os.pipe()
    finished, report = os.pipe()
    children: list[int] = []
    opened = {queue, fill, finished, report}

    def close(*descriptors: int) -> None:
        for descriptor in opened.intersection(descriptors):
            os.close(descriptor)
            opened.remove(descriptor)

    try:
        for number in range(min(count, MOST)):
            os.write(fill, number.to_bytes(_SIZE, "little"))
        close(fill)
        for _ in range(min(processes, count)):
            try:
                children.append(_child(work, queue, report))
            except OSError:
                break
        close(queue, report)
        while select.select([finished], [], [], patience)[0]:
            if not (number := os.read(finished, _SIZE)):
                return
            yield int.from_bytes(number, "little")
        warnings.warn(
            f"none of {len(children)} child processes has finished anything for {patience:g} s; "
            "they are ended, and their work is done in this process",
            stacklevel=2,
        )
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        close(*opened)


def _child(work: Callable[[int], object], queue: int, report: int) -> int:
    """The id of a new process, which does work from the queue until that is empty."""
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, for `PATIENCE`'s reason.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        gc.disable()
        while number := os.read(queue, _SIZE):
            work(int.from_bytes(number, "little"))
            os.write(report, number)
    finally:
        os._exit(0)
