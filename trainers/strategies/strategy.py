"""How the processes of a run share the policy, its gradient and its optimizer.

Every strategy ends an optimizer step with the same weights, in the order of `ordered_sum`. They
differ in what a rank keeps: see `Replicated`, `fsdp2` and `zero`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp

from rl_consistency.distributed.gradient_norm import sharded_gradient_norm
from rl_consistency.distributed.gradient_parts import PartOrder, Round
from rl_consistency.distributed.ordered_sum import GradientBuckets, OrderedSum
from rl_consistency.distributed.world import World
from rl_consistency.kernels.reduction.sums import gradient_norm
from rl_consistency.numerics.masters import round_into, step_masters
from rl_consistency.parity.bytes import bits
from rl_consistency.parity.gradients import GradientReport, RegroupingResult
from rl_consistency.trainers.losses import ClippedLoss, LossOutput

T = TypeVar("T")
M = TypeVar("M", Tensor, LossOutput, ClippedLoss)
Backward = Callable[[range, bool], None]
"""The backward pass of some sequences of an optimizer step, by their indices in it. If the second
argument is True they are filler, whose loss has weight zero."""


class Strategy(ABC):
    """The ranks of a run. One process with one part takes none of the machinery of several."""

    keeps_shards = False
    """Whether a rank keeps parts of tensors, and takes part in each forward and backward pass."""

    def __init__(self, world: World, order: PartOrder, policy: nn.Module, *, ordered: bool = True):
        """Every rank calls it, with a patched policy whose gradients are fp32.

        If not `ordered`, each rank has one part, and the strategy's stock sum adds them.
        """
        order = order if ordered else PartOrder(world.size)
        self.world, self.order, self.policy, self.ordered = world, order, policy, ordered
        self.model: Any = policy
        """What forward passes call: the policy, or the outermost wrapper around it."""
        self.dtype: torch.dtype = next(policy.parameters()).dtype
        """What forward passes compute with. Masters are fp32."""
        self._parameters: dict[str, Any] = trained_parameters(policy)
        self.shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self.numels = {name: p.numel() for name, p in self._parameters.items()}
        self.decays = decaying(policy)
        """Names of the masters that weight decay shrinks."""
        self._sum = OrderedSum(world, order) if order.count > 1 else None
        self._gives, self._hooks = False, []

    @property
    def rounds(self) -> list[Round]:
        """Rounds of a step; one process with one part has one."""
        return self._sum.rounds if self._sum else self.order.rounds(0, 1, 1)

    @abstractmethod
    def accumulate(self, num_sequences: int, size: int | None, backward: Backward) -> float:
        """Compute the gradient of an optimizer step, which `gradients` then has; returns its norm.

        Args:
            num_sequences: of the step, on all ranks together.
            size: most sequences of a backward pass; None is a whole part.
            backward: called for each of this rank's passes.

        Raises: ConsistencyError on every rank if a rank did not give a gradient.
        """

    @abstractmethod
    def masters(self) -> dict[str, nn.Parameter]:
        """What an optimizer updates on this rank: fp32, with the values that forward passes
        compute with. `pieces` finds the parameters in them."""

    def gradients(self) -> dict[str, Tensor]:
        """This rank's fp32 gradients, cut as `pieces` are. ValueError if one is missing."""
        if missing := [name for name, p in self._parameters.items() if p.grad is None]:
            raise ValueError(f"parameter {missing[0]} has no gradient: it must be in the loss.")
        return {name: parameter.grad.float() for name, parameter in self._parameters.items()}

    def drop_gradients(self) -> None:
        """The next step starts from zero."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def update(
        self, optimizer: Any, masters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
    ) -> None:
        """Step an optimizer over the masters, with gradients that are cut as `pieces` are. Forward
        passes then compute with the masters, rounded to `dtype`."""
        step_masters(optimizer.step, masters.values(), (gradients[name] for name in masters))

    def pieces(self, cut: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Views of this rank's parts, by parameter name, in tensors that are cut as `masters` are;
        a tensor of one number stands for all of its parameters."""
        return cut

    def whole(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors from `pieces`. Every rank calls it and reads all of them in one order."""
        return parts

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What `pieces` has of a whole tensor."""
        return whole

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, in this thread: with one of autograd's own, Python functions
        would run on two cores in turn."""
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()

    def close(self) -> None:
        """Take off the policy what this has put on it."""
        for hook in self._hooks:
            hook.remove()

    def _collect(self, total: OrderedSum) -> None:
        """While `_gives` is set, a backward pass gives each finished gradient to the buckets."""
        self._buckets = GradientBuckets(total, self.shapes)
        for name, parameter in self._parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(self._give, name))
            self._hooks.append(hook)

    def _give(self, name: str, parameter: Tensor) -> None:
        if self._gives:
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            self._buckets.put(name, gradient)

    def own(self, num_sequences: int) -> list[int]:
        """Indices of the sequences that this rank computes of an optimizer step."""
        parts = self.order.parts(num_sequences)
        return [i for r in self.rounds if r.part is not None for i in parts[r.part]]

    def passes(self, num_sequences: int, size: int | None, round: Round) -> list[range]:
        """The sequences of this rank's backward passes in a round; an empty range is filler."""
        size = size or -(-num_sequences // self.order.count)
        if self.order.count == 1:
            size = min(size, num_sequences)
        return self.order.micro_batches(num_sequences, round.part, size)

    def norm(self, parts: Mapping[str, Tensor]) -> float:
        """The norm of gradients of which each element is on one rank. Every rank calls it."""
        if self.order.count == 1:
            return float(gradient_norm(list(parts.values())))
        return sharded_gradient_norm(self.world, parts, self.numels)

    def check(self, num_sequences: int, size: int, backward: Backward) -> GradientReport:
        """Compare the gradient there is with that of the same step under another micro-batch."""
        trained = self.gradients()
        self.drop_gradients()
        largest = max(map(len, self.order.parts(num_sequences)))
        other = min(1 if size > 1 else 2, largest)
        self.accumulate(num_sequences, other, backward)
        again = self.gradients()
        counts = {n: int((bits(again[n]) != bits(g)).sum()) for n, g in trained.items()}
        bad = sum(int((~g.isfinite()).sum()) for g in again.values())
        nonzero = sum(int((g != 0).sum()) for g in again.values())
        found = [*(counts.get(name, 0) for name in self.numels), nonzero, bad]
        if self.keeps_shards:
            found = self.world.reduce("gradient check", found, ReduceOp.SUM)
        *found, nonzero, bad = found
        differing = dict(zip(self.numels, found, strict=True))
        # Parts of one sequence have no other cut.
        name = "run again" if other == min(size, largest) else f"micro-batch {other}"
        result = RegroupingResult(name, differing)
        return GradientReport((result,), sum(self.numels.values()), nonzero, bad)

    def shared(self, what: str, own: Mapping[int, T]) -> list[T]:
        """The values (plain data) of all ranks, in the order of their keys; each is on one rank."""
        found = self.world.gather(what, dict(own))
        merged = {key: value for part in found for key, value in part.items()}
        return [merged[key] for key in sorted(merged)]

    def shared_tensors(self, what: str, own: Mapping[int, M]) -> list[M]:
        """`shared` for values that may lie on the device; they travel between hosts."""
        if self.world.size == 1:
            return self.shared(what, own)
        hosted = {key: value.to("cpu") for key, value in own.items()}
        return [value.to(self.world.device) for value in self.shared(what, hosted)]


def trained_parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters that have a gradient, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


_KEPT = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def decaying(module: nn.Module) -> frozenset[str]:
    """Names of the trained parameters that weight decay shrinks: all but biases and norms' weights.

    Source: `Trainer.get_decay_parameter_names` of transformers 5, which TRL's trainers have too.
    """
    norms = [f"{name}." for name, m in module.named_modules() if isinstance(m, nn.LayerNorm)]
    names = trained_parameters(module)
    return frozenset(n for n in names if not (_KEPT.search(n) or n.startswith(tuple(norms))))


def by_decay(parts: Mapping[str, T], decays: frozenset[str]) -> list[dict[str, T]]:
    """The parts that decay, then the others, as groups of an optimizer; none is empty."""
    found = ({n: p for n, p in parts.items() if (n in decays) == decay} for decay in (True, False))
    return [group for group in found if group]


class Gathered(Mapping[str, Tensor]):
    """Whole tensors, each gathered when it is read."""

    def __init__(self, names: list[str], gather: Callable[[str], Tensor]):
        self._names, self._gather = names, gather

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Replicated(Strategy):
    """The gradient is summed in order, slice by slice, and gathered into `.grad`."""

    def __init__(self, world: World, order: PartOrder, policy: nn.Module, *, ordered: bool = True):
        super().__init__(world, order, policy, ordered=ordered)
        if self._sum is not None and ordered:
            self._collect(self._sum)

    def accumulate(self, num_sequences: int, size: int | None, backward: Backward) -> float:
        if self._sum is None:
            for batch in self.passes(num_sequences, size, self.rounds[0]):
                backward(batch, False)
            return self.norm(self.gradients())
        if not self.ordered:
            return self._stock_sum(num_sequences, size, backward)
        for round in self._buckets.step():
            if round.part is None:
                continue
            *others, last = filter(None, self.passes(num_sequences, size, round))
            for batch in others:
                backward(batch, False)
            self._gives = True
            try:
                backward(last, False)
            finally:
                self._gives = False
        norm = self.norm(self._buckets.take())
        for name, gradient in self._buckets.gather():
            self._parameters[name].grad = gradient
        return norm

    def _stock_sum(self, num_sequences: int, size: int | None, backward: Backward) -> float:
        for round in self.rounds:
            for batch in filter(None, self.passes(num_sequences, size, round)):
                backward(batch, False)
        gradients = self.gradients()
        for name, gradient in gradients.items():
            with self.world.naming(f"gradient {name}: all-reduce"):
                dist.all_reduce(gradient)
        return self.norm(gradients if self.world.rank == 0 else {})

    def masters(self) -> dict[str, nn.Parameter]:
        return {  # an fp32 weight is its own master
            name: w if w.dtype == torch.float32 else nn.Parameter(w.detach().float())
            for name, w in self._parameters.items()
        }

    def update(
        self, optimizer: Any, masters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
    ) -> None:
        super().update(optimizer, masters, gradients)
        round_into(self._parameters.values(), (masters[name] for name in self._parameters))
