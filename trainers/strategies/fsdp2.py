"""FSDP2: every rank keeps an fp32 shard of each weight, of its moments and of its gradient.

`fully_shard` gathers a layer's weights, rounded to the policy's dtype, for its forward and its
backward pass, and hands its finished gradients to a reduce-scatter of ours, which sums them in
order. All ranks run as many passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import World
from rl_consistency.numerics.masters import rounded
from rl_consistency.trainers.strategies.strategy import (
    Backward,
    Gathered,
    Strategy,
    trained_parameters,
)


class FSDP2(Strategy):
    """The decoder layers, and what is around them, are sharded over all ranks."""

    keeps_shards = True

    def __init__(self, world: World, order: PartOrder, policy: nn.Module, *, ordered: bool = True):
        super().__init__(world, order, policy, ordered=ordered)
        policy.float()  # masters; what is gathered of them has the policy's dtype
        mesh = init_device_mesh(world.device.type, (world.size,))
        precision = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        layers = policy.get_submodule("model.layers").children()
        modules: list[Any] = [*layers, policy]
        for index, module in enumerate(modules):
            fully_shard(module, mesh=mesh, mp_policy=precision)
            module.set_gradient_divide_factor(1.0)
            if self._sum is None or world.size == 1:
                continue  # FSDP2 adds up the parts of one rank as it finds them, in order
            if ordered:
                reduce = _OrderedReduceScatter(self._sum, f"module {index}")
                module.set_custom_reduce_scatter(reduce)
            else:
                module.set_force_sum_reduction_for_comms(True)
        self._forgets = ordered and world.size > 1
        self._root: FSDPModule = policy  # pyright: ignore[reportAttributeAccessIssue]
        self._parameters = trained_parameters(policy)  # which are shards from here on

    def accumulate(self, num_sequences: int, size: int | None, backward: Backward) -> float:
        for round in self._sum.step() if self._sum is not None else self.rounds:
            if round.index and self._forgets:
                self.drop_gradients()  # zeros, that stood for a sum which was not complete
            batches = self.passes(num_sequences, size, round)
            for index, batch in enumerate(batches):
                self._root.set_requires_gradient_sync(index == len(batches) - 1)
                filler = range(num_sequences - 1, num_sequences)
                backward(batch or filler, not batch)
        return self.norm(self.gradients())

    def masters(self) -> dict[str, nn.Parameter]:
        shards = {n: nn.Parameter(p.detach().to_local()) for n, p in self._parameters.items()}
        return rounded(shards, self.dtype)

    def gradients(self) -> dict[str, Tensor]:
        found: dict[str, Any] = super().gradients()
        return {name: gradient.to_local() for name, gradient in found.items()}

    def whole(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        def gather(name: str) -> Tensor:
            shard = self._parameters[name]
            return DTensor.from_local(
                parts[name],
                shard.device_mesh,
                shard.placements,
                run_check=False,
                shape=shard.shape,
                stride=shard.stride(),
            ).full_tensor()

        return Gathered(list(parts), gather)

    def part(self, name: str, whole: Tensor) -> Tensor:
        shard = self._parameters[name]
        rows = -(-whole.shape[0] // self.world.size)
        own = whole[self.world.rank * rows : (self.world.rank + 1) * rows]
        assert own.shape == shard.to_local().shape
        return own


class _OrderedReduceScatter:
    """A sharded module's reduce-scatter, by `torch.distributed.fsdp`'s interface.

    Before the last round of a step it gives zeros, which `FSDP2.accumulate` drops.
    """

    def __init__(self, total: OrderedSum, key: str):
        self._total, self._key = total, key

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._total.add(self._key, self._total.by_slice(input_tensor))
        if self._total.in_last_round:
            output_tensor.copy_(self._total.take(self._key))
        else:
            output_tensor.zero_()
