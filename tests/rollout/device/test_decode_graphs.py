"""What a CUDA graph captures, run on the CPU as it is: no bucket and no padding moves a bit.

The captured call runs here over the same buffers, with padding rows, guesses and the dummy block;
only capture and replay are left to the tests in tests/gpu.
"""

import numpy as np
import pytest
import torch

from rl_consistency.kernels.attention.layout import CapturedPagedAttention, SharedRun
from rl_consistency.models.forward import rotary_rows
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.device import device_state, model_runner, shared_prefixes
from rl_consistency.rollout.device.decode_graphs import (
    BUCKETS,
    DecodeCall,
    buckets_up_to,
    context_bound,
    width_for,
)
from rl_consistency.rollout.device.device_state import StagedFields, to_device, to_host
from rl_consistency.rollout.device.shared_prefixes import most_runs
from rl_consistency.rollout.scheduler import ScheduledChunk
from tests.comparison import assert_within
from tests.rollout.device.launches import (
    MOST,
    PLAIN,
    TRUNCATED,
    Uncaptured,
    admitted,
    decoded,
    runner_of,
    sharing,
    verified,
    whole,
)


def prompts(runner, count, params=PLAIN):
    return admitted(runner, [3 + 2 * i for i in range(count)], params)


@pytest.mark.parametrize("sizes", [[6], [2, 4], [3, 3], [1, 4, 1], [2, 2, 2]])
def test_sequences_that_share_keys_are_run_side_by_side(model, sizes, monkeypatch):
    """The layout on the CPU checks that every run holds what it says."""
    monkeypatch.setattr(shared_prefixes, "SHARED_BLOCK", 8)
    eager, captured = runner_of(model), runner_of(model, decode=True)
    expected = decoded(eager, sharing(eager, sizes, 33), 6)
    graphs = captured.decode_graphs
    assert isinstance(graphs, Uncaptured)
    graphs._reads_once = True
    runs = []
    in_force = CapturedPagedAttention.in_force

    def watched(layout):
        found = in_force(layout)
        runs.append(found.shared_runs)
        return found

    monkeypatch.setattr(CapturedPagedAttention, "in_force", watched)
    assert decoded(captured, sharing(captured, sizes, 33), 6) == expected
    assert [shape.shared for shape in graphs.shapes] == [True]
    most = most_runs(sum(sizes))
    counts = sorted((n for n in sizes if n > 1), reverse=True)[:most]
    assert [[run.count for run in found] for found in runs if found] and all(
        [(run.count, run.keys) for run in found] in ([(n, 32) for n in counts], [])
        for found in runs
    )


def test_a_run_that_does_not_hold_is_noticed(model, monkeypatch):
    """Negative control: one block too many."""
    monkeypatch.setattr(shared_prefixes, "SHARED_BLOCK", 8)
    arranged = device_state.arranged

    def too_long(*args):
        found = arranged(*args)
        return found and (found[0], [SharedRun(r.first, r.count, r.keys + 1) for r in found[1]])

    monkeypatch.setattr(device_state, "arranged", too_long)
    captured = runner_of(model, decode=True)
    assert captured.decode_graphs is not None
    captured.decode_graphs._reads_once = True
    with pytest.raises(ValueError, match="not the same ones"):
        decoded(captured, sharing(captured, [3, 3], 33), 2)


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED])
@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_a_bucket_moves_no_bit(model, count, params):
    eager, captured = runner_of(model), runner_of(model, decode=True)
    expected = decoded(eager, prompts(eager, count, params), 6)
    assert decoded(captured, prompts(captured, count, params), 6) == expected
    assert captured.decode_graphs is not None and len(captured.decode_graphs) == 1


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("lengths", [[1, 2, 3], [7, 4, 1, 5, 6], [0, 3, 7, 0, 1, 2]])
@pytest.mark.parametrize("memory_bound", [0, 256])
def test_a_width_moves_no_bit(model, lengths, block_size, memory_bound, monkeypatch):
    monkeypatch.setattr(model_runner, "MEMORY_BOUND_TOKENS", memory_bound)
    eager, captured = (
        runner_of(model, decode=True),
        runner_of(model, decode=True, block_size=block_size),
    )
    count = len(lengths)
    if block_size == 1:
        lengths = [min(length, 4) for length in lengths]  # tables hold 20 tokens
    texts = decoded(eager, prompts(eager, count), 8)
    found = verified(captured, prompts(captured, count), texts, lengths)
    assert found == [text[1 : 2 + n] for text, n in zip(texts, lengths, strict=True)]
    assert captured.decode_graphs is not None
    widths = {shape.width for shape in captured.decode_graphs.shapes}
    asked = {width_for(length) for length in lengths}
    assert widths == ({max(asked)} if memory_bound else asked)


