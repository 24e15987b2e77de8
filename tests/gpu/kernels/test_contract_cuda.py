"""What every op promises, on a GPU: the tests of `tests/kernels/test_contract.py`."""

import pytest
import torch

from rl_consistency.cases.case import TINY_SHAPES, Heads, OpShapes, Setting
from tests.kernels.test_contract import (  # noqa: F401
    test_a_result_that_depends_on_the_number_of_rows_fails_the_same_check,
    test_every_other_way_gives_the_same_bytes,
    test_gradients_do_not_depend_on_the_cut,
    test_gradients_that_autograd_adds_up_fail_the_same_check,
    test_no_rows_give_no_rows_and_zero_gradients,
    test_output_and_gradients_match_fp64,
    test_rows_do_not_depend_on_the_batch,
    test_strides_and_repetition_do_not_matter,
)

pytestmark = pytest.mark.gpu

LARGE = OpShapes(
    name="large",
    linear=((1024, 1000), (4096, 1024)),
    norm_widths=(4096, 1000),
    attention=(Heads(16, 8, 128),),
    glu_width=3072,
    hidden_size=1024,
    vocab_size=3001,
)
"""Widths of several tiles, aligned for descriptors and not."""


@pytest.fixture(params=[TINY_SHAPES, LARGE], ids=["tiny", "large"])
def where(request):
    device = torch.device("cuda", torch.cuda.current_device())
    return Setting(dtype=torch.float32, device=device, shapes=request.param)
