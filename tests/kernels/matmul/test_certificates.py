"""Findings on the library, kept in a file and merged between processes; a bad one stays bad."""

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

from rl_consistency.kernels.core.cache import identity as identity_module
from rl_consistency.kernels.core.cache import own_file
from rl_consistency.kernels.core.cache.identity import (
    CACHE_VARIABLE,
    LIBRARY_VARIABLES,
)
from rl_consistency.kernels.matmul.certificates import Certificates, Key

IDENTITY = {"device": "one", "torch": "1"}
KEY = Key.of("nt", torch.bfloat16, torch.bfloat16, False, 100, 64, 96)


class Comparison:
    """Counts its calls and answers what it is told."""

    def __init__(self, differing=0):
        self.differing = differing
        self.calls = []

    def __call__(self, key, m):
        self.calls.append((key, m))
        return self.differing


def certificates(tmp_path, comparison, identity=IDENTITY):
    return Certificates(tmp_path / "deep" / "file.json", identity, comparison)


def test_a_key_covers_a_range_of_rows_to_a_power_of_two():
    def key(m):
        return Key.of("nn", torch.bfloat16, torch.float32, True, m, 8, 16)

    assert key(65) == key(100) == key(128) != key(129)
    assert key(100).name == "nn/bf16/fp32/bias/n8/k16/m128"
    assert key(100).sample(100) == [65, 96, 100, 128]
    assert key(2).sample(2) == [2]
    outer = Key.of("tn", torch.bfloat16, torch.float32, False, 100, 8, 16)
    assert outer.sample(112) == [96, 112, 128]


def test_equal_products_are_certified_once_and_kept(tmp_path):
    comparison = Comparison()
    first = certificates(tmp_path, comparison)
    assert first.admitted(KEY, 100)
    assert [m for _, m in comparison.calls] == [65, 96, 100, 128]
    assert first.admitted(KEY, 77)
    assert certificates(tmp_path, Comparison(5)).admitted(KEY, 100)
    assert len(comparison.calls) == 4


def test_a_differing_product_gets_no_certificate(tmp_path):
    assert not certificates(tmp_path, Comparison(1)).admitted(KEY, 100)
    assert not certificates(tmp_path, Comparison(0)).admitted(KEY, 100)


def test_nothing_is_compared_during_capture_and_only_compared_counts_are_admitted(tmp_path):
    comparison = Comparison()
    held = certificates(tmp_path, comparison)
    assert not held.admitted(KEY, 100, make=False)
    assert comparison.calls == []
    held.admitted(KEY, 100)
    assert held.admitted(KEY, 100, make=False)
    assert not held.admitted(KEY, 99, make=False)


def test_what_will_be_captured_can_be_certified_to_the_row(tmp_path):
    comparison = Comparison()
    held = certificates(tmp_path, comparison)
    held.admitted(KEY, 100)
    assert held.admitted(KEY, 99, to_the_row=True)
    assert [m for _, m in comparison.calls] == [65, 96, 100, 128, 99]
    assert held.admitted(KEY, 99, make=False) and not held.admitted(KEY, 98, make=False)
    assert not held.admitted(KEY, 98, make=False, to_the_row=True)
    assert certificates(tmp_path, comparison).admitted(KEY, 99, to_the_row=True)
    assert len(comparison.calls) == 5
    bad = certificates(tmp_path, Comparison(1))
    assert bad.admitted(KEY, 98) and not bad.admitted(KEY, 98, to_the_row=True)
    assert not bad.admitted(KEY, 100)


def test_a_struck_certificate_stays_struck_in_the_file(tmp_path):
    other = certificates(tmp_path, Comparison())
    held = certificates(tmp_path, Comparison())
    assert held.admitted(KEY, 100) and other.admitted(KEY, 100)
    held.strike(KEY, "an audit")
    assert not held.admitted(KEY, 100)
    other.admitted(Key.of("nn", torch.float16, torch.float16, False, 4, 8, 8), 4)
    fresh = certificates(tmp_path, Comparison())
    assert not fresh.admitted(KEY, 100)
    content = json.loads((tmp_path / "deep" / "file.json").read_text())
    assert content["findings"][KEY.name]["struck"] == "an audit"
    assert len(content["findings"]) == 2


