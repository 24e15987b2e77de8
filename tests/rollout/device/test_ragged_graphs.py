"""What the graphs of a prefill capture, run on the CPU as it is: no bucket moves a bit.

Rows are padded to a bucket and attention runs between the other ops, over memory that calls share;
only capture and replay are left to tests/gpu.
"""

import pytest
import torch

from rl_consistency.kernels.experts import cpu
from rl_consistency.models.forward import layer_parameters
from rl_consistency.models.graph_cache import FINE_ROWS, bucket_of
from rl_consistency.models.patch import patch
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.device.ragged_graphs import (
    CAPTURED_AT,
    PaddedCall,
    RaggedGraphs,
    buckets_up_to,
    most_rows,
    sampled_bucket_of,
)
from rl_consistency.verify.presets import build_preset
from tests.rollout.device.launches import (
    PLAIN,
    TRUNCATED,
    UncapturedRagged,
    admitted,
    ahead,
    prefilled,
    runner_of,
    whole,
)


def graphs_of(runner):
    assert isinstance(runner.ragged_graphs, UncapturedRagged)
    return runner.ragged_graphs


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED])
@pytest.mark.parametrize("lengths", [[1], [16], [17], [3, 40, 9], [5, 1, 2, 30, 64, 11]])
def test_a_bucket_moves_no_bit(model, lengths, params):
    eager, captured = runner_of(model), runner_of(model, ragged=256)
    assert prefilled(captured, lengths, params) == prefilled(eager, lengths, params)
    rows = {shape.rows for shape in graphs_of(captured)._captured}
    assert rows == {bucket_of(sum(lengths)), bucket_of(len(lengths))}


@pytest.mark.parametrize("cut", [1, 4, 13])
def test_chunks_that_continue_a_past_and_do_not_sample_are_what_they_were(model, cut):
    eager, captured = runner_of(model), runner_of(model, ragged=256)
    lengths = [3, 40, 9, 21]
    assert prefilled(captured, lengths, cut=cut) == prefilled(eager, lengths)


def test_calls_of_other_sizes_do_not_disturb_each_other(model):
    """They share the memory of attention's results."""
    eager, captured = runner_of(model), runner_of(model, ragged=256)
    for lengths in ([60, 50, 40], [2, 3], [60, 1], [2, 3], [60, 50, 40]):
        assert prefilled(captured, lengths) == prefilled(eager, lengths)


def test_results_of_a_failed_request_do_not_stay(model, monkeypatch):
    """On a CPU attention itself writes zeros behind the last token, on a GPU `clear` alone does."""
    captured = runner_of(model, ragged=256)
    expected = prefilled(captured, [5, 9])
    graphs, used = graphs_of(captured), []
    (memory, (padded, *_)) = graphs._memory, graphs._captured.values()
    assert memory is not None
    memory.fill_(torch.nan)
    padded.call.clear(14)
    assert memory[:14].isnan().all() and not memory[14 : padded.call.shape.rows].isnan().any()
    clear = PaddedCall.clear
    monkeypatch.setattr(PaddedCall, "clear", lambda c, n: (used.append(n), clear(c, n))[1])
    assert prefilled(captured, [5, 9]) == expected
    assert used == [14, 2, 2] * (CAPTURED_AT + 1)


def padding_in_a_real_slot(call):
    places = call.inputs["places"]
    places[call.inputs["used"] :] = 0


def rows_of_the_neighbours(call):
    call.inputs["rows"].copy_(call.inputs["rows"].roll(1))


def attention_of_an_earlier_call(call):
    results = call.results
    call.attention = lambda q, *_: results(q)


@pytest.mark.parametrize(
    "spoil", [padding_in_a_real_slot, rows_of_the_neighbours, attention_of_an_earlier_call]
)
def test_the_comparison_notices(model, monkeypatch, spoil):
    """Negative control."""
    eager, captured = runner_of(model), runner_of(model, ragged=256)
    load = PaddedCall.load

    def spoiled(call, numbers):
        load(call, numbers)
        spoil(call)

    def step(runner):
        sequences = admitted(runner, [5, 18, 9])
        sequences[0].block_table[0], sequences[1].block_table[0] = 7, 0
        for sequence in sequences:
            runner.admit(sequence)
        runner.launch(whole(sequences)).wait()
        return runner.launch(ahead(sequences, 0)).wait()

    expected = [step(eager) for _ in range(CAPTURED_AT + 1)]
    monkeypatch.setattr(PaddedCall, "load", spoiled)
    assert [step(captured) for _ in range(CAPTURED_AT + 1)] != expected


def test_a_size_is_captured_when_it_comes_up_again(model):
    runner = runner_of(model, ragged=64)
    captured, replayed = [], []
    for lengths in ([20], [9, 9], *[[20]] * (CAPTURED_AT - 2), [20], *[[70]] * CAPTURED_AT):
        step = runner.launch(whole(admitted(runner, lengths)))
        step.wait()
        captured.append(len(graphs_of(runner)))
        replayed.append(step.replayed_prefill)
    before, large = CAPTURED_AT - 1, CAPTURED_AT  # more rows than pays
    assert captured == [0] * before + [1] * (len(captured) - before)
    assert (
        replayed == [False] * before + [True] * (len(captured) - before - large) + [False] * large
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("out of memory")])
def test_where_memory_is_missing_calls_run_op_by_op(model, monkeypatch, error):
    eager, captured = runner_of(model), runner_of(model, ragged=256)
    calls = ([60, 50], [5, 9], [60, 40])
    expected = [prefilled(eager, lengths) for lengths in calls]

    tries = []

    def without_memory(graphs, shape):
        tries.append(shape.rows)
        if shape.rows > 64:
            graphs._place = ("a pool of no graph", None)
            raise error
        return capture(graphs, shape)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: tries.append(0))
    capture = UncapturedRagged._capture
    monkeypatch.setattr(UncapturedRagged, "_capture", without_memory)
    with pytest.warns(UserWarning, match="no memory to capture a prefill of 128 rows") as warned:
        found = [prefilled(captured, lengths) for lengths in calls]
    graphs = graphs_of(captured)
    assert found == expected and len(warned) == 1
    assert {shape.rows for shape in graphs._captured} == {16}
    assert tries.count(128) == 2 and tries.count(0) == 1  # again once the allocator is emptied
    if tries.index(128) < tries.index(16):
        assert graphs._place is None  # the pool of a capture that failed is not used again
    graphs._place = None
    graphs.drop()
    assert graphs.shape_for(110, 2, truncates=False) is not None


