import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.reduction.gradient_norm import gradient_norm
from rl_consistency.kernels.reduction.tree_sum import tree_sum
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.tolerances import assert_within

SHAPES = ((40, 33), (17,), (1, 1), (64, 64))


def gradients(dtype=torch.float32):
    return [probe(shape, dtype, seed=i) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_fp64(dtype):
    exact = torch.cat([g.double().flatten() for g in gradients(dtype)]).norm()
    assert gradient_norm(gradients(dtype)).dtype == torch.float32
    assert_within(gradient_norm(gradients(dtype)), exact, "reduction", torch.float32)


def test_tensors_are_added_in_the_order_given():
    total = torch.zeros(())
    for gradient in gradients():
        total = total + tree_sum((gradient * gradient).flatten())
    assert same_bytes(gradient_norm(gradients()), total.sqrt())
    assert same_bytes(gradient_norm(iter(gradients())), total.sqrt())


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_strides_do_not_matter(threads):
    before = torch.get_num_threads()
    big = [probe((700, 300)), probe((50, 30), seed=1)]
    expected = gradient_norm(big)
    torch.set_num_threads(threads)
    try:
        assert same_bytes(gradient_norm(big), expected)
        assert same_bytes(gradient_norm([g.t().contiguous().t() for g in big]), expected)
    finally:
        torch.set_num_threads(before)


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