def test_a_certificate_is_raced_once_and_the_slower_one_stays_away(tmp_path):
    def no_race():
        pytest.fail("raced again")

    first = certificates(tmp_path, Comparison())
    other = replace(KEY, n=128)
    assert first.admitted(KEY, 100) and first.admitted(other, 100)
    assert first.pays(KEY, None)  # not raced yet
    assert not first.pays(KEY, lambda: 0.8)
    assert first.pays(other, lambda: 1.3)
    for held in (first, certificates(tmp_path, Comparison())):
        assert not held.pays(KEY, no_race) and not held.pays(KEY, None)
        assert held.pays(other, no_race)
        assert held.admitted(KEY, 100)  # the bytes are as good as before


def test_findings_of_two_processes_are_merged_and_a_bad_one_stays(tmp_path):
    good, bad = certificates(tmp_path, Comparison()), certificates(tmp_path, Comparison(4))
    assert good.admitted(KEY, 100)
    assert not bad.admitted(KEY, 77)

    def found():
        content = json.loads((tmp_path / "deep" / "file.json").read_text())
        return content["findings"][KEY.name]

    merged = {"differing": 4 * 4, "rows": [65, 77, 96, 100, 128]}
    merged |= {"struck": "", "gain": 0.0}
    assert found() == merged
    # The good finding is written last, and gives way as well.
    good.admitted(Key.of("nn", torch.float16, torch.float16, False, 4, 8, 8), 4)
    assert found() == merged
    assert not good.admitted(KEY, 100)
    assert not certificates(tmp_path, Comparison()).admitted(KEY, 100)


@pytest.fixture
def gpu():
    """What the driver says of a device."""
    return SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132)