def test_a_token_without_a_draft_is_kept_on_the_device_in_a_wide_call(model):
    eager, captured = runner_of(model), runner_of(model, decode=True)
    first, second = decoded(eager, prompts(eager, 2), 5)
    sequences = prompts(captured, 2)
    captured.launch(whole(sequences)).wait()
    for sequence, text in zip(sequences, (first, second)):
        sequence.token_ids.append(text[0][0])
    draft = tuple(token for token, _ in first[1:4])
    lengths = [sequence.num_tokens - 1 for sequence in sequences]
    chunks = [
        ScheduledChunk(sequences[0], lengths[0], 4, True, draft),
        ScheduledChunk(sequences[1], lengths[1], 1, True),
    ]
    assert captured.launch(chunks).wait()[1] == [second[1]]
    pending = ScheduledChunk(sequences[1], lengths[1] + 1, 1, True)
    assert captured.launch([pending]).wait() == [[second[2]]]


def test_decode_and_prefill_in_one_step_are_what_they_are_alone(model):
    eager, captured = runner_of(model), runner_of(model, decode=True)
    expected = decoded(eager, prompts(eager, 3), 1)
    first, second, third = prompts(captured, 3)
    captured.launch([*whole([second]), ScheduledChunk(first, 0, 1, False)]).wait()
    mixed = [
        *whole([third]),
        ScheduledChunk(second, second.num_tokens, 1, True),
        ScheduledChunk(first, 1, first.num_tokens - 1, True),
    ]
    step = captured.launch(mixed)
    assert [chunk.sequence for chunk in step.chunks] == [third, second, first]
    [[third_row], [second_row], [first_row]] = step.wait()
    assert [first_row, second_row, third_row] == [
        expected[0][0],
        expected[1][1],
        expected[2][0],
    ]
    after = captured.launch([ScheduledChunk(s, s.num_tokens, 1, True) for s in (first, third)])
    assert [row for [row] in after.wait()] == [expected[0][1], expected[2][1]]


def padding_in_a_real_slot(call):
    places = call.inputs["places"]
    places[places == call._padding["places"]] = 0


def positions_of_the_row_before(call):
    call.inputs["positions"].copy_(call.inputs["positions"].roll(1))


@pytest.mark.parametrize("spoil", [padding_in_a_real_slot, positions_of_the_row_before])
def test_the_comparison_notices(model, monkeypatch, spoil):
    """Negative control."""
    eager, captured = runner_of(model), runner_of(model, decode=True)
    expected = decoded(eager, prompts(eager, 5), 6)
    sequences = prompts(captured, 5)
    sequences[2].block_table[0], sequences[0].block_table[0] = 0, sequences[2].block_table[0]
    load = DecodeCall.load
    monkeypatch.setattr(DecodeCall, "load", lambda call, staged: (load(call, staged), spoil(call)))
    assert decoded(captured, sequences, 6) != expected


def test_stock_attention_gathers_what_the_tables_say(model):
    with strict(except_={"attention"}):
        eager, captured = runner_of(model), runner_of(model, decode=True)
        expected = decoded(eager, prompts(eager, 5), 6)
        found = decoded(captured, prompts(captured, 5), 6)
        texts = verified(captured, prompts(captured, 3), expected, [3, 1, 6])
    assert [[t for t, _ in text] for text in found] == [[t for t, _ in text] for text in expected]
    for text, others in zip([*found, *texts], [*expected, *(e[1:] for e in expected)]):
        logprobs = torch.tensor([[p, q] for (_, p), (_, q) in zip(text, others)])
        assert_within(logprobs[:, 0], logprobs[:, 1], "logprob", torch.float32)


