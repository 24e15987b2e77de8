"""A step's tokens and logprobs depend on the tokens before them, wherever these come from."""

import numpy as np
import pytest
import torch

from rl_consistency.kernels.sampling.op import SamplingRows
from rl_consistency.models.patch import patch
from rl_consistency.rollout.block_manager import (
    DEFAULT_TOKENS_PER_SEQUENCE,
    GPU_CACHE_SHARE,
    cache_bytes,
)
from rl_consistency.rollout.device.calls import RaggedCall
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import ScheduledChunk
from tests.rollout.device.launches import PLAIN, TRUNCATED, sample_of

SIZES = {
    "vocab_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model(tiny_qwen3):
    with patch(built := tiny_qwen3(**SIZES, initializer_range=0.3)):
        yield built


def make(tokens, blocks, slot=0, params=PLAIN, prompt_id=0):
    return sample_of(tokens, index=prompt_id, params=params, blocks=blocks, slot=slot)


def runner_of(model, num_blocks=8, max_num_seqs=4):
    return ModelRunner(model, block_size=4, num_blocks=num_blocks, max_num_seqs=max_num_seqs)


def admitted(runner, *sequences):
    for sequence in sequences:
        runner.admit(sequence)
    return runner


def prefill(sequence, start=0):
    return ScheduledChunk(sequence, start, sequence.num_tokens - start, True)


def decoded(runner, sequence, count):
    """Tokens after a prompt, each reported before the next is computed."""
    [[sampled]] = runner.launch([prefill(sequence)]).wait()
    found = [sampled]
    while len(found) < count:
        sequence.token_ids.append(found[-1][0])
        [[sampled]] = runner.launch([prefill(sequence, sequence.num_tokens - 1)]).wait()
        found.append(sampled)
    return found


def test_a_call_names_every_token_position_and_place(model):
    runner = runner_of(model)
    chunked = make([10, 11, 12, 13, 14, 15, 16], [5, 2], slot=2)
    pending = make([20, 21, 22, 23, 24], [7, 1], slot=0)
    guessed = make([30, 31, 32], [3, 0], slot=1)
    admitted(runner, chunked, pending, guessed)
    chunks = [
        ScheduledChunk(chunked, 2, 4, False),
        ScheduledChunk(pending, 5, 1, True),
        ScheduledChunk(guessed, 2, 3, True, (8, 9)),
    ]
    call = RaggedCall.of(chunks, runner._state)
    assert {name: array.tolist() for name, array in call.arrays.items()} == {
        "token_ids": [12, 13, 14, 15, -1, 32, 8, 9],
        "token_slots": [2, 2, 2, 2, 0, 1, 1, 1],
        "positions": [2, 3, 4, 5, 5, 2, 3, 4],
        "places": [22, 23, 8, 9, 5, 14, 15, 0],
        "rows": [4, 5, 6, 7],
        "row_slots": [0, 1, 1, 1],
        "kept_in": [0, 4, 4, 4],
    }
    paged = call.paged(runner._cache, torch.from_numpy(call.arrays["places"]))
    assert (paged.query_starts, paged.query_lens) == ([0, 4, 5], [4, 1, 3])
    assert (paged.context_lens, paged.block_tables) == ([6, 6, 5], [[5, 2], [7, 1], [3, 0]])


def test_only_chunks_that_sample_are_answered(model):
    part, whole = make([1, 2, 3, 4, 5], [0, 1]), make([6, 7], [2], slot=1)
    runner = admitted(runner_of(model), part, whole)
    chunks = [ScheduledChunk(part, 0, 3, False), prefill(whole)]
    step = runner.launch(chunks)
    assert step.chunks == chunks[1:]
    alone = admitted(runner_of(model), whole).launch(chunks[1:])
    assert step.wait() == alone.wait() == step.wait()
    assert runner.launch(chunks[:1]).wait() == runner.launch([]).wait() == []


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED])
def test_a_token_nobody_has_reported_comes_from_the_device(model, params):
    known, ahead = make([1, 2, 3], [0, 1, 2], params=params), make([1, 2, 3], [7, 5, 3], 3, params)
    expected = decoded(admitted(runner_of(model), known), known, 7)
    runner = admitted(runner_of(model), ahead)
    steps = [runner.launch([prefill(ahead)])]
    steps += [runner.launch([ScheduledChunk(ahead, start, 1, True)]) for start in range(3, 9)]
    assert [row for step in steps for [row] in step.wait()] == expected


def test_a_draft_is_judged_by_plain_decoding(model):
    plain, guessing = make([1, 2, 3], [0, 1, 2]), make([1, 2, 3], [4, 5, 6], slot=1)
    expected = decoded(admitted(runner_of(model), plain), plain, 6)
    right = tuple(token for token, _ in expected)
    runner = admitted(runner_of(model), guessing)
    [[first]] = runner.launch([prefill(guessing)]).wait()
    guessing.token_ids.append(first[0])
    wrong = (right[1], right[2], (right[3] + 1) % 40, right[4])
    [rejected] = runner.launch([ScheduledChunk(guessing, 3, 5, True, wrong)]).wait()
    assert [first, *rejected[:3]] == expected[:4]
    assert rejected[3:] != expected[4:]  # what follows a wrong guess is another text
    # Its keys are overwritten by those of the tokens that were sampled instead.
    [accepted] = runner.launch([ScheduledChunk(guessing, 3, 5, True, right[1:5])]).wait()
    assert [first, *accepted] == expected


