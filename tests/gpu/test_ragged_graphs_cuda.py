"""Prefill replayed from CUDA graphs, attention between them: the bytes of the same ops alone."""

from functools import partial

import pytest
import torch

from rl_consistency.models.forward import paged_hidden_states
from rl_consistency.models.graph_cache import borrowed, bucket_of
from rl_consistency.models.patch import patch
from rl_consistency.rollout.device.calls import RaggedCall
from rl_consistency.rollout.device.ragged_graphs import CAPTURED_AT, PaddedCall
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import ScheduledChunk
from rl_consistency.verify.presets import build_preset
from tests.gpu.test_decode_graphs_cuda import no_waiting
from tests.rollout.device import launches
from tests.rollout.device.launches import PLAIN, admitted, whole

pytestmark = pytest.mark.gpu

TRUNCATED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, seed=3)
MOST, BLOCKS = 40, 80
"""Sequences, and blocks of 16 tokens for each."""
BATCHES = ([1], [16], [17, 1], [300, 5, 64], [700, 640], [33] * 40, [1200, 1, 15, 16, 17, 129])


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def model(request, small_model):
    model = small_model(request.param, max_position_embeddings=16 * BLOCKS)
    with patch(model):
        yield model


def runner_of(model, **settings):
    sizes = {"block_size": 16, "num_blocks": BLOCKS * MOST, "max_num_seqs": MOST}
    return launches.runner_of(model, **sizes, **settings)


prompts = partial(admitted, blocks=BLOCKS, vocabulary=331)
prefilled = partial(launches.prefilled, blocks=BLOCKS, vocabulary=331)


@pytest.fixture(scope="module")
def eager(model):
    return runner_of(model, cuda_graphs=False)


@pytest.fixture(scope="module")
def captured(model):
    """One runner for all calls, which share its memory."""
    return runner_of(model)


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED])
@pytest.mark.parametrize("cut", [0, 1, 16, 130])
@pytest.mark.parametrize("lengths", BATCHES)
def test_no_bucket_and_no_chunk_moves_a_bit(eager, captured, lengths, cut, params):
    assert prefilled(captured, lengths, params, cut) == prefilled(eager, lengths, params)
    rows = sum(n for n in lengths if n > 1)  # a lone token is decoded, by a graph of its own
    captured_rows = {shape.rows for shape in captured.ragged_graphs._captured}
    assert cut or not rows or bucket_of(rows) in captured_rows


def test_a_replay_never_waits(eager, captured):
    lengths = [300, 5, 64]
    expected = prefilled(eager, lengths)
    assert prefilled(captured, lengths) == expected
    sequences = prompts(captured, lengths)
    with no_waiting():
        torch.cuda._sleep(1_000_000_000)
        step = captured.launch(whole(sequences))
    assert step.wait() == expected[0]


def test_the_comparison_notices_attention_of_an_earlier_call(model, eager, monkeypatch):
    """Negative control."""
    expected = prefilled(eager, [300, 5, 64])
    monkeypatch.setattr(PaddedCall, "attention", lambda call, q, *_: call.results(q))
    runner = runner_of(model)
    with pytest.raises(AssertionError):
        prefilled(runner, [300, 5, 64])
    assert expected == prefilled(eager, [300, 5, 64])


def test_new_weights_in_place_need_no_new_graph_and_moved_ones_do(small_model):
    with patch(model := small_model(max_position_embeddings=16 * BLOCKS)):
        runner = runner_of(model)
        before = prefilled(runner, [90, 700])
        graphs = len(runner.ragged_graphs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        runner.begin()
        after = prefilled(runner, [90, 700])
        assert len(runner.ragged_graphs) == graphs > 0
        assert after == prefilled(runner_of(model, cuda_graphs=False), [90, 700]) != before
        for parameter in model.parameters():
            old = parameter.data
            parameter.data = old.clone()
            old.fill_(torch.nan)
        runner.begin()
        assert len(runner.ragged_graphs) == 0
        assert prefilled(runner, [90, 700]) == after


def test_hidden_states_of_some_rows_are_those_among_all(model, captured):
    sequences = prompts(captured, [300, 5, 64])
    captured.launch(whole(sequences)).wait()
    torch.manual_seed(0)
    device = captured.device
    ids, positions = torch.randint(331, (69,), device=device), torch.arange(69, device=device)
    call = RaggedCall.of([ScheduledChunk(sequences[2], 0, 69, True)], captured._state)
    paged = call.paged(captured._cache, positions)
    everything = paged_hidden_states(model, ids, positions, paged)
    for rows in ([68], [0, 5, 5, 68], list(range(69)), []):
        some = torch.tensor(rows, dtype=torch.int64, device=device)
        found = paged_hidden_states(model, ids, positions, paged, some)
        assert found.equal(everything[some])


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"])
def test_no_bucket_moves_a_bit_or_a_route_of_a_mixture_of_experts(name):
    with patch(model := build_preset(name, torch.bfloat16).cuda()):
        eager, captured = runner_of(model, cuda_graphs=False), runner_of(model)
        for lengths in ([3, 40, 9], [17], [5, 1, 2, 30, 64, 11], [120] * 9):
            assert prefilled(captured, lengths) == prefilled(eager, lengths)
        assert len(captured.ragged_graphs) >= 3


def test_borrowed_memory_is_not_kept():
    torch.cuda.empty_cache()
    x = torch.arange(24.0, device="cuda", dtype=torch.bfloat16).view(2, 3, 4)[:, 1:]
    view, before = borrowed(x), torch.cuda.memory_allocated()
    assert view.equal(x) and view.stride() == x.stride() and view.dtype == x.dtype
    assert view.data_ptr() == x.data_ptr()
    del x
    assert torch.cuda.memory_allocated() < before


def test_engine_rollouts_do_not_depend_on_graphs_of_prefill(small_model):
    """More samples than run at a time, so that prompts join those that decode."""
    sampling = SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True)
    batch = [[(5 * i + n) % 331 for n in range(7 + 61 * i % 200)] for i in range(24)]
    with patch(model := small_model(max_position_embeddings=16 * BLOCKS)):
        found = []
        for graphs in (False, True):
            engine = RolloutEngine(
                model, eos_token_id=1, max_num_seqs=16, num_kv_blocks=400, cuda_graphs=graphs,
                max_batch_tokens=512, quiet=True,
            )  # fmt: skip
            for _ in range(CAPTURED_AT):
                done = engine.generate(batch, sampling)
                found.append([(c.token_ids, c.token_logprobs.numpy().tobytes()) for c in done])
        assert len(engine._runner.ragged_graphs) > 2
    assert all(each == found[0] for each in found)
