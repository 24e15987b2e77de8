"""What findings hold for: the device, its driver, the versions, the kernels; and where they lie."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
import triton

from rl_consistency.kernels.core import findings as module
from rl_consistency.kernels.core.findings import (
    CACHE_VARIABLE,
    FOLDER,
    LIBRARY_VARIABLES,
    Findings,
    cache_directory,
    findings_file,
)


def test_the_cache_directory_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, "~/own")
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv(CACHE_VARIABLE)
    assert cache_directory().parts[-2:] == (".cache", "rl_consistency")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, "cache")
    found = cache_directory()
    monkeypatch.chdir("/")
    assert found == tmp_path / "cache"


def test_without_a_place_for_the_file_there_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for place in ("~nobody_of_this_name/cache", "cache"):
        monkeypatch.setenv(CACHE_VARIABLE, place)
        with pytest.warns(UserWarning, match="last for this process.*RL_CONSISTENCY_CACHE"):
            assert findings_file({"device": "A GPU"}) is None


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """What the driver says of a device."""
    found = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for name in LIBRARY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


CHANGES = {
    "device": lambda patch, gpu: patch.setattr(gpu, "name", "Another GPU"),
    "capability": lambda patch, gpu: patch.setattr(gpu, "minor", 1),
    "multiprocessors": lambda patch, gpu: patch.setattr(gpu, "multi_processor_count", 114),
    "torch": lambda patch, gpu: patch.setattr(torch, "__version__", "0.0"),
    "cuda": lambda patch, gpu: patch.setattr(torch.version, "cuda", "0.0"),
    "cublaslt": lambda patch, gpu: patch.setattr(module, "_library_version", lambda: "0"),
    "driver": lambda patch, gpu: patch.setattr(module, "_driver_version", lambda: "0"),
    "triton": lambda patch, gpu: patch.setattr(triton, "__version__", "0.0"),
    "kernels": lambda patch, gpu: patch.setattr(module, "kernels_hash", lambda: "0"),
} | {name: lambda patch, gpu, name=name: patch.setenv(name, ":16:8") for name in LIBRARY_VARIABLES}
"""Part of the identity -> what makes it another."""


@pytest.mark.parametrize("part", CHANGES)
def test_no_finding_outlives_a_part_of_its_identity(part, gpu, monkeypatch, tmp_path):
    """And what is withdrawn under another identity is not withdrawn here."""
    device = torch.device("cuda", 0)
    held = Findings.of_device(device)
    held.certify("key", 0, [16])
    assert held.path.parent == tmp_path / FOLDER and held.path.name.startswith("A_GPU_")
    with monkeypatch.context() as patch:
        CHANGES[part](patch, gpu)
        other = Findings.of_device(device)
        assert other.path != held.path and other.certificate("key") is None
        other.withdraw("key", "an audit")
    assert Findings.of_device(device).certifies("key")


def test_every_part_of_the_identity_has_a_change(gpu):
    assert set(module.identity_of(torch.device("cpu"))) == set(CHANGES)


class Driver:
    """The driver's libraries by name, as ctypes loads them; a release of None has no management
    library that answers."""

    def __init__(self, supports, release):
        self.supports, self.release = supports, release

    def __call__(self, name):
        if name == "libcuda.so.1":
            return SimpleNamespace(cuDriverGetVersion=self.tell)
        assert name == "libnvidia-ml.so.1"
        return SimpleNamespace(
            nvmlInit_v2=lambda: 0 if self.release else 999,
            nvmlSystemGetDriverVersion=self.name,
            nvmlShutdown=lambda: 0,
        )

    def tell(self, number):
        number._obj.value = self.supports
        return 0

    def name(self, buffer, size):
        assert len(buffer) == size
        buffer.value = self.release
        return 0


@pytest.mark.parametrize(
    ("supports", "release", "version"),
    [
        (13000, b"580.159.03", "13000/580.159.03"),
        (13000, b"580.159.04", "13000/580.159.04"),
        (12080, None, "12080/unknown"),
    ],
)
def test_a_driver_is_told_by_what_it_supports_and_by_its_release(
    supports, release, version, monkeypatch
):
    monkeypatch.setattr(ctypes, "CDLL", Driver(supports, release))
    assert module._driver_version.__wrapped__() == version


def test_a_driver_that_is_not_there_is_unknown(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert module._driver_version.__wrapped__() == "unknown/unknown"
