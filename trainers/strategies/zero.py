"""ZeRO: each rank keeps a part of masters and moments (stage 1), gradients (2) and weights (3).

DeepSpeed's engine runs forward and backward passes, gathers and frees weights, steps AdamW over
this rank's part of the masters, and sends the new weights. In the place of its reduction of
gradients stands the ordered sum, which takes them as a backward pass finishes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import World
from rl_consistency.numerics.masters import rounded
from rl_consistency.trainers.strategies.strategy import (
    Backward,
    Gathered,
    Strategy,
    by_decay,
)

ZERO_OPTIMIZATION: dict[str, Any] = {
    "memory_efficient_linear": False,  # else torch.nn.functional.linear is replaced
    "reduce_bucket_size": 1 << 24,  # of the stock sum alone; DeepSpeed would keep 2 GB ready
}
"""What a run sets of DeepSpeed's section `zero_optimization`, beside the stage."""


class _Place(NamedTuple):
    """Where this rank has its part of a parameter."""

    partition: str
    offset: int
    """Where the part begins in the partition."""
    start: int
    """Where the part begins in the flattened parameter."""
    length: int


class Zero(Strategy):
    """Masters and moments lie in flat partitions; `pieces` finds the parameters in them.

    In stage 3 weights are gathered for each call of a module: all ranks run as many passes.
    """

    keeps_shards = True

    def __init__(
        self, world: World, order: PartOrder, policy: nn.Module, *, stage: int, ordered: bool = True
    ):
        super().__init__(world, order, policy, ordered=ordered)
        self.stage = stage
        self._gradients: dict[str, Tensor] = {}
        if ordered:
            self._collect(self._sum or OrderedSum(world, order))
        with ExitStack() as stack:
            stack.enter_context(_launched(world.device.type))
            groups = by_decay(self._parameters, self.decays)
            self.model, self._utils = _engine(policy, groups, self.stage, self.dtype)
            self._stack = stack.pop_all()
        zero = self.model.optimizer
        own = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        flat = getattr(zero, own)
        self._partitions = {f"partition {index}": part for index, part in enumerate(flat)}
        # A partition is of one group, of which the first is that of what decays.
        group_of = zero.sub_group_to_group_id if stage == 3 else range(len(flat))
        first = 0 if self.decays else -1
        self.decays = frozenset(n for i, n in enumerate(self._partitions) if group_of[i] == first)
        self._places = {name: self._place(name) for name in self._parameters}

    def close(self) -> None:
        super().close()
        self.model.destroy()
        self._stack.close()

    def accumulate(self, num_sequences: int, size: int | None, backward: Backward) -> float:
        filler = range(num_sequences - 1, num_sequences)
        with self.model.coalesce_grad_reduction(), ExitStack() as stack:
            if self.ordered:  # only the stock sum leaves DeepSpeed's reduction its gradients
                stack.callback(super().drop_gradients)
            stack.callback(setattr, self, "_gives", False)
            for round in self._buckets.step() if self.ordered else self.rounds:
                batches = self.passes(num_sequences, size, round)
                if self.stage < 3:  # no rank waits for another's pass
                    batches = list(filter(None, batches))
                for index, batch in enumerate(batches):
                    self._gives = self.ordered and index == len(batches) - 1
                    backward(batch or filler, not batch)
        if not self.ordered:
            self._gradients = {name: self._stock_sum(name) for name in self._parameters}
            return self.norm(self._gradients)
        norm = self.norm(self._buckets.take())
        for name, gradient in self._buckets.gather():
            self._gradients[name] = self.part(name, gradient).clone()
        return norm

    def backward(self, loss: Tensor) -> None:
        # The stock sum is a mean.
        self.model.backward(loss if self.ordered else loss * self.world.size, scale_wrt_gas=False)

    def masters(self) -> dict[str, nn.Parameter]:
        return rounded(self._partitions, self.dtype)

    def gradients(self) -> dict[str, Tensor]:
        if not self._gradients:
            raise ValueError("there is no gradient: accumulate() computes it.")
        return {name: self._gradients[name] for name in self._parameters}

    def drop_gradients(self) -> None:
        self._gradients = {}

    def update(
        self, optimizer: Any, masters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
    ) -> None:
        for name, parameter in self._parameters.items():
            if self.stage == 3:
                room = parameter.ds_tensor.numel() - len(gradients[name])
                self._utils.safe_set_local_grad(parameter, pad(gradients[name], (0, room)))
            else:
                self._utils.safe_set_full_grad(parameter, self._spread(name, gradients[name]))
        zero = self.model.optimizer
        if zero.optimizer is not optimizer:
            zero.optimizer = optimizer
            zero._hp_optimizer_states_linked = False  # else it keeps the moments of the one before
        self.model.step()
        assert self.model.was_step_applied()

    def pieces(self, cut: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = {name: (cut[place.partition], place) for name, place in self._places.items()}
        return {
            name: part.narrow(0, place.offset, place.length) if part.dim() else part
            for name, (part, place) in parts.items()
        }

    def whole(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        def gather(name: str) -> Tensor:
            whole = self._spread(name, parts[name])
            with self.world.naming(f"{name}: all-reduce"):
                dist.all_reduce(whole.view(torch.int32))  # as integers -0.0 stays what it is
            return whole

        return Gathered(list(self._parameters), gather)

    def part(self, name: str, whole: Tensor) -> Tensor:
        place = self._places[name]
        return whole.reshape(-1)[place.start : place.start + place.length]

    def _spread(self, name: str, part: Tensor) -> Tensor:
        """A tensor of the parameter's shape with this rank's part in its place, else zero."""
        whole = torch.zeros(self.shapes[name], device=part.device)
        self.part(name, whole).copy_(part)
        return whole

    def _place(self, name: str) -> _Place:
        parameter = self._parameters[name]
        if self.stage == 3:
            own = self._utils.safe_get_local_fp32_param(parameter)
            start = self.world.rank * len(own)
        elif (mapping := parameter._hp_mapping) is not None:
            own, start = mapping.get_hp_fragment(), mapping.lp_fragment_address.start
        else:
            return _Place(next(iter(self._partitions)), 0, 0, 0)
        (key,) = (
            key
            for key, partition in self._partitions.items()
            if partition.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        )
        offset = own.storage_offset() - self._partitions[key].storage_offset()
        length = max(0, min(len(own), self.numels[name] - start))  # what is beyond is padding
        return _Place(key, offset, min(start, self.numels[name]), length)

    def _stock_sum(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if self.stage == 3:
            return self._utils.safe_get_local_grad(parameter)[: self._places[name].length].clone()
        return self.part(name, self._utils.safe_get_full_grad(parameter)).clone()


def _engine(
    policy: nn.Module, groups: Sequence[Mapping[str, Any]], stage: int, dtype: torch.dtype
) -> tuple[Any, Any]:
    """DeepSpeed's engine around the policy, and its functions for single parameters."""
    import deepspeed
    import deepspeed.ops

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **ZERO_OPTIMIZATION},
    }
    if dtype == torch.bfloat16:
        settings |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    # The partitions are made for an optimizer; `update` puts that of the run in its place.
    given = [{"params": list(group.values())} for group in groups]
    placeholder = torch.optim.AdamW(given, foreach=False)
    # Else a first run on a CPU compiles a shared-memory all-reduce for more than a minute.
    deepspeed.ops.__compatible_ops__ = {}  # pyright: ignore[reportAttributeAccessIssue]
    engine, *_ = deepspeed.initialize(model=policy, optimizer=placeholder, config=settings)
    return engine, deepspeed.utils


@contextmanager
def _launched(device: str) -> Iterator[None]:
    """What DeepSpeed looks for in each step, also where no launcher gave it."""
    given = {"DS_ACCELERATOR": device, "LOCAL_RANK": "0"}
    added = given.keys() - os.environ.keys()
    os.environ |= {name: given[name] for name in added}
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
