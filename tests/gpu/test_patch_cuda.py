"""A patched Hugging Face model on a GPU: live, the same bytes in every layout, reversible."""

import pytest
import torch

from rl_consistency.models.packing import PackedBatch
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.gradients import check_gradients
from rl_consistency.parity.stock import shadow_stock_path
from tests.comparison import assert_within

pytestmark = pytest.mark.gpu

FAMILIES = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 70},
    "qwen2": {},
}
DTYPES = [torch.bfloat16, torch.float32]
LENGTHS = (1, 2, 31, 150, 16, 83)
PROMPTS = (1, 1, 7, 20, 3, 40)


@pytest.fixture
def build(small_model):
    def build(family="qwen3", dtype=torch.bfloat16):
        return small_model(dtype, family, **FAMILIES[family])

    return build


def tokens_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 331, (n,), generator=generator).tolist() for n in lengths]


def scored(model, inputs, prompts=PROMPTS):
    return token_logprobs(model, inputs, prompt_lengths=prompts)


def digest_of_gradients(model):
    return parameter_digest({name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_patch_proves_itself_live(family, dtype, build):
    model = build(family, dtype)
    with patch(model) as session:
        session.verify()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_have_the_same_bytes_however_the_batch_is_cut(family, build):
    sequences, tokens = tokens_of(), sum(LENGTHS) - sum(PROMPTS)
    keep = [i for i, (n, p) in enumerate(zip(LENGTHS, PROMPTS)) if n > p]
    with patch(model := build(family)):
        report = check_gradients(
            model,
            [sequences[i] for i in keep],
            prompt_lengths=[PROMPTS[i] for i in keep],
            loss=lambda part, group: -(part.logprobs / tokens).sum(),
        )
    assert report.elements > 0
    report.require_passed()


def test_logprobs_are_close_to_those_of_the_cpu(build):
    sequences = tokens_of()
    with patch(gpu := build(dtype=torch.float32)), torch.no_grad():
        ours = scored(gpu, sequences).logprobs
    with patch(cpu := build(dtype=torch.float32).cpu()), torch.no_grad():
        theirs = scored(cpu, sequences).logprobs
    assert_within(ours.cpu(), theirs, "reduction", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shadow_drifts_is_timed_and_leaves_weights_and_gradients_alone(dtype, build):
    sequences = tokens_of((31, 150, 16, 83))
    prompts = (7, 20, 3, 40)
    with patch(model := build(dtype=dtype)) as session:
        scored(model, sequences, prompts=prompts).logprobs.sum().backward()
        before = parameter_digest(model), digest_of_gradients(model)
        shadow = shadow_stock_path(session, sequences, prompts, micro_batch_size=2)
        assert (parameter_digest(model), digest_of_gradients(model)) == before
        session.verify()
    assert shadow.drift.tokens == sum(map(len, sequences)) - sum(prompts)
    assert shadow.drift.mismatched_tokens > 0 and shadow.drift.nonfinite_tokens == 0
    assert shadow.rollout_seconds > 0 and shadow.training_seconds > 0


def test_the_fingerprint_names_the_gpu_and_what_compiles_for_it():
    difference = fingerprint("cuda").difference(fingerprint("cpu"))
    assert any(torch.cuda.get_device_name() in line for line in difference)
    names = {line.partition(":")[0] for line in difference}
    assert {"device", "cuda_capability", "cuda_runtime", "triton"} <= names
    assert fingerprint("cuda") == fingerprint(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("layout", ["lists", "packed"])
def test_a_training_step_never_waits_for_the_gpu(build, layout):
    model, sequences = build(), tokens_of()
    given = sequences if layout == "lists" else PackedBatch.from_sequences(sequences, "cuda")

    def step():
        result = scored(model, given)
        (result.logprobs.sum() + result.entropy.sum()).backward()

    with patch(model, grad_dtype=torch.float32):
        for _ in range(2):  # certificates are made, and the rotary table
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            model.zero_grad()
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
