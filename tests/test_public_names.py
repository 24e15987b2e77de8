"""What `import rl_consistency` offers: every name, loaded when it is asked for."""

import subprocess
import sys

import pytest

import rl_consistency
from rl_consistency.kernels.matmul import audit
from rl_consistency.rollout import weights


@pytest.mark.parametrize("name", rl_consistency.__all__)
def test_every_public_name_can_be_had(name):
    assert getattr(rl_consistency, name) is not None
    assert name in dir(rl_consistency)


def test_every_export_is_public():
    assert {*rl_consistency._EXPORTS, "__version__"} == set(rl_consistency.__all__)


def test_the_audit_that_is_exported_is_the_one_the_engine_reads():
    assert rl_consistency.schedule_audit is audit.schedule_audit
    assert weights.audit is audit


def test_an_import_loads_nothing_else():
    code = "import sys, rl_consistency; assert 'torch' not in sys.modules; rl_consistency.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no attribute 'nothing'" in done.stderr and "AssertionError" not in done.stderr
