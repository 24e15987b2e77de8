import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.gradient_norm import gradient_norm
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.parity.bytes import same_bytes

SHAPES = ((40, 33), (17,), (1, 1), (64, 64))


def gradients(dtype=torch.float32):
    return [probe(shape, dtype, seed=i) for i, shape in enumerate(SHAPES)]


def test_tensors_are_added_in_the_order_given():
    total = torch.zeros(())
    for gradient in gradients():
        total = total + tree_sum((gradient * gradient).flatten())
    assert same_bytes(gradient_norm(gradients()), total.sqrt())
    assert same_bytes(gradient_norm(iter(gradients())), total.sqrt())


def test_norm_of_nothing_is_zero():
    assert same_bytes(gradient_norm([]), torch.zeros(()))
    assert same_bytes(gradient_norm([torch.zeros(0)]), torch.zeros(()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_gives_a_non_finite_norm(bad):
    assert not torch.isfinite(gradient_norm([*gradients(), torch.tensor([1.0, bad])]))


def test_no_graph_is_kept():
    assert not gradient_norm([probe((3, 3)).requires_grad_()]).requires_grad


def test_another_order_of_the_tensors_fails_the_same_check():
    differing = [
        not same_bytes(
            gradient_norm([probe((50,), seed=10 * s + i) for i in range(6)]),
            gradient_norm([probe((50,), seed=10 * s + i) for i in reversed(range(6))]),
        )
        for s in range(10)
    ]
    assert any(differing)
