"""Which experts the rows of a bench go to: evenly, by a power law, or all to the same.

Experts are shuffled by the seed, and so is the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ROUTINGS = ("even", "skewed", "same")
"""even: every expert has equally many rows, up to one. skewed: the i-th expert is drawn with a
share of i^-1.5. same: every row has the same k experts, which is one expert where k is 1."""

SKEW = 1.5
PULL = 20.0
"""Logits between the experts of `same` and all others."""


@dataclass(frozen=True)
class Routing:
    """The experts of rows, and their order by expert."""

    expert_ids: Tensor
    """[R, k] int32, ascending in each row."""
    weights: Tensor
    """[R, k] fp32, of sum 1 in each row."""
    num_experts: int

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]

    @cached_property
    def order(self) -> Tensor:
        """[R * k] int64, the pairs row * k + slot by expert, then by row."""
        return self.expert_ids.flatten().argsort(stable=True)

    @cached_property
    def rows(self) -> Tensor:
        """[R * k] int64, the row of each pair."""
        return self.order // self.top_k

    @cached_property
    def places(self) -> Tensor:
        """[R, k] int64, where each row's pairs stand."""
        return self.order.argsort().view(self.expert_ids.shape)

    @cached_property
    def ends(self) -> Tensor:
        """[E] int32, where each expert's pairs end."""
        ids = self.expert_ids.flatten()
        return torch.bincount(ids, minlength=self.num_experts).cumsum(0).to(torch.int32)

    @cached_property
    def experts_hit(self) -> int:
        """Experts with rows."""
        return self.expert_ids.unique().numel()


def drawn_routing(
    kind: str, tokens: int, num_experts: int, top_k: int, device: torch.device, seed: int = 0
) -> Routing:
    """A routing of `ROUTINGS`."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "even":
        ids = torch.arange(tokens * top_k).view(tokens, top_k) % num_experts
        ids = ids[torch.randperm(tokens, generator=generator)]
    elif kind == "skewed":
        each = _shares(num_experts).expand(tokens, -1)
        ids = torch.multinomial(each, top_k, generator=generator)
    elif kind == "same":
        ids = torch.arange(top_k).expand(tokens, -1)
    else:
        raise ValueError(f"no routing {kind!r}; give {', '.join(ROUTINGS)}.")
    ids = torch.randperm(num_experts, generator=generator)[ids].sort(dim=1).values
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    weights = weights / weights.sum(dim=1, keepdim=True)
    return Routing(ids.to(device, torch.int32), weights.to(device), num_experts)


def routed_inputs(
    kind: str, tokens: int, num_experts: int, top_k: int, hidden: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A router's weight [E, H] and rows [R, H] in bf16 that it routes about as `kind` says.

    All rows have the value 1 in the first column, where the router has the expert's offset. "even"
    is that of random weights: no expert is preferred, but the numbers of rows vary.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator)
    gate = torch.randn(num_experts, hidden, generator=generator) * hidden**-0.5
    if kind == "even":
        offset = torch.zeros(num_experts)
    elif kind == "skewed":
        offset = _shares(num_experts).log()
    elif kind == "same":
        offset = PULL * (torch.arange(num_experts) < top_k)
    else:
        raise ValueError(f"no routing {kind!r}; give {', '.join(ROUTINGS)}.")
    x[:, 0] = 1.0
    gate[:, 0] = offset[torch.randperm(num_experts, generator=generator)]
    return gate.to(device, torch.bfloat16), x.to(device, torch.bfloat16)


def _shares(num_experts: int) -> Tensor:
    """The shares of experts by a power law."""
    shares = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -SKEW
    return (shares / shares.sum()).float()
