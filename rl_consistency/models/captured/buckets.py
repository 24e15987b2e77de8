"""The numbers of rows that calls are captured for."""

FEWEST_ROWS, FINE_ROWS = 16, 1024
"""Buckets are multiples of the first; from the second on there are eight to a doubling, below two,
since there the time is that of reading the weights."""

OPERATIONS_PER_SECOND = 6e14
"""What a large GPU computes in a second. Where it takes longer for a call than the host does, a
graph gains nothing."""


def bucket_of(rows: int) -> int:
    """The number of rows that a call of `rows` is padded to."""
    octave = max(rows - 1, 1).bit_length()
    step = 1 << (octave - 4) if rows > FINE_ROWS else max(1 << max(octave - 2, 0), FEWEST_ROWS)
    return -(-rows // step) * step
