"""What must be equal on every rank, compared; the error names the rank and the difference."""

from __future__ import annotations

from collections.abc import Mapping

from rl_consistency.distributed.world import World
from rl_consistency.numerics.errors import ConsistencyError


def require_same_facts(world: World, facts: Mapping[str, str], *, when: str) -> None:
    """Compare named texts, such as a fingerprint's entries and the digests of recipe and data.

    Every rank calls it. `when` says in the error what the ranks were about to do.

    Raises: ConsistencyError on every rank, naming the ranks that differ from rank 0, and how.
    """
    first, *others = world.gather(f"facts compared {when}", dict(facts))
    lines = []
    for rank, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        for name in names[:1]:
            found, expected = other.get(name, "absent"), first.get(name, "absent")
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"rank {rank} differs from rank 0 in {name} ({found} != {expected}){more}")
    if lines:
        raise ConsistencyError(
            f"{when}: {'; '.join(lines)}. All ranks must have the same versions, devices, "
            "settings, recipe, data and weights."
        )
