"""The stock path: its attention, and ops that are switched to it."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rl_consistency.integrations.sampled import of_generate
from rl_consistency.kernels.attention.layout import CapturedPagedAttention, SequenceTables
from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.models.stock import (
    selective_log_softmax,
    stock_captured_attention,
    stock_scores,
)
from rl_consistency.numerics.strict import OPS, current, strict
from tests.models.patch.tiny_models import tiny
from tests.models.test_modules import activation_checkpointing

BLOCK_SIZE, NUM_BLOCKS = 4, 6
TABLES = [[1, 0, 0], [3, 5, 0], [2, 4, 4]]
CONTEXTS = [2, 5, 12]


def attended(keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """One query of each of three sequences, [3, 2, 16]."""
    given = (torch.arange(3), torch.ones(3), torch.tensor(CONTEXTS), torch.tensor(TABLES))
    numbers = SequenceTables(*(values.to(torch.int32) for values in given))
    layout = CapturedPagedAttention.of(
        numbers,
        queries=1,
        capacity=12,
        slot_mapping=torch.arange(3),
        key_cache=[keys],
        value_cache=[values],
        block_size=BLOCK_SIZE,
    )
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(2))
    return stock_captured_attention(q, layout, 0, scale=0.25, window=window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("stale", [math.nan, math.inf])
def test_what_a_block_held_before_is_not_seen(stale: float, window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 1, 16, generator=generator)
    expected = attended(keys, values, window)
    own = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for table, context in zip(TABLES, CONTEXTS, strict=True):
        for position in range(context):
            own[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    assert not own.all()
    for cache in (keys, values):
        cache[~own] = stale
    assert attended(keys, values, window).equal(expected)
    keys[1, 0] = stale  # negative control: a key of the first sequence
    assert not attended(keys, values, None)[0].equal(expected[0])


SEQUENCES = [[(i * 5 + n) % 61 for i in range(n)] for n in (9, 17, 30)]


@pytest.fixture
def model():
    return tiny("qwen3", num_hidden_layers=1, tie_word_embeddings=True).train()


def gradients(model, groups):
    model.zero_grad()
    for group in groups:
        scored = token_logprobs(
            model, [SEQUENCES[i] for i in group], prompt_lengths=[2] * len(group)
        )
        scored.logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("op", [*OPS, None])
def test_one_op_or_all_on_the_stock_path_train_a_tied_model_and_the_way_back_is_exact(model, op):
    with patch(model):
        expected = gradients(model, [[0, 1, 2]])
        with strict(op is not None, except_={op} - {None}):
            actual = gradients(model, [[0], [1], [2]])
        again = gradients(model, [[0], [1], [2]])
        for name, gradient in expected.items():
            assert (actual[name] - gradient).norm() / gradient.norm() < 1e-5, name
            assert torch.equal(again[name], gradient), name


def test_a_layer_computed_again_in_a_thread_has_the_choice_of_its_first_time(model):
    """As autograd does it on a GPU, where its threads know no `strict` block."""
    seen = []
    activation_checkpointing(model.train(), {"use_reentrant": False})
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append(current()))
    with patch(model):
        with strict(except_={"rms_norm"}) as choice:
            scored = token_logprobs(model, SEQUENCES, prompt_lengths=[2] * len(SEQUENCES))
        thread = threading.Thread(target=scored.logprobs.sum().backward)
        thread.start()
        thread.join()
    assert seen == [choice, choice]


@pytest.fixture(scope="module")
def vocabulary():
    """Logits of a large vocabulary, a token of each row, and its logprob in fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(48, 131_072, generator=generator)
    tokens = torch.randint(131_072, (48,), generator=generator)
    exact = logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return logits, tokens, exact


def by_scores(logits, tokens):
    rows = SamplingRows.uniform(len(tokens))
    return stock_scores(torch.eye(len(tokens)), logits.t(), tokens, rows)[0]


def by_generate(logits, tokens):
    output = SimpleNamespace(scores=logits.unsqueeze(1).unbind(0), sequences=tokens.unsqueeze(0))
    return of_generate(output, -1).logprobs[0]


def by_torch(logits, tokens):
    return logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(
    ("logprobs", "unbiased"),
    [(selective_log_softmax, True), (by_scores, True), (by_generate, True), (by_torch, False)],
)
def test_no_logprob_of_a_large_vocabulary_has_a_bias(vocabulary, logprobs, unbiased):
    logits, tokens, exact = vocabulary
    mean = float((logprobs(logits, tokens).double() - exact).mean())
    assert (abs(mean) < 5e-7) == unbiased  # torch's log_softmax is the negative control
