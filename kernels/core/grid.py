"""Integers from which the host sizes a launch.

Triton's functions of these names serve kernels too, which costs the host two microseconds a call;
a training step makes a thousand.
"""


def cdiv(x: int, y: int) -> int:
    """x / y rounded up; y is positive."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; n is not negative."""
    return 1 << max(n - 1, 0).bit_length()
