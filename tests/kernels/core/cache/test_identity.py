"""What a finding holds for: the driver by its two numbers, the directory by the environment."""

import ctypes
from types import SimpleNamespace

import pytest

from rl_consistency.kernels.core.cache import identity as identity_module
from rl_consistency.kernels.core.cache.identity import (
    CACHE_VARIABLE,
    cache_directory,
    cache_file,
)


def test_the_cache_directory_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_CONSISTENCY_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RL_CONSISTENCY_CACHE", "~/own")
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("RL_CONSISTENCY_CACHE")
    assert cache_directory().parts[-2:] == (".cache", "rl_consistency")


def test_a_relative_cache_directory_is_one_of_this_process_s_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, "cache")
    found = cache_directory()
    monkeypatch.chdir("/")
    assert found == tmp_path / "cache"


def test_without_a_home_there_is_a_warning_and_no_file(monkeypatch):
    monkeypatch.setenv("RL_CONSISTENCY_CACHE", "~nobody_of_this_name/cache")
    with pytest.warns(UserWarning, match="schedules last for this process.*RL_CONSISTENCY_CACHE"):
        assert cache_file("schedules", {"device": "A GPU"}) is None


def test_a_relative_directory_of_a_process_without_one_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("RL_CONSISTENCY_CACHE", "cache")
    with pytest.warns(UserWarning, match="certificates last for this process"):
        assert cache_file("certificates", {"device": "A GPU"}) is None


def test_each_identity_has_its_own_file(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_CONSISTENCY_CACHE", str(tmp_path))
    one, two = ({"device": "A GPU", "driver": driver} for driver in "12")
    assert cache_file("what", one) == cache_file("what", dict(one))
    assert cache_file("what", one) != cache_file("what", two)
    assert cache_file("what", one).name.startswith("what_A_GPU_")


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
    assert identity_module._driver_version.__wrapped__() == version


def test_a_driver_that_is_not_there_is_unknown(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert identity_module._driver_version.__wrapped__() == "unknown/unknown"
