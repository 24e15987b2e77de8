"""Several processes that hold the whole policy each: who computes which sequences, and their sum.

Every rank has all weights, moments and gradients; a rank computes the forward and backward passes
of its own leaves. No wrapper stands around the model, so a forward pass sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from rl_consistency.distributed.gradient_buckets import GradientBuckets
from rl_consistency.distributed.gradient_norm import sharded_gradient_norm
from rl_consistency.distributed.leaves import LeafOrder
from rl_consistency.distributed.ordered_sum import OrderedSum
from rl_consistency.distributed.world import World
from rl_consistency.trainers.losses import LossOutput

T = TypeVar("T")
M = TypeVar("M", Tensor, LossOutput)


class Replicated:
    """The ranks of a run. One process with one leaf takes none of the machinery of several."""

    def __init__(self, world: World, order: LeafOrder, model: nn.Module):
        """Every rank calls it, with a patched model whose gradients are fp32."""
        self.world, self.order = world, order
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._gives = False
        self._hooks = []
        if order.count > 1:
            self._sum = OrderedSum(world, order)
            shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
            self._buckets = GradientBuckets(self._sum, shapes)
            for name, parameter in self._parameters.items():
                hook = self._giver(name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def own(self, num_sequences: int) -> list[int]:
        """Indices of the sequences that this rank computes of an optimizer step."""
        if self.order.count == 1:
            return list(range(num_sequences))
        leaves = self.order.leaves(num_sequences)
        return [i for r in self._sum.rounds if r.leaf is not None for i in leaves[r.leaf]]

    def accumulate(
        self, num_sequences: int, micro_batch_size: int | None, backward: Callable[[range], None]
    ) -> float | None:
        """Leave the gradient of an optimizer step in `.grad`, the same on every rank.

        Args:
            num_sequences: of the step, on all ranks together.
            micro_batch_size: most sequences of a backward pass; None is a whole leaf.
            backward: the backward pass of some of the sequences, by their indices in the step.

        Returns its norm; None with one leaf, whose norm the optimizer takes in one process' order.

        Raises: ConsistencyError on every rank if a rank did not give a gradient.
        """
        size = micro_batch_size or -(-num_sequences // self.order.count)
        if self.order.count == 1:
            for start in range(0, num_sequences, size):
                backward(range(start, min(start + size, num_sequences)))
            return None
        for round in self._buckets.step():
            if round.leaf is None:
                continue
            batches = self.order.micro_batches(num_sequences, round.leaf, size)
            *others, last = filter(None, batches)
            for batch in others:
                backward(batch)
            self._gives = True
            try:
                backward(last)
            finally:
                self._gives = False
        numels = {name: p.numel() for name, p in self._parameters.items()}
        norm = sharded_gradient_norm(self.world, self._buckets.take(), numels)
        for name, gradient in self._buckets.gather().items():
            self._parameters[name].grad = gradient
        return norm

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

    def _giver(self, name: str) -> Callable[[Tensor], None]:
        def give(parameter: Tensor) -> None:
            if self._gives:
                assert parameter.grad is not None
                gradient, parameter.grad = parameter.grad, None
                self._buckets.put(name, gradient)

        return give