def test_places_a_sequence_does_not_own_are_never_read(model):
    clean, dirty = runner_of(model), runner_of(model)
    for cache in [*dirty._cache.keys, *dirty._cache.values]:
        cache.fill_(torch.nan)
    chunks = [prefill(make([1, 2, 3, 4, 5], [6, 3]))]
    results = [admitted(r, chunks[0].sequence).launch(chunks).wait() for r in (clean, dirty)]
    assert results[0] == results[1]


def test_a_slot_forgets_its_former_holder(model):
    runner = runner_of(model)
    former = make([9] * 14, [1, 2, 3, 4], slot=2, params=TRUNCATED, prompt_id=8)
    decoded(admitted(runner, former), former, 2)
    newcomer, alone = (make([1, 2, 3], [5, 6], slot=slot) for slot in (2, 0))
    expected = decoded(admitted(runner_of(model), alone), alone, 5)
    assert decoded(admitted(runner, newcomer), newcomer, 5) == expected
    assert runner._state.block_tables[2].tolist()[:3] == [5, 6, 8]


@pytest.mark.parametrize("slot", [None, 4, -1])
def test_a_sequence_without_a_seat_is_refused(model, slot):
    with pytest.raises(ValueError, match=r"needs a slot in \[0, 4\)"):
        runner_of(model).admit(make([1], [0], slot=slot))


def test_a_draft_longer_than_a_graph_is_wide_is_refused(model):
    sequence = make([1], [0, 1, 2])
    runner = admitted(runner_of(model), sequence)
    with pytest.raises(ValueError, match="a draft of 8 tokens; at most 7"):
        runner.launch([ScheduledChunk(sequence, 0, 9, True, (1,) * 8)])


def test_the_state_of_a_slot_is_what_its_sequence_asked_for(model):
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=2**40 + 7)
    sequence = make([1], [0], slot=3, params=params, prompt_id=2**63 + 5)
    sequence.sample_index = 6
    runner = admitted(runner_of(model), make([1], [0]), sequence)
    runner._state.flush()
    rows, keys, whole = runner._state.sampling.rows(torch.tensor([3, 0, 4]), truncates=True)
    assert isinstance(rows, SamplingRows) and rows.truncates
    assert keys.tolist() == [[7, 256, 6, 5, 2**31], [3, 0, 0, 0, 0], [0] * 5]
    assert not whole.any()
    assert rows.temperature.tolist() == [0.5, 1, 1] and rows.top_k.tolist() == [3, 0, 0]
    assert rows.top_p.tolist() == [0.75, 1, 1] and rows.min_p.tolist() == [0.25, 0, 0]
    assert runner._state.sampling.truncates(np.array([0, 3]))
    assert not runner._state.sampling.truncates(np.array([0, 1, 4]))


def test_the_cache_has_the_dtype_and_shape_of_the_model_and_a_dummy_block(tiny_qwen3):
    with patch(model := tiny_qwen3(**SIZES).to(torch.bfloat16)):
        runner = runner_of(model)
    caches = [*runner._cache.keys, *runner._cache.values]
    assert len(caches) == 4 and runner.num_blocks == 8
    assert all(c.shape == (9, 4, 2, 16) and c.dtype == torch.bfloat16 for c in caches)


def test_the_default_cache_holds_all_running_sequences_within_a_limit(model, monkeypatch):
    def blocks(**given):
        limits = {"block_size": 4, "num_blocks": None, "max_num_seqs": 3}
        return ModelRunner(model, **limits, **given).num_blocks

    assert blocks() == 3 * 16  # context of 64 tokens
    assert blocks(tokens_per_sequence=9) == 3 * 3
    assert blocks(tokens_per_sequence=1000) == 3 * 16
    block_bytes = 2 * 2 * 4 * 2 * 16 * 4
    for room, held in ((20, 20), (2, 16)):  # one sequence is held in any case
        limit = "rl_consistency.rollout.block_manager.CPU_CACHE_BYTES"
        monkeypatch.setattr(limit, room * block_bytes)
        assert blocks() == held
    monkeypatch.undo()
    model.config.max_position_embeddings = 10 * DEFAULT_TOKENS_PER_SEQUENCE
    assert blocks() == 3 * 256


def test_on_a_gpu_the_default_cache_takes_its_share_of_what_is_free(monkeypatch):
    memory = {"mem_get_info": (600, 1000), "memory_reserved": 500, "memory_allocated": 100}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert cache_bytes(torch.device("cuda")) == int(1000 * GPU_CACHE_SHARE)


def test_a_cache_that_does_not_fit_says_how_large_it_is(model, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(
        ValueError, match=r"no room on cpu .* 1048576 blocks of 4 tokens \(2\.0 GiB"
    ):
        runner_of(model, 1 << 20)


def test_a_model_cast_after_the_cache_was_made_is_refused(model):
    runner = runner_of(model)
    runner.begin()
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match="build the RolloutEngine after"):
        runner.begin()