@pytest.fixture
def environment(monkeypatch, tmp_path, gpu):
    """Opens the certificates of a device as a new process would, where variables are set."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for name in LIBRARY_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def opened(**variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return Certificates.of_device(torch.device("cpu"), "matmul", lambda key, m: 0)

    return opened


def test_another_identity_neither_wipes_nor_sees_what_was_struck(environment, tmp_path):
    held = environment()
    assert held.admitted(KEY, 100)
    held.strike(KEY, "an audit")
    other = environment(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert not other.knows(KEY)
    assert other.admitted(KEY, 100)
    assert environment().knows(KEY) and not environment().admitted(KEY, 100)
    assert environment(CUBLAS_WORKSPACE_CONFIG=":4096:8").admitted(KEY, 100)
    names = sorted(path.name for path in (tmp_path / "certificates").glob("*.json"))
    assert len(names) == 2
    assert all(name.startswith("matmul_A_GPU_") for name in names)


CHANGES = {
    "device": lambda patch, gpu: patch.setattr(gpu, "name", "Another GPU"),
    "capability": lambda patch, gpu: patch.setattr(gpu, "minor", 1),
    "multiprocessors": lambda patch, gpu: patch.setattr(gpu, "multi_processor_count", 114),
    "torch": lambda patch, gpu: patch.setattr(torch, "__version__", "0.0"),
    "cuda": lambda patch, gpu: patch.setattr(torch.version, "cuda", "0.0"),
    "cublaslt": lambda patch, gpu: patch.setattr(identity_module, "_library_version", lambda: "0"),
    "driver": lambda patch, gpu: patch.setattr(identity_module, "_driver_version", lambda: "0"),
    "triton": lambda patch, gpu: patch.setattr(triton, "__version__", "0.0"),
    "kernels": lambda patch, gpu: patch.setattr(identity_module, "kernels_hash", lambda: "0"),
} | {name: lambda patch, gpu, name=name: patch.setenv(name, ":16:8") for name in LIBRARY_VARIABLES}
"""Part of the identity -> what makes it another."""


@pytest.mark.parametrize("part", CHANGES)
def test_a_finding_does_not_outlive_any_part_of_its_identity(part, environment, gpu, monkeypatch):
    held = environment()
    assert held.admitted(KEY, 100) and environment().knows(KEY)
    with monkeypatch.context() as patch:
        CHANGES[part](patch, gpu)
        other = environment()
        assert other._path != held._path and not other.knows(KEY)
        other.strike(KEY, "an audit")
    assert environment().admitted(KEY, 100)


def test_every_part_of_the_identity_has_a_change(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert set(identity_module.identity_of(torch.device("cpu"))) == set(CHANGES)


@pytest.mark.parametrize("change", [{"device": "two"}, {"torch": "2"}, {"more": "x"}])
def test_a_file_from_another_device_or_version_is_made_again(tmp_path, change):
    certificates(tmp_path, Comparison()).admitted(KEY, 100)
    comparison = Comparison(3)
    assert not certificates(tmp_path, comparison, IDENTITY | change).admitted(KEY, 100)
    assert comparison.calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"findings": {}}',
        '{"identity": %s, "findings": []}',
        '{"identity": %s, "findings": {"a": {"x": 1}}}',
        '{"identity": %s, "findings": {"a": {"differing": "0", "rows": [4]}}}',
        '{"identity": %s, "findings": {"a": {"differing": true, "rows": [4]}}}',
        '{"identity": %s, "findings": {"a": {"differing": 0, "rows": 4}}}',
        '{"identity": %s, "findings": {"a": {"differing": 0, "rows": {}}}}',
        '{"identity": %s, "findings": {"a": {"differing": 0, "rows": ["4", null]}}}',
        '{"identity": %s, "findings": {"a": {"differing": 0, "rows": [4], "struck": null}}}',
        '{"identity": %s, "findings": {"a": {"differing": 0, "rows": [4], "gain": "2"}}}',
    ],
)
def test_a_damaged_file_is_made_again_with_a_warning(tmp_path, text):
    path = tmp_path / "deep" / "file.json"
    path.parent.mkdir()
    path.write_text(text.replace("%s", json.dumps(IDENTITY)).replace('"a"', f'"{KEY.name}"'))
    comparison = Comparison()
    with pytest.warns(UserWarning, match=r"file\.json is ignored .* made again"):
        held = certificates(tmp_path, comparison)
        assert held.admitted(KEY, 100)
    assert comparison.calls
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert certificates(tmp_path, Comparison(5)).admitted(KEY, 100)


def _writable_by_others(path):
    path.chmod(0o666)


def _in_a_folder_of_all(path):
    path.parent.chmod(0o777)


def _a_link(path):
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def _deep(path):
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("spoil", [_writable_by_others, _in_a_folder_of_all, _a_link, _deep])
def test_a_certificate_that_others_could_have_written_admits_nothing(tmp_path, spoil):
    """It would admit products of the library that were not compared on this machine."""
    certificates(tmp_path, lambda key, m: 0).admitted(KEY, 100)
    path = tmp_path / "deep" / "file.json"
    assert certificates(tmp_path, Comparison()).holds(KEY)
    spoil(path)
    with pytest.warns(UserWarning, match=r"file\.json is ignored .* made again"):
        held = certificates(tmp_path, Comparison(5))
    assert not held.knows(KEY)


def test_a_full_disk_leaves_no_pieces_and_warns_once(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(own_file.json, "dump", full)
    with pytest.warns(UserWarning, match="RL_CONSISTENCY_CACHE") as warned:
        held = certificates(tmp_path, lambda key, m: 0)
        for n in (8, 16, 24):
            assert held.admitted(replace(KEY, n=n), 100)
    assert len(warned) == 1
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file.lock"]


def test_a_lock_that_is_a_link_loses_nobodys_file(tmp_path):
    (tmp_path / "deep").mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "deep" / "file.lock").symlink_to(victim)
    with pytest.warns(UserWarning, match="cannot be written"):
        certificates(tmp_path, lambda key, m: 0).admitted(KEY, 100)
    assert victim.read_text() == "precious"


def test_an_unwritable_directory_warns_and_lasts_for_the_process(tmp_path):
    (tmp_path / "deep").write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="RL_CONSISTENCY_CACHE"):
        held = Certificates(tmp_path / "deep" / "file.json", IDENTITY, Comparison())
        assert held.admitted(KEY, 100)


@pytest.mark.parametrize("what", ["matmul", "experts"])
def test_only_a_folder_of_its_own_is_closed_to_others(what, environment, tmp_path):
    tmp_path.chmod(0o755)
    environment()
    held = Certificates.of_device(torch.device("cpu"), what, lambda key, m: 0)
    assert held.admitted(KEY, 100)
    (file,) = tmp_path.rglob(f"{what}*.json")
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert file.parent != tmp_path and file.parent.stat().st_mode & 0o777 == 0o700


def test_strikes_of_many_writers_at_once_are_all_kept(tmp_path):
    keys = [replace(KEY, n=8 * (i + 1)) for i in range(24)]

    def strike(key):
        certificates(tmp_path, lambda key, m: 0).strike(key, "differed")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(strike, keys))
    kept = certificates(tmp_path, lambda key, m: 0)
    assert not any(kept.admitted(key, 100) for key in keys)
