"""Certificates that the vendor library's products have the canonical bytes, kept in a file.

A certificate says how many elements of the library's products differed from the Triton schedule's,
for one layout, dtypes, bias, N, K and power-of-two range of M. It holds for one device, driver and
set of versions (an identity), and each identity has its own file. Processes that share a file merge
their findings. A certificate that is bad or struck in one process stays so in all. A file that is
damaged or that others could have written is ignored with a warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from rl_consistency.kernels.core.cache.identity import CACHE_VARIABLE, cache_file, identity_of
from rl_consistency.kernels.core.cache.own_file import (
    UNUSABLE,
    locked,
    make_own,
    own_text,
    replace_whole,
)
from rl_consistency.kernels.core.compile_ahead import require_launches
from rl_consistency.kernels.core.grid import next_power_of_2

FOLDER = "certificates"
"""Name of the folder in the cache directory; it is the user's alone (mode 0700)."""

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Key:
    """What one certificate covers."""

    layout: str
    """"nt", "nn", or "tn" for dW (its rows are tokens)."""
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    n: int
    k: int
    rows: int
    """The largest number of rows; the range begins at half of it plus one."""

    @classmethod
    def of(
        cls, layout: str, dtype: torch.dtype, out_dtype: torch.dtype, bias: bool, *mnk: int
    ) -> Key:
        """The key of one product; `mnk` is M, N, K."""
        m, n, k = mnk
        return _key(layout, dtype, out_dtype, bias, n, k, next_power_of_2(m))

    @cached_property
    def name(self) -> str:
        """How the file spells the key."""
        dtypes = f"{_DTYPE_NAMES[self.dtype]}/{_DTYPE_NAMES[self.out_dtype]}"
        bias = "bias" if self.bias else "plain"
        return f"{self.layout}/{dtypes}/{bias}/n{self.n}/k{self.k}/m{self.rows}"

    def sample(self, m: int) -> list[int]:
        """Numbers of rows to compare: the range's ends, its middle and `m`."""
        low = max(self.rows // 2 + 1, 2)
        counts = {low, (low + self.rows) // 2, self.rows, m}
        # Certificates of dW cover whole steps of the fold only.
        return sorted(c for c in counts if self.layout != "tn" or c % 16 == 0)

    def probe_bytes(self) -> int:
        """Memory of a comparison with the most rows."""
        shapes = (self.rows, self.k), (self.n, self.k), (self.rows, self.n)
        if self.layout == "tn":
            shapes = (self.rows, self.n), (self.rows, self.k), (self.n, self.k)
        a, b, y = (rows * columns for rows, columns in shapes)
        return (a + b) * self.dtype.itemsize * 2 + y * self.out_dtype.itemsize * 4


_key = cache(Key)
"""One object per key, so that its name is computed once."""


@dataclass
class Certificate:
    """The finding for one key."""

    differing: int
    """Elements that differed in the comparisons; 0 admits the library."""
    rows: list[int]
    """Numbers of rows that were compared."""
    struck: str = ""
    """Why the certificate was withdrawn; empty while it holds."""
    gain: float = 0.0
    """Time of our own schedule over the library's, where they were raced; else 0."""

    @property
    def holds(self) -> bool:
        """Whether the library may be used."""
        return self.differing == 0 and not self.struck

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> Certificate:
        """A finding from its entry in a file; TypeError for other fields or types."""
        finding = cls(**entry)
        types = [type(value) for value in vars(finding).values()]
        if types != [int, list, str, float] or any(
            type(count) is not int for count in finding.rows
        ):
            raise TypeError(f"not a certificate: {entry}")
        return finding


class Certificates:
    """Findings by key, in one file.

    Args:
        path: the file; read now, rewritten when a finding is added. None keeps them in memory.
        identity: device and versions that the findings hold for; a file of others is replaced.
        compare: (key, number of rows) -> elements that differ between library and Triton.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, str], compare: Callable[[Key, int], int]
    ) -> None:
        self._path = path
        self._identity = dict(identity)
        self._compare = compare
        self._told: set[str] = set()
        self._findings = self._read()

    @classmethod
    def of_device(
        cls, device: torch.device, what: str, compare: Callable[[Key, int], int]
    ) -> Certificates:
        """Certificates of `what`, a part of the file's name, on a device with the installed
        versions."""
        identity = identity_of(device)
        path = cache_file(what, identity)
        return cls(path and path.parent / FOLDER / path.name, identity, compare)

    def knows(self, key: Key) -> bool:
        """Whether there is a finding, good or bad."""
        return key.name in self._findings

    def holds(self, key: Key) -> bool:
        """Whether there is a good finding."""
        finding = self._findings.get(key.name)
        return finding is not None and finding.holds

    def to_compare(self, key: Key, m: int, *, to_the_row: bool = False) -> list[int]:
        """The numbers of rows that `admitted` compares before it answers."""
        finding = self._findings.get(key.name)
        if finding is None:
            return key.sample(m)
        return [m] if to_the_row and finding.holds and m not in finding.rows else []

    def admitted(self, key: Key, m: int, *, make: bool = True, to_the_row: bool = False) -> bool:
        """Whether the library may compute a product of `m` rows.

        Args:
            key: the product's key.
            m: its number of rows.
            make: make a missing certificate now. False while a CUDA graph is captured: nothing
                audits its replays, so only numbers of rows that were compared are admitted.
            to_the_row: compare `m` rows too if the certificate was made with others.

        RuntimeError while kernels compile ahead: nothing would be compared.
        """
        require_launches("a certificate")
        rows = self.to_compare(key, m, to_the_row=to_the_row) if make else []
        if rows:
            differing = sum(self._compare(key, count) for count in rows)
            finding = self._findings.setdefault(key.name, Certificate(0, []))
            finding.differing += differing
            finding.rows = sorted({*finding.rows, *rows})
            self._write()
        finding = self._findings.get(key.name)
        if finding is None or not finding.holds:
            return False
        return make or m in finding.rows

    def pays(self, key: Key, race: Callable[[], float] | None) -> bool:
        """Whether the library, which has a certificate, is as fast as our own schedule.

        `race` gives the time of our own over the library's and is asked once for each certificate;
        None where nothing may be run. What was never raced pays.
        """
        finding = self._findings[key.name]
        if finding.gain == 0.0 and race is not None:
            finding.gain = race()
            self._write()
        return finding.gain == 0.0 or finding.gain >= 1.0

    def strike(self, key: Key, reason: str) -> None:
        """Withdraw a certificate, also in the file."""
        require_launches("the withdrawal of a certificate")
        finding = self._findings.setdefault(key.name, Certificate(0, []))
        finding.struck = reason
        self._write()

    def _read(self) -> dict[str, Certificate]:
        if self._path is None:
            return {}
        try:
            content = json.loads(own_text(self._path))
            if content["identity"] != self._identity:
                return {}
            return {name: Certificate.parse(e) for name, e in content["findings"].items()}
        except FileNotFoundError:
            return {}
        except UNUSABLE as error:
            reason = f"{type(error).__name__}: {error}"
            self._tell("read", f"is ignored ({reason}); certificates are made again.")
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            was_own = make_own(self._path.parent)
            # Without the lock, two processes that write at once could lose what one has struck.
            with locked(self._path.with_suffix(".lock")):
                if was_own:
                    self._merge()
                self._replace(self._path)
        except OSError as error:
            text = f"cannot be written ({error}); certificates last for this process only. Set"
            self._tell("write", f"{text} {CACHE_VARIABLE} to a writable directory.")

    def _tell(self, kind: str, text: str) -> None:
        """Warn, once for each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(
                f"certificate file {self._path} {text} Nothing else is affected.", stacklevel=4
            )

    def _merge(self) -> None:
        """Add the file's findings; a certificate bad or struck in either stays so."""
        for name, other in self._read().items():
            mine = self._findings.setdefault(name, other)
            mine.struck = mine.struck or other.struck
            mine.differing = max(mine.differing, other.differing)
            mine.rows = sorted({*mine.rows, *other.rows})
            mine.gain = mine.gain or other.gain

    def _replace(self, path: Path) -> None:
        content = {
            "identity": self._identity,
            "findings": {name: vars(self._findings[name]) for name in sorted(self._findings)},
        }
        replace_whole(path, content)


@dataclass(frozen=True)
class Certified:
    """A product that runs by a certificate, as the audit knows it."""

    certificates: Certificates
    key: Key

    @property
    def name(self) -> str:
        """Name of the key."""
        return self.key.name

    def strike(self, reason: str) -> None:
        """Withdraw the certificate."""
        self.certificates.strike(self.key, reason)
