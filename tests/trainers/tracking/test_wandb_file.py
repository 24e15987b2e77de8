import struct

from tests.trainers.tracking.wandb_file import BLOCK, HEADER, LAST, WHOLE, parts

FIRST, MIDDLE = 2, 3


def log(records):
    """`records` as LevelDB writes them: cut at the ends of blocks, which are padded."""
    data = bytes(HEADER)
    for record in records:
        rest, begun = record, False
        while True:
            if (room := BLOCK - len(data) % BLOCK) < HEADER:
                data += bytes(room)
                room = BLOCK
            now, rest = rest[: room - HEADER], rest[room - HEADER :]
            kind = (MIDDLE if begun else FIRST) if rest else (LAST if begun else WHOLE)
            data += struct.pack("<IHB", 0, len(now), kind) + now
            begun = True
            if not rest:
                break
    return data


def test_a_file_that_is_still_written_has_no_torn_record():
    records = [b"a" * 100, b"b" * (BLOCK - 130), b"c" * (2 * BLOCK), b"d" * 3]
    data = log(records)
    assert list(parts(data)) == records
    for end in (*range(0, 300), *range(BLOCK - 50, BLOCK + 50), *range(len(data) - 200, len(data))):
        found = list(parts(data[:end]))
        assert found == records[: len(found)]
