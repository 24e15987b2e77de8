"""Draws and logprobs of the CUDA path in Triton's interpreter, against the same by torch."""

import pytest
import torch

from rl_consistency.kernels.sampling import vocabulary_triton
from rl_consistency.kernels.sampling.op import SamplingRows, triton_distribution
from tests.kernels.sampling.references import LAST, by_torch, uniforms_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SETTINGS = [{}, {"temperature": 0.7}, {"temperature": 1.4, "top_k": 9}, {"temperature": 0.0}]


def probe_logits(rows, vocabulary):
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, ::7] *= 6.0
    return logits


def rows_of(count, settings=SETTINGS):
    return SamplingRows.concatenate(
        [SamplingRows.uniform(1, **settings[i % len(settings)]) for i in range(count)]
    )


def agrees(values, rows, uniforms):
    one = triton_distribution(values, rows)
    token_ids = one.draw(uniforms)
    expected_ids, expected_logprobs = by_torch(one, uniforms)
    logprobs = one.logprobs_of(token_ids)
    return token_ids.equal(expected_ids) and (
        logprobs.view(torch.int32).equal(expected_logprobs.view(torch.int32))
    )


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("settings", [SETTINGS, [{}], [{"temperature": 0.3}]])
def test_tokens_and_logprobs_are_those_of_the_torch_definition(vocabulary, settings):
    assert agrees(probe_logits(8, vocabulary), rows_of(8, settings), uniforms_of(8))


def test_draws_over_the_whole_range_of_uniforms():
    values = probe_logits(1, 140).expand(90, -1)
    uniforms = (torch.arange(90, dtype=torch.float64) + 0.5) / 90
    assert agrees(values.contiguous(), SamplingRows.uniform(90, temperature=3.0), uniforms)


def test_minus_infinity_is_never_drawn():
    values = torch.full((3, 300), -torch.inf)
    values[:, 200] = torch.tensor([5.0, -3.0, 0.0])
    one = triton_distribution(values, SamplingRows.uniform(3))
    uniforms = torch.tensor([0.0, 0.5, LAST], dtype=torch.float64)
    assert one.draw(uniforms).tolist() == [200] * 3
    assert one.logprobs_of(torch.full((3,), 200)).tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_logits_give_token_0_with_a_nan_logprob_and_leave_other_rows_alone(bad):
    values, rows, uniforms = probe_logits(8, 300), rows_of(8), uniforms_of(8)
    clean = triton_distribution(values, rows)
    values = values.clone()
    values[::2, 250] = bad
    values[4] = -torch.inf
    one = triton_distribution(values, rows)
    token_ids = one.draw(uniforms)
    logprobs = one.logprobs_of(token_ids)
    assert token_ids[::2].eq(0).all() and logprobs[::2].isnan().all()
    assert token_ids[1::2].equal(clean.draw(uniforms)[1::2])
    assert logprobs[1::2].equal(clean.logprobs_of(token_ids)[1::2])


def test_an_id_outside_the_vocabulary_has_the_logprob_nan():
    one = triton_distribution(probe_logits(3, 50), SamplingRows.uniform(3))
    assert one.logprobs_of(torch.tensor([50, -1, 49])).isnan().tolist() == [True, True, False]


def test_a_row_does_not_depend_on_its_neighbours():
    values, rows, uniforms = probe_logits(8, 300), rows_of(8), uniforms_of(8)
    together = triton_distribution(values, rows).draw(uniforms)
    for i in range(0, 8, 3):
        alone = triton_distribution(values[i : i + 1], rows.select(slice(i, i + 1)))
        assert alone.draw(uniforms[i : i + 1]).equal(together[i : i + 1])


def test_sampling_reads_what_cuda_reduced():
    values, rows, uniforms = probe_logits(8, 300), rows_of(8), uniforms_of(8)
    one = triton_distribution(values, rows)
    token_ids, logprobs = one.sample(uniforms)
    assert token_ids.equal(one.draw(uniforms)) and logprobs.equal(one.logprobs_of(token_ids))
    assert "scaled" not in one.__dict__  # nothing of the logits' size was written


def test_no_rows_draw_no_tokens():
    one = triton_distribution(torch.zeros(0, 9), SamplingRows.uniform(0))
    assert one.draw(torch.zeros(0, dtype=torch.float64)).shape == (0,)
    assert one.logprobs_of(torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_uniforms_of_another_form_are_refused():
    one = triton_distribution(probe_logits(3, 9), SamplingRows.uniform(3))
    for bad in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="need fp64, one per row"):
            one.draw(bad)


def test_numbers_of_rows_share_a_compiled_kernel():
    """Else a new process compiles three: one row, multiples of 16, and others."""
    kernels = [vocabulary_triton.uniforms_kernel, vocabulary_triton.weights_kernel]
    kernels += [vocabulary_triton.pick_kernel, vocabulary_triton.logprobs_kernel]
    for kernel in kernels:
        assert "num_rows" in (kernel.kwargs["do_not_specialize"] or ()), kernel.__name__
