"""Sampling parameters, one entry per row of logits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingRows:
    """Sampling parameters, one entry per row of logits."""

    temperature: Tensor  # [T] fp32, >= 0; 0 is greedy
    top_k: Tensor  # [T] int64, >= 0; 0 keeps all
    top_p: Tensor  # [T] fp32 in (0, 1]; 1 keeps all
    min_p: Tensor  # [T] fp32 in [0, 1]; 0 keeps all

    @classmethod
    def uniform(
        cls,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """`count` rows with the same parameters; ValueError on one outside its range."""
        if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
            raise ValueError(
                f"sampling: temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p "
                f"{min_p}; allowed: temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1."
            )

        def filled(size: int, where: torch.device | str) -> SamplingRows:
            return cls(
                temperature=torch.full((size,), temperature, dtype=torch.float32, device=where),
                top_k=torch.full((size,), top_k, dtype=torch.int64, device=where),
                top_p=torch.full((size,), top_p, dtype=torch.float32, device=where),
                min_p=torch.full((size,), min_p, dtype=torch.float32, device=where),
            )

        one = filled(1, "cpu")
        return filled(count, device).knowing(
            truncates=one.truncates, unit_temperature=one.unit_temperature
        )

    @classmethod
    def concatenate(cls, parts: list[SamplingRows]) -> SamplingRows:
        """The rows of several parts, one after another."""
        rows = cls(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)})
        if all(len(part._known) == 2 for part in parts):
            return rows.knowing(
                truncates=any(part.truncates for part in parts),
                unit_temperature=all(part.unit_temperature for part in parts),
            )
        return rows

    def select(self, index: Tensor | slice) -> SamplingRows:
        """The rows chosen by an index, mask or slice."""
        rows = SamplingRows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})
        return rows.knowing(**self._known)

    def to(self, device: torch.device | str) -> SamplingRows:
        """These rows on a device. The copy knows `truncates` and `unit_temperature`."""
        known = {"truncates": self.truncates, "unit_temperature": self.unit_temperature}
        rows = SamplingRows(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})
        return rows.knowing(**known)

    @property
    def divisor(self) -> Tensor:
        """[T] fp32 temperatures, 1 where greedy."""
        return self.temperature.masked_fill(self.temperature == 0, 1.0)

    @cached_property
    def truncates(self) -> bool:
        """Whether any row restricts its support; selected rows keep the answer of their source.

        It chooses a schedule and changes no bit.
        """
        return bool(
            ((self.temperature == 0) | (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any()
        )

    @cached_property
    def unit_temperature(self) -> bool:
        """Whether every temperature is known to be 1; changes no bit."""
        return bool((self.temperature == 1).all())

    @property
    def _known(self) -> dict[str, bool]:
        """The answers for `truncates` and `unit_temperature` that have been read."""
        names = ("truncates", "unit_temperature")
        return {name: self.__dict__[name] for name in names if name in self.__dict__}

    def knowing(self, **answers: bool) -> SamplingRows:
        """These rows with known answers for `truncates` and `unit_temperature`."""
        self.__dict__.update(answers)
        return self
