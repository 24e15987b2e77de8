"""rl_consistency.token_logprobs (the op of the same name is tested with the kernels)."""

from dataclasses import dataclass

import pytest
import torch

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.models.packing import PackedBatch, lay_out
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import PRESETS, build_preset
from tests.comparison import first_difference

LENGTHS = (9, 33, 2, 47)
PROMPTS = [3, 16, 1, 46]
LAYOUTS = ("packed", "packed_with_gaps", "left_padded", "right_padded")


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


SETTINGS = [Sampling(), Sampling(0.7, top_p=0.95), Sampling(top_k=20), Sampling(min_p=0.01)]


def sequences(model):
    return probe_tokens(LENGTHS, model.config.vocab_size)


def step(model, scored):
    """One backward pass: values and gradients."""
    model.zero_grad()
    finite = scored.logprobs.masked_fill(~torch.isfinite(scored.logprobs), 0.0)
    (finite.sum() + 0.1 * scored.entropy.sum()).backward()
    values = {"logprobs": scored.logprobs.detach(), "entropy": scored.entropy.detach()}
    return values | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def model():
    model = build_preset("tiny-qwen3")
    with patch(model):
        yield model


def test_scores_are_the_logprobs_of_the_next_tokens(model):
    scored = token_logprobs(model, sequences(model), prompt_lengths=PROMPTS)
    assert scored.lengths == [6, 17, 1, 1]
    for s, prompt, ours in zip(sequences(model), PROMPTS, scored.split(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([s])).logits[0, prompt - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(s[prompt:])[:, None])[:, 0]
        assert torch.allclose(ours.double(), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_layout_gives_the_same_bytes_and_gradients(preset, dtype):
    model = build_preset(preset, dtype)
    options = {"prompt_lengths": PROMPTS, "sampling": SETTINGS, "check_support": False}
    with patch(model):
        expected = step(model, token_logprobs(model, sequences(model), **options))
        for layout in LAYOUTS:
            inputs, mask = lay_out(sequences(model), layout)
            scored = token_logprobs(model, inputs, attention_mask=mask, **options)
            assert first_difference(step(model, scored), expected) is None, layout


def test_a_loss_mask_scores_the_same_tokens_in_every_form(model):
    tokens = sequences(model)
    masks = [[i >= p and i % 3 != 1 for i in range(len(s))] for s, p in zip(tokens, PROMPTS)]
    masks[2] = [False, False]
    expected = token_logprobs(model, tokens, loss_mask=masks)
    assert expected.lengths == [sum(m) for m in masks]
    every = token_logprobs(model, tokens, prompt_lengths=[1] * 4).split()
    chosen = [e[torch.tensor(m[1:])] for e, m in zip(every, masks, strict=True)]
    assert same_bytes(expected.logprobs, torch.cat(chosen))
    for layout in ("left_padded", "right_padded"):
        ids, attention = lay_out(tokens, layout)
        padded_mask = torch.zeros_like(ids)
        padded_mask[attention.bool()] = torch.tensor([x for m in masks for x in m]).long()
        scored = token_logprobs(model, ids, attention_mask=attention, loss_mask=padded_mask)
        assert same_bytes(scored.logprobs, expected.logprobs)


def test_a_sequence_that_is_all_prompt_scores_nothing(model):
    scored = token_logprobs(model, sequences(model), prompt_lengths=[9, 16, 2, 46])
    assert scored.lengths == [0, 17, 0, 1] and len(scored.logprobs) == 18
    assert len(scored.split()[0]) == 0


MASKED = {"prompt_lengths": None}
BAD_MASKS = [
    ([[False, True]] * 4, "loss_mask 0 has 2 entries for 9 tokens"),
    ([[True] + [False] * (n - 1) for n in LENGTHS], "loss_mask 0 .* or scores the first token"),
    ([[False] * n for n in LENGTHS[:3]], "loss_mask has 3 entries for 4 sequences"),
]
BAD_CALLS = [
    ({"prompt_lengths": None}, "exactly one of prompt_lengths and loss_mask"),
    ({"loss_mask": [[False]]}, "exactly one of prompt_lengths and loss_mask"),
    ({"prompt_lengths": [1, 1, 1]}, "3 prompt_lengths for 4 sequences"),
    ({"prompt_lengths": [0, 1, 1, 1]}, r"prompt_lengths\[0\] is 0.*1 to 9"),
    ({"prompt_lengths": [10, 1, 1, 1]}, r"prompt_lengths\[0\] is 10.*1 to 9"),
    ({"prompt_lengths": [1.5, 1, 1, 1]}, r"prompt_lengths\[0\] is 1.5; give integers"),
    ({"prompt_lengths": list(LENGTHS)}, "no token is scored"),
    ({"sampling": SETTINGS[:2]}, "2 sampling parameters for 4 sequences"),
    ({"sampling": [None] * 4}, "sampling: NoneType; give SamplingParams for each"),
    ({"attention_mask": torch.ones(4, 47)}, "attention_mask goes with a padded tensor"),
    ({"sequences": [[1, 2], []]}, "cannot pack .*none may be empty"),
    *((MASKED | {"loss_mask": mask}, message) for mask, message in BAD_MASKS),
]


@pytest.mark.parametrize("options, message", BAD_CALLS)
def test_bad_calls_are_refused(model, options, message):
    given = {"sequences": sequences(model), "prompt_lengths": PROMPTS, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        token_logprobs(model, **given)


@pytest.mark.parametrize("entry", [0.25, -100, 2, float("nan")])
def test_weights_and_labels_are_no_loss_mask(model, entry):
    ids, attention = lay_out(sequences(model), "left_padded")
    padded = torch.zeros(ids.shape)
    padded[:, -1] = 1.0  # of 0 and 1 in any dtype it is a mask
    right = token_logprobs(model, ids, attention_mask=attention, loss_mask=padded.bool())
    found = token_logprobs(model, ids, attention_mask=attention, loss_mask=padded)
    assert torch.equal(found.logprobs, right.logprobs)
    padded[1, -1] = entry
    rows = [row[mask.bool()].tolist() for row, mask in zip(padded, attention, strict=True)]
    for tokens, options in ((ids, {"attention_mask": attention}), (sequences(model), {})):
        mask = padded if options else rows
        with pytest.raises(ValueError, match=r"loss_mask 1 has the entry .* no mask"):
            token_logprobs(model, tokens, loss_mask=mask, **options)


@pytest.mark.parametrize("shape", [(3, 2), (6, 1), (1, 6), (6,), (2, 3, 1)])
def test_a_loss_mask_of_another_shape_than_unpadded_ids_is_refused(model, shape):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[False, True, True], [False, False, True]])
    scored = token_logprobs(model, ids, loss_mask=mask)
    for given in (ids.tolist(), PackedBatch.from_tokens(ids.flatten(), [3, 3])):
        for form in (mask.tolist(), mask.flatten() if isinstance(given, PackedBatch) else mask):
            again = token_logprobs(model, given, loss_mask=form)
            assert again.lengths == [2, 1] and torch.equal(again.logprobs, scored.logprobs)
    with pytest.raises(ValueError, match="loss_mask .* does not fit the batch"):
        token_logprobs(model, ids, loss_mask=mask.reshape(shape))
    with pytest.raises(ValueError, match="loss_mask .* does not fit the batch"):
        token_logprobs(model, [[1, 2, 3], [4]], loss_mask=torch.tensor([[0, 1], [1, 0]]))


def test_an_unpatched_model_is_refused():
    model = build_preset("tiny-llama")
    with pytest.raises(ValueError, match=r"not patched; call rl_consistency.patch\(model\) first"):
        token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])
    refused = pytest.raises(ValueError, match="not patched")
    with patch(model) as session, session.stock(), refused:
        token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_stock_path_scores_the_same_support_up_to_rounding(model, sampling):
    options = {"prompt_lengths": PROMPTS, "sampling": sampling, "check_support": False}
    ours = token_logprobs(model, sequences(model), **options)
    with strict(except_={"token_logprobs"}):
        stock = token_logprobs(model, sequences(model), **options)
    inside = torch.isfinite(ours.logprobs)
    assert torch.equal(inside, torch.isfinite(stock.logprobs))
    assert torch.allclose(stock.logprobs[inside], ours.logprobs[inside], atol=1e-4)
    assert torch.allclose(stock.entropy, ours.entropy, atol=1e-3)


