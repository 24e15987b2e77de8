"""What a certificate or a timing holds for: the device, its driver, the versions, the kernels."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from rl_consistency.kernels.core.kernels_hash import kernels_hash

CACHE_VARIABLE = "RL_CONSISTENCY_CACHE"
"""Names the directory of what is found out here; the default is `~/.cache/rl_consistency`."""

LIBRARY_VARIABLES = ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that the library reads; part of the identity."""


def cache_directory() -> Path:
    """The directory of the files; only this function reads `CACHE_VARIABLE`.

    RuntimeError where the user, or the one that the variable names, has no home; FileNotFoundError
    where it names a relative path and the process's directory is gone.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()  # a process may change its directory
    return Path.home() / ".cache" / "rl_consistency"


def cache_file(what: str, identity: Mapping[str, str]) -> Path | None:
    """The file that keeps `what` for one identity. With a file for each, no environment replaces
    what another has struck. None, with a warning, where there is no place for it."""
    name = "".join(c if c.isalnum() else "_" for c in identity["device"])
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    try:
        return cache_directory() / f"{what}_{name}_{digest}.json"
    except (RuntimeError, OSError) as error:
        warnings.warn(
            f"{what} last for this process: {error}. Set {CACHE_VARIABLE} to a directory.",
            stacklevel=2,
        )
        return None


def identity_of(device: torch.device) -> dict[str, str]:
    """Device, driver, versions and the hash of the kernels, by name."""
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cublaslt": _library_version(),
        "driver": _driver_version(),
        "triton": triton.__version__,
        "kernels": kernels_hash(),
    } | {name: os.environ.get(name, "") for name in LIBRARY_VARIABLES}


@cache
def _library_version() -> str:
    major = str(torch.version.cuda).partition(".")[0]
    try:
        # Its bare name is enough, since torch has loaded it.
        version = ctypes.CDLL(f"libcublasLt.so.{major}").cublasLtGetVersion
    except OSError:
        return "unknown"
    version.restype = ctypes.c_size_t
    return str(version())


@cache
def _driver_version() -> str:
    """The CUDA version that the driver supports and its release, such as "13000/580.159.04"; either
    may change alone."""
    return f"{_supported_version()}/{_driver_release()}"


def _supported_version() -> str:
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "unknown"
    return "unknown" if failed else str(version.value)


def _driver_release() -> str:
    release = ctypes.create_string_buffer(80)
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    if management.nvmlInit_v2():
        return "unknown"
    failed = management.nvmlSystemGetDriverVersion(release, len(release))
    management.nvmlShutdown()
    return "unknown" if failed else release.value.decode()
