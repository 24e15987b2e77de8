"""Decode steps replayed from CUDA graphs: the bytes of the same steps run op by op, no waiting."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rl_consistency.kernels.attention.paged_cache_triton import cache_write
from rl_consistency.models.forward import rotary_rows
from rl_consistency.models.patch import patch
from rl_consistency.rollout.device.decode_graphs import DecodeCall, buckets_up_to
from rl_consistency.rollout.device.ragged_graphs import CAPTURED_AT
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.rollout.device import launches
from tests.rollout.device.launches import PLAIN, admitted, ahead, decoded, verified, whole

pytestmark = pytest.mark.gpu

WARM = SamplingParams(temperature=0.7, seed=3)
TRUNCATED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, seed=3)
GREEDY = SamplingParams(temperature=0.0, seed=3)
MOST = 262
BLOCKS = 8
"""Of 16 tokens, for each sequence."""
EDGES = sorted({n for b in buckets_up_to(MOST) for n in (b - 1, b, b + 1) if 1 <= n <= MOST})


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def model(request, small_model):
    model = small_model(request.param)
    with patch(model):
        yield model


@pytest.fixture(scope="module")
def texts(model):
    """What eager steps of all sequences give, [MOST][1 + 4] (token, logprob)."""
    runner = runner_of(model, cuda_graphs=False)
    return decoded(runner, prompts(runner, MOST))


@pytest.fixture(scope="module")
def captured(model):
    """One runner for all numbers of sequences, so that each graph is captured once."""
    return runner_of(model)


def runner_of(model, *, most=MOST, **settings):
    sizes = {"block_size": 16, "num_blocks": BLOCKS * most, "max_num_seqs": most}
    return launches.runner_of(model, **sizes, **settings)


def prompts(runner, count, params=PLAIN):
    lengths = [1 + 11 * i % 90 for i in range(count)]
    return admitted(runner, lengths, params, blocks=BLOCKS, vocabulary=331)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("count", EDGES)
def test_no_number_of_rows_moves_a_bit(captured, texts, count):
    assert decoded(captured, prompts(captured, count)) == texts[:count]


@pytest.mark.parametrize("params", [WARM, TRUNCATED, GREEDY, (PLAIN, TRUNCATED, GREEDY, WARM)])
def test_no_sampling_parameter_depends_on_the_graph(model, captured, params):
    eager = runner_of(model, cuda_graphs=False)
    expected = decoded(eager, prompts(eager, 33, params))
    assert decoded(captured, prompts(captured, 33, params)) == expected
    assert decoded(captured, prompts(captured, 7, params)) == expected[:7]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("params", [PLAIN, TRUNCATED])
def test_guesses_are_judged_by_plain_decoding(model, captured, count, params):
    eager = runner_of(model, cuda_graphs=False)
    expected = decoded(eager, prompts(eager, count, params), 8)
    lengths = [(3 * i + 1) % 8 for i in range(count)]
    found = verified(captured, prompts(captured, count, params), expected, lengths)
    assert found == [text[1 : 2 + n] for text, n in zip(expected, lengths)]


def test_the_comparison_notices_a_shifted_position(captured, texts, monkeypatch):
    """Negative control."""
    stage = DecodeCall.stage

    def shifted(call, *numbers):
        buffer = stage(call, *numbers)
        call._fields.tensors(buffer)["positions"].add_(1)
        return buffer

    monkeypatch.setattr(DecodeCall, "stage", shifted)
    assert decoded(captured, prompts(captured, 8)) != texts[:8]


def test_a_launch_never_waits(captured, texts):
    """Nor does one that mixes prefill and decoding."""

    def steps():
        old, new = (sequences := prompts(captured, 20))[:9], sequences[9:]
        first = captured.launch(whole(old))
        second = captured.launch([*ahead(old, 0), *whole(new)])
        return [row for step in (first, second) for [row] in step.wait()]

    expected = steps()  # compiles, certifies and captures
    for _ in range(CAPTURED_AT):  # until the calls of prefill are captured too
        assert steps() == expected
    assert expected[:9] == [text[0] for text in texts[:9]]
    queue = []
    with no_waiting():
        old, new = (sequences := prompts(captured, 20))[:9], sequences[9:]
        torch.cuda._sleep(2_000_000_000)  # a second: the host may have to share its cores
        busy = torch.cuda.Event()
        busy.record()
        queue.append(captured.launch(whole(old)))
        queue.append(captured.launch([*ahead(old, 0), *whole(new)]))
        assert not busy.query(), "the host waited for the work queued before"
    assert [row for step in queue for [row] in step.wait()] == expected


def test_many_steps_may_be_queued_before_the_first_is_read(model, captured):
    eager = runner_of(model, cuda_graphs=False)
    expected = decoded(eager, prompts(eager, 5), 30)
    assert decoded(captured, prompts(captured, 5), 30) == expected


def test_new_weights_in_place_need_no_new_graph(small_model):
    with patch(model := small_model()):
        runner = runner_of(model, most=8)
        before = decoded(runner, prompts(runner, 5))
        graphs = len(runner.decode_graphs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        runner.begin()
        after = decoded(runner, prompts(runner, 5))
        assert len(runner.decode_graphs) == graphs > 0
        fresh = runner_of(model, most=8, cuda_graphs=False)
        assert after == decoded(fresh, prompts(fresh, 5)) != before


def test_a_policy_that_trains_with_checkpointing_decodes_by_the_same_graphs(small_model):
    """It is in training mode, and has another hook on its embedding after every step."""
    with patch(model := small_model()):
        runner = runner_of(model, most=8)
        before = decoded(runner, prompts(runner, 5))
        model.train()
        found = []
        for _ in range(3):
            model.gradient_checkpointing_enable()
            runner.begin()
            assert decoded(runner, prompts(runner, 5)) == before
            found.append([*runner.decode_graphs._captured.values()])
        assert not runner.hooked and found[0] == found[1] == found[2] != []


def test_weights_that_moved_are_captured_anew(small_model):
    with patch(model := small_model()):
        runner = runner_of(model, most=8)
        before = decoded(runner, prompts(runner, 5))
        for parameter in model.parameters():
            old = parameter.data
            parameter.data = old.clone()
            old.fill_(torch.nan)
        runner.begin()
        assert len(runner.decode_graphs) == 0
        assert decoded(runner, prompts(runner, 5)) == before


def test_a_graph_keeps_the_rotary_table_it_reads(small_model):
    with patch(model := small_model()):
        runner = runner_of(model, most=8)
        before = decoded(runner, prompts(runner, 5))
        model.model.rotary_emb._rotary_table = None
        torch.full((2, 1024, 32), torch.nan, device="cuda")  # where the table was, were it free
        assert decoded(runner, prompts(runner, 5)) == before
        assert rotary_rows(model, 1).isfinite().all()


def test_graphs_captured_ahead_of_time_are_the_ones_used(model, texts):
    runner = runner_of(model, most=40)
    for rows, width in itertools.product([40, 33, 5, 1], (1, 4)):
        runner.decode_graphs.captured(
            runner.decode_graphs.shape_for(rows, width, truncates=False, longest=64)
        )
    assert len(runner.decode_graphs) == 6  # of 40, 8 and 1 rows, 1 and 4 wide
    runner.launch(whole(sequences := prompts(runner, 33)))
    with no_waiting():
        step = runner.launch(ahead(sequences, 0))
    assert [row for [row] in step.wait()] == [text[1] for text in texts[:33]]
    assert len(runner.decode_graphs) == 6


@pytest.mark.large
def test_a_cache_of_more_than_two_to_the_31_elements_is_written_at_its_end():
    blocks = 2**31 // (16 * 8 * 128) + 1
    cache = torch.zeros(blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    new = torch.randn(3, 8, 128, device="cuda").bfloat16()
    slots = torch.tensor([16 * blocks - 1, 0, 16 * blocks - 16], device="cuda")
    cache_write(new, new, cache, cache, slots)
    assert cache.view(-1, 8, 128)[slots].equal(new)
    assert int(cache.any(dim=-1).any(dim=-1).sum()) == 3
