"""Our own fold and the certified library, raced on a GPU."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.core.cache.identity import CACHE_VARIABLE
from rl_consistency.kernels.core.race import time_ratio
from rl_consistency.kernels.gradient_fold.op import fold_outer
from rl_consistency.kernels.matmul import cublaslt
from rl_consistency.numerics.settings import numeric_settings
from rl_consistency.parity.bytes import same_bytes

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("wins", ["ours", "library"])
def test_a_gradient_has_the_same_bytes_whoever_wins_the_race(monkeypatch, wins, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cublaslt, "_by_device", {})
    ratios = []

    def race(own, library):
        ratios.append(time_ratio(own, library))
        return 0.5 if wins == "ours" else 2.0

    monkeypatch.setattr(cublaslt, "time_ratio", race)
    dy, x = (
        probe((4096, columns), torch.bfloat16, seed=seed).to(DEVICE)
        for seed, columns in enumerate((512, 896))
    )
    out = torch.full((512, 896), float("nan"), device=DEVICE)
    with numeric_settings():
        for _ in range(3):
            fold_outer(out, dy, x, fresh=True)
            assert same_bytes(out, cublaslt.canonical_outer(dy, x))
    assert len(ratios) == 1 and 0.05 < ratios[0] < 20
