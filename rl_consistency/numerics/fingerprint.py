"""What must be equal on both sides before their bits may be compared."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import accelerate
import torch
import transformers
import triton

import rl_consistency
from rl_consistency.kernels.core.reduction_order import ReductionOrder
from rl_consistency.numerics.orders import ORDERS
from rl_consistency.numerics.settings import SETTINGS
from rl_consistency.numerics.strict import current

LIBRARY_PREFIXES = ("MKL_", "ONEDNN_", "DNNL_", "TORCH_MKLDNN_")
"""Prefixes of the environment variables by which torch's CPU libraries choose other code."""


@dataclass(frozen=True)
class Fingerprint:
    """Orders, versions, device and settings of one process, and their digest."""

    entries: dict[str, str]
    """Name to value; everything that may change bits."""

    @property
    def digest(self) -> str:
        """SHA-256 of the entries, hexadecimal."""
        return hashlib.sha256(json.dumps(self.entries, sort_keys=True).encode()).hexdigest()

    def difference(self, other: Fingerprint) -> list[str]:
        """`name: ours != theirs` of each entry that differs; none where bits are comparable."""
        names = sorted(self.entries.keys() | other.entries.keys())
        return [
            f"{name}: {self.entries.get(name, 'absent')} != {other.entries.get(name, 'absent')}"
            for name in names
            if self.entries.get(name) != other.entries.get(name)
        ]


def fingerprint(
    device: torch.device | str = "cpu", *, orders: Iterable[ReductionOrder] = ()
) -> Fingerprint:
    """What this process has now, its ops running on `device`: canonical orders, the strictness in
    force, library versions, device, thread count, and the process-wide numeric settings.

    `orders` are those in use from rooms above the kernels; one takes the place of another version.
    """
    device = torch.device(device)
    used = [*ORDERS.values(), *orders]
    texts = {order: order.on(device.type).encode() for order in used}
    entries = {
        f"order.{order.id}": f"v{order.version} {hashlib.sha256(text).hexdigest()[:16]}"
        for order, text in texts.items()
    }
    entries["stock_ops"] = ",".join(sorted(current().stock)) or "none"
    for library in (rl_consistency, torch, transformers, accelerate):
        entries[library.__name__] = library.__version__
    entries["device"] = f"{device.type} {platform.machine()}"
    if device.type == "cpu":
        entries["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        entries["cpu_model"] = _cpu_model()
        entries["num_threads"] = str(torch.get_num_threads())
        # The matrix library chooses its walk over K; its build is part of the order.
        entries["torch_build"] = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16]
        given = {k: v for k, v in os.environ.items() if k.startswith(LIBRARY_PREFIXES)}
        entries |= {f"environment.{name}": value for name, value in given.items()}
    if device.type == "cuda":
        entries["device"] = torch.cuda.get_device_name(device)
        # Triton and its own assembler make the kernels, so the driver does not enter.
        entries["cuda_capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        entries["cuda_runtime"] = str(torch.version.cuda)
        entries["triton"] = triton.__version__
    entries |= {f"setting.{s.name}": str(s.read()) for s in SETTINGS}
    return Fingerprint(entries)


@cache
def _cpu_model() -> str:
    """The processor as Linux names it, else what platform knows."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text("utf-8", "replace") if cpuinfo.exists() else ""
    found = re.search(r"^model name[^:]*:(.*)", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()
