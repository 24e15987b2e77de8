"""Outputs of vLLM, SGLang and Hugging Face's generate, read as data."""

from types import SimpleNamespace

import pytest
import torch

import rl_consistency
from rl_consistency.integrations.sampled import of_generate, of_sglang, of_trl_backend, of_vllm
from tests.integrations.trainers import loaded


def candidates(**logprobs):
    return {int(token[1:]): SimpleNamespace(logprob=value) for token, value in logprobs.items()}


def request(*samples):
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=t, logprobs=p) for t, p in samples])


def check_found(found, token_ids, logprobs):
    assert found.token_ids == token_ids
    assert [row.dtype for row in found.logprobs] == [torch.float32] * len(token_ids)
    assert [row.tolist() for row in found.logprobs] == logprobs


def test_all_samples_of_vllm_whose_token_is_not_the_most_likely():
    """Token ids are a tuple in some versions, and the others of `logprobs=1` stand beside them."""
    first = (5, 7), [candidates(t3=-0.5, t5=-1.0), candidates(t7=-2.0)]
    outputs = [request(first, ([3], [candidates(t3=-0.5)])), request(([], []))]
    expected = [[5, 7], [3], []], [[-1.0, -2.0], [-0.5], []]
    check_found(of_vllm(outputs), *expected)


def test_vllm_outputs_may_be_mappings():
    sample = {"token_ids": [5], "logprobs": [{5: {"logprob": -1.0, "rank": 1}}]}
    check_found(of_vllm([{"outputs": [sample]}]), [[5]], [[-1.0]])


def test_outputs_of_sglang():
    output = {"output_ids": [5, 7], "meta_info": {}}
    output["meta_info"]["output_token_logprobs"] = [[-1.0, 5, None], [-2.0, 7, "x"]]
    check_found(of_sglang(output), [[5, 7]], [[-1.0, -2.0]])
    check_found(of_sglang([output, output]), [[5, 7]] * 2, [[-1.0, -2.0]] * 2)


def test_generate_gives_the_logprobs_that_a_forward_gives(directory):
    model = loaded(directory).eval()
    ids = torch.tensor([[65, 66, 67], [68, 69, 70]])
    options = {"return_dict_in_generate": True, "output_scores": True, "temperature": 0.7}
    torch.manual_seed(0)
    output = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=6, **options)
    end = int(output.sequences[0, 5])  # the third token of the first row, as if it were an eos
    found = of_generate(output, [end, 258])
    assert len(found.token_ids[0]) == 3 and found.token_ids[0][-1] == end
    with torch.no_grad():
        logits = model(output.sequences).logits[:, 2:-1] / 0.7
    training = [
        rows[: len(tokens)].log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        for rows, tokens in zip(logits, found.token_ids, strict=True)
    ]
    report = rl_consistency.compare_logprobs(found.logprobs, training)
    assert report.tokens == sum(map(len, found.token_ids)) and report.max_abs_diff < 1e-4


def test_the_sampled_token_of_trl_s_backend_is_found_by_its_id():
    """TRL itself takes the first of them, which is another token where several were asked for."""
    logprobs = [[[-0.5, -1.0], [-2.0]]]
    found = of_trl_backend([[5, 7]], logprobs, [[[3, 5], [7]]])
    check_found(found, [[5, 7]], [[-1.0, -2.0]])
    check_found(of_trl_backend([[5, 7]], [[[-1.0], [-2.0]]], None), [[5, 7]], [[-1.0, -2.0]])
    with pytest.raises(ValueError, match=r"does not name; set vllm_generation\.logprobs = 0"):
        of_trl_backend([[5, 7]], logprobs, None)


def test_a_logprob_that_is_not_a_number_stays_and_is_counted():
    found = of_trl_backend([[5, 7]], [[[None], [-2.0]]], None)
    assert found.logprobs[0].isnan().tolist() == [True, False]
    report = rl_consistency.compare_logprobs(found.logprobs, [torch.tensor([-1.0, -2.0])])
    assert report.nonfinite_tokens == 1 and not report.passed


WRONG = {
    "vLLM, not asked": (
        lambda: of_vllm([request(([5], None))]),
        r"output 0 has no logprobs; ask for them by SamplingParams\(logprobs=0\)",
    ),
    "vLLM, another token": (
        lambda: of_vllm([request(([5], [candidates(t3=-0.5)]))]),
        "output 0 has no logprob of token 5, which it sampled",
    ),
    "vLLM, too few": (
        lambda: of_vllm([request(([5, 7], [candidates(t5=-0.5)]))]),
        "output 0 has 2 tokens and 1 logprobs",
    ),
    "SGLang, not asked": (
        lambda: of_sglang([{"output_ids": [5], "meta_info": {}}]),
        "output 0 has no logprobs; ask for them by return_logprob=True",
    ),
    "SGLang, other tokens": (
        lambda: of_sglang(
            {"output_ids": [5], "meta_info": {"output_token_logprobs": [(-1.0, 6, None)]}}
        ),
        "output 0 has logprobs of other tokens than its output_ids",
    ),
    "generate, a tensor": (
        lambda: of_generate(torch.zeros(1, 3), 2),
        "generate has no logprobs; ask for them by return_dict_in_generate=True, output_scores",
    ),
    "generate, beams": (
        lambda: of_generate(SimpleNamespace(scores=(1,), beam_indices=torch.zeros(1)), 2),
        "searched with beams.*num_beams=1",
    ),
    "TRL's backend, not asked": (
        lambda: of_trl_backend([[5]], None, None),
        r"vllm_generation\.generate has no logprobs; .* vllm_generation\.logprobs = 0",
    ),
}


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_outputs_without_the_logprobs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
