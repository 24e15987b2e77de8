"""The kept times at random shapes, and the arithmetic by which choices are judged."""

import json

from benchmarks.tune.random_times import (
    FILE,
    Timed,
    timed_folds,
    timed_products,
)


def test_the_kept_times_are_small_and_whole():
    assert FILE.stat().st_size < 60_000
    products, folds = timed_products(), timed_folds()
    assert len({p.shape for p in products}) == len(products) == 150
    assert len({f.shape for f in folds}) == len(folds) == 60
    for timed in (*products, *folds):
        assert len(timed.us) >= 7 and min(timed.best_us, timed.library_us) > 1.0


def test_about_half_of_the_shapes_is_fitted_in_every_band():
    for low, high in ((1, 16), (17, 128), (129, 1024), (1025, 16384)):
        fitted = [t.fitted for t in timed_products() if low <= t.shape[1] <= high]
        assert 0.3 < sum(fitted) / len(fitted) < 0.7
    fitted = [t.fitted for t in timed_folds()]
    assert 0.4 < sum(fitted) / len(fitted) < 0.6


def test_a_schedule_that_was_not_timed_is_left_out(tmp_path):
    file = tmp_path / "times.json"
    found = {"schedules": ["a", "b"], "products": [["nt", 1, 2, 3, 7.0, [None, 5.0]]]}
    file.write_text(json.dumps(found), encoding="utf-8")
    (timed,) = timed_products(file)
    assert timed == Timed(shape=("nt", 1, 2, 3), library_us=7.0, us={"b": 5.0})
    assert timed.best_us == 5.0
