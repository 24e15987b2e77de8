"""Rows of the benches as tests want them, and one bar over them."""

from benchmarks.bars import BARS
from benchmarks.results import Results
from benchmarks.rows import Row


def row(suite="matmul_forward", ratio=1.0, **fields):
    fields = {"work": suite, "shape": {"tokens": 8192, "width": 4096}, "dtype": "bfloat16"} | fields
    times = {"ours_us": 10.0, "stock_us": 10.0 * ratio, "ratio": ratio} if ratio else {}
    return Row(**{"suite": suite} | times | fields)


def bar(name, rows, **complete):
    suites = {suite: True for suite in BARS[name].suites} | complete
    records = {suite: {"complete": whole} for suite, whole in suites.items()}
    return Results(tuple(rows), {"suites": records}).bars[name]
