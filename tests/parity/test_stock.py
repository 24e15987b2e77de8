import inspect

import pytest
import torch
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.parity import stock
from rl_consistency.parity.digest import each_digest, parameter_digest
from rl_consistency.parity.stock import BATCH, shadow_stock_path, within_budget
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.models.patch.tiny_models import tiny

PROMPTS = [4, 7, 1, 5, 2]
LENGTHS = [9, 30, 12, 6, 21]


def measure_stock_drift(session, sequences, prompts, **options):
    return shadow_stock_path(session, sequences, prompts, **options).drift


def build(family="qwen3", dtype=torch.float32):
    return tiny(family, vocab_size=64, initializer_range=0.2).to(dtype).train()


def digests_of_gradients(model):
    return each_digest({name: p.grad for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture
def sides(monkeypatch):
    """Both sides' logprobs as `measure_stock_drift` compares them."""
    seen = []
    real = stock.compare_logprobs

    def compare(decoded, scored, **options):
        seen.append((decoded, scored))
        return real(decoded, scored, **options)

    monkeypatch.setattr(stock, "compare_logprobs", compare)
    return seen


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
def test_the_stock_path_drifts_a_little(sequences, family, dtype, limit):
    model = build(family, dtype)
    with patch(model) as session:
        report = measure_stock_drift(session, sequences, PROMPTS)
    assert report.tokens == sum(LENGTHS) - sum(PROMPTS)
    assert report.mismatch_fraction > 0.1 and report.nonfinite_tokens == 0
    assert 0 < report.max_abs_diff < limit


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_version_that_calls_the_cache_otherwise_is_given_it_by_that_name(sequences, monkeypatch):
    """transformers 5.24 renames past_key_values, which 5.40 will not know."""
    model, given = build(), []
    stock_class = type(model)
    forward = stock_class.forward

    def renamed(self, input_ids, attention_mask=None, position_ids=None, cache=None, **kwargs):
        given.append(cache)
        assert "past_key_values" not in kwargs
        name = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
        kwargs = {"position_ids": position_ids, name: cache, **kwargs}
        return forward(self, input_ids, attention_mask, **kwargs)

    with patch(model) as session:
        plain = measure_stock_drift(session, sequences, PROMPTS)
        monkeypatch.setattr(stock_class, "forward", renamed)
        assert measure_stock_drift(session, sequences, PROMPTS) == plain
    assert sum(cache is not None for cache in given) == max(
        length - prompt for length, prompt in zip(LENGTHS, PROMPTS)
    )


@pytest.mark.parametrize(
    ("completions", "steps", "kept"),
    [
        ([3, 5, 2], None, [3, 5, 2]),
        ([3, 5, 2], 5, [3, 5, 2]),
        ([3, 5, 2], 4, [3, 4, 2]),
        ([16] * 200, 64, [16] * 200),
        ([16] * 200, 63, [16] * 3 * BATCH),
        ([16] * 199 + [300], 256, [16] * BATCH),
        ([0, 0], 4, [0, 0]),
    ],
)
def test_a_budget_takes_whole_batches_or_the_beginning_of_one(completions, steps, kept):
    found = within_budget([[7] * (4 + n) for n in completions], [4] * len(completions), steps)
    assert [len(sequence) - 4 for sequence in found] == kept


def test_without_a_cache_and_a_batch_nothing_drifts(sequences, monkeypatch):
    """The control: drift comes from computing otherwise, not from comparing wrongly."""
    monkeypatch.setattr(stock, "_decode", stock._score)
    model = build()
    with patch(model) as session:
        report = measure_stock_drift(session, sequences, PROMPTS)
    assert report.passed and report.max_ulp == 0


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_both_sides_score_the_tokens_that_training_scores(
    sequences, sides, batch_size, temperature
):
    model = build()
    with patch(model) as session:
        measure_stock_drift(
            session, sequences, PROMPTS, temperature=temperature, batch_size=batch_size
        )
        ours = token_logprobs(
            model,
            sequences,
            prompt_lengths=PROMPTS,
            sampling=SamplingParams(temperature=temperature),
        ).split()
    for theirs in sides[0]:
        assert [len(part) for part in theirs] == [len(part) for part in ours]
        for part, expected in zip(theirs, ours):
            assert part.dtype == torch.float32
            assert (part - expected).abs().max() < 1e-4


@pytest.mark.parametrize("training", [True, False])
def test_gradient_checkpointing_does_not_pass_for_drift(sequences, training):
    """In training mode it would make transformers throw the KV cache away."""
    plain, checkpointed = build(), build()
    checkpointed.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    reports = []
    for model in (plain, checkpointed):
        model.train(training)
        with patch(model) as session:
            reports.append(measure_stock_drift(session, sequences, PROMPTS))
        assert model.training is training
    assert reports[0] == reports[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stock_training_pass_is_timed_and_leaves_the_model_as_it_was(sequences, dtype):
    model = build("llama", dtype).eval()
    with patch(model) as session:
        token_logprobs(model, sequences, prompt_lengths=PROMPTS).logprobs.sum().backward()
        before = digests_of_gradients(model), [p.grad for p in model.parameters()]
        weights = parameter_digest(model)
        shadow = shadow_stock_path(session, sequences, PROMPTS, micro_batch_size=2)
        assert digests_of_gradients(model) == before[0]
        assert all(p.grad is g for p, g in zip(model.parameters(), before[1]))
        session.verify()
        assert parameter_digest(model) == weights
        assert shadow.drift == measure_stock_drift(session, sequences, PROMPTS)
        token_logprobs(model, sequences, prompt_lengths=PROMPTS).logprobs.sum().backward()
    assert not model.training
    assert shadow.rollout_seconds > 0
    assert shadow.training_seconds is not None and shadow.training_seconds > 0


def test_a_stock_call_takes_no_more_sequences_than_a_gpu_has_room_for(sequences, monkeypatch):
    each = max(LENGTHS) * 64 * 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * each, 99 * each))

    class OnGpu:
        device, dtype, config = torch.device("cuda"), torch.float32, build().config

    def sizes(model, size):
        return [len(batch) for batch in stock._batches(model, sequences, PROMPTS, size)]

    assert sizes(OnGpu, 64) == [3, 2]
    assert sizes(OnGpu, 2) == [2, 2, 1]
    assert sizes(build(), 64) == [5]


def test_experts_of_odd_widths_run_one_by_one(sequences):
    """torch's grouped product, transformers' default, refuses rows that are no 16 bytes."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=37,
        intermediate_size=48,
        moe_intermediate_size=7,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model = Qwen3MoeForCausalLM(config)
    before = model.get_experts_implementation()
    assert before == {"": "grouped_mm"}
    with patch(model) as session:
        with session.stock(), pytest.raises(RuntimeError, match="16 bytes"):
            model(torch.tensor(sequences[:1]))
        shadow = shadow_stock_path(session, sequences, PROMPTS, micro_batch_size=2)
        assert shadow.drift.tokens and model.get_experts_implementation() == before
        token_logprobs(model, sequences, prompt_lengths=PROMPTS)