def outside_of_support(model, sampling):
    """Sequences whose tokens are unlikely, and the error of scoring them, with its options."""
    given = sequences(model)
    options = {"prompt_lengths": PROMPTS, "sampling": sampling}
    with torch.no_grad():
        measured = token_logprobs(model, given, **options, check_support=False)
    return given, options, measured


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.5),
        Sampling(top_k=3),
        Sampling(min_p=0.9),
        Sampling(temperature=0),
        [Sampling(), Sampling(), Sampling(0.7), Sampling(top_k=1)],
    ],
)
def test_a_token_that_sampling_rules_out_is_refused(model, sampling, grad):
    given, options, measured = outside_of_support(model, sampling)
    outside = [(part == -torch.inf).nonzero().squeeze(1).tolist() for part in measured.split()]
    first = next(i for i, found in enumerate(outside) if found)
    text = f"{sum(map(len, outside))} of {sum(measured.lengths)} scored tokens, the first token "
    text += f"{PROMPTS[first] + outside[first][0]} of sequence {first}, lie outside .* one update"
    for layout in ("packed", "left_padded"):
        inputs, mask = lay_out(given, layout)
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=text):
            token_logprobs(model, inputs, attention_mask=mask, **options)


def test_a_second_update_on_a_truncated_rollout_is_refused():
    model = build_preset("tiny-llama")
    sampling = SamplingParams(n=8, top_p=0.9, max_tokens=16, seed=17)
    with patch(model):
        completions = RolloutEngine(model, eos_token_id=1).generate([[5, 6, 7]], sampling)
        given = [[5, 6, 7, *completion.token_ids] for completion in completions]
        options = {"prompt_lengths": [3] * len(given), "sampling": sampling}
        scored = token_logprobs(model, given, **options)  # the first is of the same weights
        assert torch.cat([c.token_logprobs for c in completions]).equal(scored.logprobs.detach())
        scored.logprobs.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.grad.sign()
        with pytest.raises(ValueError, match="lie outside the support"):
            token_logprobs(model, given, **options)
        untruncated = token_logprobs(model, given, prompt_lengths=[3] * len(given))
        assert untruncated.logprobs.isfinite().all()
