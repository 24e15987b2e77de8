import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_consistency.distributed.gradient_norm import ORDER as sharded_gradient_norm
from rl_consistency.distributed.ordered_sum import ORDER as leaf_sum
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.numerics.orders import ORDERS
from rl_consistency.numerics.settings import SETTINGS
from rl_consistency.numerics.strict import strict

PRECISION = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision


def test_it_covers_orders_versions_device_threads_and_settings():
    entries = fingerprint().entries
    assert {f"order.{name}" for name in ORDERS} <= entries.keys()
    assert {f"setting.{setting.name}" for setting in SETTINGS} <= entries.keys()
    assert entries["torch"] == torch.__version__
    assert entries["device"].startswith("cpu")
    assert {"transformers", "accelerate", "stock_ops", "cpu_capability"} <= entries.keys()


def test_a_stock_op_shows():
    with strict(except_={"attention", "glu"}):
        changed = fingerprint()
    assert fingerprint().difference(changed) == ["stock_ops: none != attention,glu"]
    assert fingerprint().digest != changed.digest


@pytest.mark.parametrize(
    "name, get, put, other",
    [
        ("setting.float32_matmul_precision", *PRECISION, {"highest": "high", "high": "highest"}),
        ("num_threads", torch.get_num_threads, torch.set_num_threads, {}),
    ],
)
def test_a_setting_and_the_thread_count_show(name, get, put, other):
    before, expected = get(), fingerprint()
    put(changed := other[before] if other else before + 1)
    try:
        assert f"{name}: {before} != {changed}" in expected.difference(fingerprint())
    finally:
        put(before)


def test_an_order_shows():
    entries = fingerprint().entries
    other = Fingerprint(entries | {"order.linear": "v2 0123"})
    assert fingerprint().difference(other) == [
        f"order.linear: {entries['order.linear']} != v2 0123"
    ]


def test_orders_of_rooms_above_the_kernels_enter_when_they_are_in_use():
    used = fingerprint(orders=(leaf_sum, sharded_gradient_norm))
    absent, other_version = fingerprint().difference(used)[::-1]
    assert absent.startswith("order.leaf_sum: absent != v1 ")
    assert other_version.startswith("order.gradient_norm: v1 ") and " != v2 " in other_version


def test_on_a_gpu_it_covers_the_device_and_what_compiles_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    entries = fingerprint("cuda").entries
    assert entries["device"] == "Some GPU" and entries["cuda_capability"] == "9.0"
    assert {"triton", "cuda_runtime"} <= entries.keys()
    assert not {"num_threads", "cpu_model"} & entries.keys()


@pytest.mark.parametrize("name", ["MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"])
def test_a_variable_that_a_matrix_library_reads_shows(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    expected = fingerprint()
    monkeypatch.setenv(name, "COMPATIBLE")
    assert fingerprint().difference(expected) == [f"environment.{name}: COMPATIBLE != absent"]


PROCESS = """
import hashlib, torch
from rl_consistency.numerics.fingerprint import fingerprint
torch.set_num_threads(1)
torch.manual_seed(0)
product = torch.randn(64, 1024) @ torch.randn(1024, 64)
print(hashlib.sha256(product.numpy().tobytes()).hexdigest(), fingerprint().digest)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs a torch built with MKL")
def test_processes_whose_products_differ_by_the_environment_have_other_fingerprints():
    def run(branch):
        environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[2])} | branch
        command = [sys.executable, "-c", PROCESS]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        return done.stdout.split()

    product, digest = run({})
    other_product, other_digest = run({"MKL_CBWR": "COMPATIBLE"})
    assert other_product != product and other_digest != digest
