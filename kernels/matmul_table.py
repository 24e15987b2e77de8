"""Measured winners of the matmul order's schedules; written by `benchmarks/tune_matmul.py`.

Rows: (layout, rows, n, k, schedule, whether the vendor library was faster still).
"""

MEASURED: tuple[tuple[str, int, int, int, str, bool], ...] = ()
