"""Weights on their way from verl's trainer to a rollout, with digests of them behind.

verl's transports carry names and tensors. The last tensor is the digests as bytes of JSON, so that
the receiver finds out by itself whether it holds the trainer's bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import each_digest

DIGESTS = "rl_consistency.digests"
"""Name of the last tensor, [bytes] uint8."""


def with_digests(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights, and then their digests."""
    digests: dict[str, str] = {}
    for name, weight in weights:
        digests |= each_digest({name: weight})
        yield name, weight
    yield DIGESTS, torch.frombuffer(bytearray(json.dumps(digests), "ascii"), dtype=torch.uint8)


def take_digests(weights: dict[str, Tensor]) -> dict[str, str]:
    """Take the digests out of some weights that arrived; none before the last of a sync."""
    found = weights.pop(DIGESTS, None)
    return {} if found is None else json.loads(bytes(found.cpu().numpy()))


def compare_digests(sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """ConsistencyError naming the first parameter held with other bits than those sent, or that was
    not sent."""
    for name, digest in held.items():
        if sent.get(name) != digest:
            raise ConsistencyError(
                f"after the weight sync {name} has the digest {digest} in vLLM, and "
                f"{sent.get(name, 'none')} in the trainer. Both must have one dtype (rollout.dtype "
                "and mixed_precision.param_dtype), and nothing may quantize on the way."
            )