def test_graphs_are_made_once_and_ahead_of_time_where_asked(model):
    runner = runner_of(model, decode=True)
    graphs = runner.decode_graphs
    assert isinstance(graphs, Uncaptured)
    for rows, width in ((5, 4), (5, 1), (2, 4), (2, 1)):
        graphs.captured(graphs.shape_for(rows, width, truncates=False, longest=99))
    assert [(s.rows, s.width) for s in graphs.shapes] == [(6, 4), (6, 1), (2, 4), (2, 1)]
    decoded(runner, prompts(runner, 5), 3)
    assert len(graphs.shapes) == 4
    with strict(except_={"linear"}):
        decoded(runner, prompts(runner, 5), 3)
    assert len(graphs.shapes) == 5


def test_a_call_for_shared_keys_serves_others_where_it_alone_is_captured(model):
    eager, runner = runner_of(model), runner_of(model, decode=True)
    graphs = runner.decode_graphs
    assert isinstance(graphs, Uncaptured)

    def captured(rows, shared):
        shape = graphs.shape_for(rows, 1, truncates=False, longest=99, shared=shared)
        return graphs.captured(shape)

    wide = captured(4, True)
    assert captured(3, False) is wide
    assert captured(2, False) is not captured(2, True)
    assert [(shape.rows, shape.shared) for shape in graphs.shapes] == [
        (4, True), (2, False), (2, True)
    ]  # fmt: skip
    expected = decoded(eager, prompts(eager, 4), 3)
    assert decoded(runner, prompts(runner, 4), 3) == expected and len(graphs.shapes) == 3


def test_graphs_live_as_long_as_the_parameters_stay_where_they_are(model):
    runner = runner_of(model, decode=True)
    before = decoded(runner, prompts(runner, 2), 3)
    assert runner.decode_graphs is not None
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    runner.begin()
    assert len(runner.decode_graphs) == 1
    after = decoded(runner, prompts(runner, 2), 3)
    fresh = runner_of(model, decode=True)
    assert after == decoded(fresh, prompts(fresh, 2), 3) != before
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    runner.begin()
    assert len(runner.decode_graphs) == 0


def test_a_rotary_table_outlives_the_one_that_replaces_it(model):
    first = rotary_rows(model, 300)
    larger = rotary_rows(model, 1025)
    assert larger is not first and rotary_rows(model, 300) is larger
    assert larger[:, : first.shape[1]].equal(first)


def test_buckets_reach_the_most_sequences():
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(5) == (1, 2, 4, 5)
    assert buckets_up_to(256) == BUCKETS
    assert buckets_up_to(400) == (*BUCKETS, 320, 384, 400)
    assert buckets_up_to(320) == (*BUCKETS, 320)
    assert [width_for(draft) for draft in range(8)] == [1, 4, 4, 4, 8, 8, 8, 8]


def test_only_stock_attention_needs_to_know_the_longest_context():
    assert context_bound(5, 1000) == context_bound(999, 1000) == 1000
    with strict(except_={"attention"}):
        bounds = [context_bound(n, 1000) for n in (1, 256, 257, 512, 513)]
    assert bounds == [256, 256, 512, 512, 1000]


def test_staged_arrays_arrive_together_and_apart():
    arrays = {
        "a": np.arange(3, dtype=np.int64),
        "b": np.array([[1.5, -2.0]], dtype=np.float32),
        "none": np.zeros((0, 4), dtype=np.int32),
        "c": np.array([7], dtype=np.int32),
    }
    tensors = to_device(arrays, torch.device("cpu"))
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape and tensors[name].data_ptr() % 4 == 0
        assert np.array_equal(tensors[name].numpy(), array)
    fields = StagedFields({"x": (np.int64, (3,)), "y": (np.int32, (2, 2))})
    buffer, places = fields.on_host(torch.device("cpu"))
    places["y"][...] = 5
    assert fields.nbytes == 128 and (fields.tensors(buffer)["y"] == 5).all()
    kept = to_host(fields.tensors(buffer)["y"])
    buffer.zero_()
    assert (kept == 5).all()
