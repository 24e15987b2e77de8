"""Reads the file of an offline wandb run: a LevelDB log of protocol buffers."""

import struct
import time

BLOCK = 1 << 15
HEADER = 7
"""Bytes before the first record; a part of a record has as many: checksum, length, kind."""
WHOLE, LAST = 1, 4


def parts(data):
    """The records of `data` that are there to their end: the writer may be in the middle of one."""
    place, part = HEADER, b""
    while place + HEADER <= len(data):
        if (room := BLOCK - place % BLOCK) < HEADER:
            place += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += HEADER
        if place + length > len(data):
            return
        part += data[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield part
            part = b""


def records(directory, *, seconds=20.0):
    """The records of the run below `directory`, once its end has been written."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in directory.glob("wandb/offline-*/*.wandb"):
            found = [Record.FromString(part) for part in parts(path.read_bytes())]
            if any(record.WhichOneof("record_type") == "exit" for record in found):
                return found
        time.sleep(0.05)
    raise TimeoutError(f"no ended run in {directory}")