def test_other_errors_of_a_capture_pass_through(model, monkeypatch):
    def fails(*_):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(UncapturedRagged, "_capture", fails)
    with pytest.raises(RuntimeError, match="not permitted"):
        prefilled(runner_of(model, ragged=256), [5, 9])


def test_shapes_are_captured_up_to_a_number(model, monkeypatch):
    monkeypatch.setattr(RaggedGraphs, "most_captured", 1)
    eager, captured = runner_of(model), runner_of(model, ragged=256)
    for lengths in ([5, 9], [60, 50]):
        assert prefilled(captured, lengths) == prefilled(eager, lengths)
    assert len(graphs_of(captured)) == 1


def test_ops_on_their_stock_path_and_hooks_are_not_captured(model):
    runner = runner_of(model, ragged=256)
    with strict(except_={"rotary"}):
        for _ in range(CAPTURED_AT + 1):
            runner.launch(whole(admitted(runner, [20]))).wait()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    try:
        runner.begin()
        for _ in range(CAPTURED_AT + 1):
            runner.launch(whole(admitted(runner, [20]))).wait()
    finally:
        handle.remove()
    assert len(graphs_of(runner)) == 0


def test_buckets_waste_little_and_are_few():
    buckets = buckets_up_to(16384)
    assert buckets == sorted({bucket_of(rows) for rows in range(1, 16385)})
    assert len(buckets) < 50 and all(bucket % 16 == 0 for bucket in buckets)
    assert [sampled_bucket_of(n) for n in (0, 1, 16, 17, 64, 65, 256, 257)] == [
        *(16, 16, 16, 64, 64, 256, 256, 1024)
    ]
    for rows in range(1, 16385):
        bucket = bucket_of(rows)
        assert rows <= bucket and bucket_of(bucket) == bucket
        assert bucket - rows < max(16, rows / (8 if rows > FINE_ROWS else 1.9))


def test_graphs_are_for_models_whose_layers_the_host_outlasts(model):
    layer = model.model.layers[0]
    assert layer_parameters(model) == sum(p.numel() for p in layer.parameters())
    qwen3_06b, qwen3_8b = 15_730_000, 193_000_000
    assert most_rows(qwen3_06b) > 16384 and 1000 < most_rows(qwen3_8b) < 4096


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"])
def test_a_bucket_moves_no_bit_and_no_route_of_a_mixture_of_experts(name):
    with patch(model := build_preset(name)):
        eager, captured = runner_of(model), runner_of(model, ragged=256)
        for lengths in ([3, 40, 9], [17], [5, 1, 2, 30, 64, 11]):
            assert prefilled(captured, lengths) == prefilled(eager, lengths)
        assert len(graphs_of(captured)) > 2
        layer = model.model.layers[-1]
        experts = layer.mlp.experts.gate_up_proj.numel() + layer.mlp.experts.down_proj.numel()
        of_a_row = experts * layer.mlp.gate.top_k // len(layer.mlp.gate.weight)
        dense = sum(p.numel() for p in layer.parameters()) - experts
        assert layer_parameters(model) >= dense + of_a_row


@pytest.mark.parametrize("mutant", [False, True])
def test_padding_reaches_no_expert(monkeypatch, mutant):
    """Negative control: a layout to which all rows are tokens."""
    counts = []
    find, load = cpu.route_rows, PaddedCall.load

    def counted(*args):
        counts.append(len((found := find(*args)).rows))
        return found

    def all_used(call, numbers):
        load(call, numbers)
        call.inputs["used"].fill_(call.shape.rows)

    monkeypatch.setattr(cpu, "route_rows", counted)
    if mutant:
        monkeypatch.setattr(PaddedCall, "load", all_used)
    with patch(model := build_preset("tiny-olmoe")):
        runner = runner_of(model, ragged=256)
        for _ in range(CAPTURED_AT + 1):
            first = len(counts)
            runner.launch(whole(admitted(runner, [5, 8]))).wait()
        layers = len(model.model.layers)
    assert (counts[first:] == counts[:layers]) is not mutant


def test_a_smaller_call_runs_in_a_larger_graph_until_its_padding_has_cost_a_capture(model):
    runner = runner_of(model, ragged=96)
    graphs = graphs_of(runner)
    graphs.capture_ahead(64, 1, truncates=PLAIN.truncation)
    assert {shape.rows for shape in graphs._captured} == {16, 64}
    for step in range(10):  # each time a third of a call by the host
        assert runner.launch(whole(admitted(runner, [20]))).replayed_prefill
        assert (len(graphs) > 2) == (step >= 8)
    truncated = runner.launch(whole(admitted(runner, [20], TRUNCATED)))
    assert not truncated.replayed_prefill
