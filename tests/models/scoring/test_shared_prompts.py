"""Prompts that several sequences begin with, scored once: the bytes of sequences scored whole."""

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.models.scoring import shared_prompts
from rl_consistency.models.scoring import token_logprobs as scoring
from rl_consistency.models.scoring.shared_prompts import SharedPrompts
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.strict import strict
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset


def tokens(seed, count):
    return torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def samples(prompt_length, group, seed=0):
    prompt = tokens(seed, prompt_length)
    return [[*prompt, *tokens(100 * seed + i + 1, 3 + 7 * i)] for i in range(group)]


LONE = tokens(9, 50)
SEQUENCES = [*samples(40, 3), LONE, *samples(16, 2, seed=1), *samples(15, 2, seed=2)]
PROMPTS = [40, 40, 40, 30, 16, 16, 15, 15]


def both_ways(model, sequences, prompts, **options):
    with torch.no_grad():
        return [
            token_logprobs(model, sequences, prompt_lengths=prompts, share_prompts=share, **options)
            for share in (True, False)
        ]


DENSE, SPARSE = ("tiny-qwen3", "tiny-mistral"), ("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_shared_prompts_give_the_bytes_and_experts_of_whole_sequences(name, dtype):
    model = build_preset(name).to(dtype)
    with patch(model):
        for sampling in (None, SamplingParams(temperature=0.7, top_k=20)):
            shared, whole = both_ways(
                model, SEQUENCES, PROMPTS, sampling=sampling, check_support=False
            )
            assert shared.lengths == whole.lengths
            assert same_bytes(shared.logprobs, whole.logprobs)
            assert same_bytes(shared.entropy, whole.entropy)
            assert (shared.routing is None) == (name in DENSE)
            assert name in DENSE or torch.equal(shared.routing, whole.routing)


def test_shared_rows_are_computed_once(monkeypatch):
    rows, run = [], shared_prompts.paged_hidden_states

    def counted(model, input_ids, *rest):
        rows.append(len(input_ids))
        return run(model, input_ids, *rest)

    monkeypatch.setattr(shared_prompts, "paged_hidden_states", counted)
    with patch(model := build_preset("tiny-qwen3")):
        both_ways(model, samples(40, 3), [40] * 3)
    # 32 shared rows, then 8 of the prompt with 3, 10 and 17 tokens; whole they are 48, 64 and 64.
    assert rows == [32 + 16 + 32 + 32]


def test_what_a_hook_sees_are_whole_sequences():
    seen = []
    with patch(model := build_preset("tiny-qwen3")):
        layer = model.model.layers[0]
        layer.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
        both_ways(model, samples(40, 3), [40] * 3)
    assert seen == [48 + 64 + 64] * 2


def test_a_prompt_is_cut_at_whole_blocks_and_never_takes_all_of_a_sequence():
    shared = SharedPrompts.of([tokens(0, 32), [*tokens(0, 32), 7], [1, 2]], [32, 32, 1])
    assert shared is None  # 16 and 32 tokens: no two are alike
    prompt = tokens(0, 33)
    shared = SharedPrompts.of([prompt, [*prompt, 7, 8], [1, 2]], [33, 33, 1])
    assert [len(part) for part in shared.parts] == [32, 1, 3, 2]
    assert shared.before == [None, 0, 0, None] and shared.own == [1, 2, 3]
    assert shared.pasts == [0, 32, 32, 0]
    assert shared.rows_of([0, 32, 48, 64], 1).tolist() == [*range(32), 48, 49, 50]
    assert shared.rows_of([0, 32, 48, 64], 2).tolist() == [64, 65]


def test_a_cut_that_forgets_the_past_is_found(monkeypatch):
    """Mutant: the rest of a sample is scored as if nothing stood before it."""
    model = build_preset("tiny-qwen3")
    monkeypatch.setattr(SharedPrompts, "pasts", property(lambda self: [0] * len(self.parts)))
    with patch(model):
        shared, whole = both_ways(model, SEQUENCES, PROMPTS)
    assert not same_bytes(shared.logprobs, whole.logprobs)


def test_prompts_are_not_shared_under_gradients():
    model = build_preset("tiny-qwen3")
    with patch(model), pytest.raises(ValueError, match="share_prompts under gradients"):
        token_logprobs(model, SEQUENCES, prompt_lengths=PROMPTS, share_prompts=True)


def test_other_forms_and_stock_ops_are_computed_whole(monkeypatch):
    monkeypatch.setattr(
        scoring, "shared_hidden_states", lambda *a: pytest.fail("computed with shared prompts")
    )
    model = build_preset("tiny-qwen3")
    alike = samples(40, 2)
    with patch(model), torch.no_grad():
        padded = torch.tensor([alike[0][:43], alike[1][:43]])
        token_logprobs(model, padded, prompt_lengths=[40, 40], share_prompts=True)
        mask = [[False] * 40 + [True] * (len(s) - 40) for s in alike]
        token_logprobs(model, alike, loss_mask=mask, share_prompts=True)
        with strict(except_={"attention"}):
            token_logprobs(model, alike, prompt_lengths=[40, 40], share_prompts=True)


def test_bad_tokens_and_changed_models_are_refused_as_ever():
    model = build_preset("tiny-qwen3")
    alike = [[*s, 10**6] for s in samples(40, 2)]
    with patch(model), torch.no_grad():
        with pytest.raises(ValueError, match="token ids span"):
            token_logprobs(model, alike, prompt_lengths=[40, 40], share_prompts=True)
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
        with pytest.raises(ValueError, match="act_fn"):
            token_logprobs(model, samples(40, 2), prompt_lengths=[40, 40], share_prompts=True)
