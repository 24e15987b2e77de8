"""The gather's logic, in the interpreter."""

import pytest
import torch

from rl_consistency.cases.probe import probe
from rl_consistency.kernels.pointwise.embedding import embedding_fwd
from rl_consistency.parity.bytes import same_bytes

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where there is no NVIDIA GPU"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_the_rows(dtype):
    weight, ids = probe((7, 40), dtype), torch.tensor([6, 0, 3, 3])
    assert same_bytes(embedding_fwd(ids, weight), weight[ids])
    assert same_bytes(embedding_fwd(ids, weight.t().contiguous().t()), weight[ids])


def test_an_id_outside_the_table_gives_a_row_of_nan():
    y = embedding_fwd(torch.tensor([7, 2, -1]), probe((7, 40)))
    assert y.isnan().all(dim=1).tolist() == [True, False, True]


def test_no_tokens_give_no_rows():
    assert embedding_fwd(torch.zeros(0, dtype=torch.int64), probe((7, 40))).shape == (0, 40)
