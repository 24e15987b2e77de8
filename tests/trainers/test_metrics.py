"""Every metric that a run logs is described, and every description is of a metric."""

from fnmatch import fnmatchcase

from rl_consistency.parity.foreign_drift import DEFINITIONS
from rl_consistency.parity.metric_table import all_metrics

ELSEWHERE = {"consistency/schedule_audit"}
"""Logged on a GPU alone."""


def test_every_metric_of_a_run_is_described_and_no_other(tiny_run):
    masked = {"tracking.metrics_of": list(DEFINITIONS), "algorithm.overlong": "mask"}
    masked |= {"algorithm.dynamic_sampling": {"max_rounds": 1}}
    _, rows = tiny_run(**tiny_run.LONG, **masked)
    ppo = {"algorithm.name": "ppo", "algorithm.kl_coefficient": 0.05, "training.steps": 1}
    checks = {f"consistency.{name}_check_every": 1 for name in ("value", "gradient")}
    sparse = {"architecture": "mixtral", "experts": {"count": 4, "per_token": 2}}
    sparse = {f"policy.build.{name}": value for name, value in sparse.items()}
    others = checks | {"data.overlong_prompts": "drop", "consistency.shadow_every": 1} | sparse
    others |= {"algorithm.balance_coefficient": 0.1}
    _, more = tiny_run.of_its_own("ppo", **ppo, **others)
    logged = {name for row in rows + more for name in row} - {"step"}
    known = [name for name, _ in all_metrics()]
    assert [n for n in logged if not any(fnmatchcase(n, pattern) for pattern in known)] == []
    exact = {name for name in known if "*" not in name}
    assert exact - logged == ELSEWHERE
