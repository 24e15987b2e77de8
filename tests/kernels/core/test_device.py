import pytest
import torch

from rl_consistency.kernels.core.device import dense_rows, takes_descriptors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48,), (5, 48), (5, 3, 48)])
def test_descriptors_take_dense_rows_on_aligned_lines(shape, dtype):
    assert takes_descriptors(torch.zeros(shape, dtype=dtype))


def test_descriptors_take_a_view_whose_rows_stay_on_aligned_lines():
    assert takes_descriptors(torch.zeros(5, 6, 16).transpose(0, 1), torch.zeros(5, 48)[1:, 8:])


@pytest.mark.parametrize(
    "refused",
    [
        torch.zeros(48, 5).t(),
        torch.zeros(5, 50),
        torch.zeros(5, 48)[:, 1:],
        torch.zeros(5, 48, dtype=torch.bfloat16)[:, 4:],
        torch.zeros(5, 3, 50)[..., :48],
        torch.zeros(1, 48).expand(5, 48),
        torch.zeros(96).as_strided((5, 48), (8, 1)),
    ],
    ids=["columns", "pitch", "start", "16-bit start", "inner pitch", "expanded", "overlapping"],
)
def test_descriptors_refuse_what_they_cannot_address(refused):
    assert not takes_descriptors(torch.zeros(5, 48), refused)


def test_dense_rows_copies_only_what_is_not_dense():
    dense, columns = torch.zeros(5, 48)[:, 3:], torch.arange(15.0).view(3, 5).t()
    assert dense_rows(dense) is dense
    assert dense_rows(columns).stride() == (3, 1)
    assert torch.equal(dense_rows(columns), columns)
