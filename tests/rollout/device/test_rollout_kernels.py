"""Which kernels are compiled ahead: the sizes that stand for all others. On a GPU see tests/gpu."""

import random
from dataclasses import replace

import pytest
import torch

from rl_consistency.kernels.attention import schedules
from rl_consistency.kernels.attention.layout import SHARED_BLOCK, PagedAttention
from rl_consistency.kernels.attention.schedules import plan_forward
from rl_consistency.kernels.core.launch import cdiv
from rl_consistency.kernels.linear.schedules import pick_gate_up, pick_qkv
from rl_consistency.kernels.matmul.schedules import pick
from rl_consistency.models import decoder, modules
from rl_consistency.models.patch import patch
from rl_consistency.numerics.strict import strict
from rl_consistency.rollout.device import ragged_graphs, rollout_kernels
from rl_consistency.rollout.device.calls import RaggedCall, RaggedShape
from rl_consistency.rollout.device.model_runner import ModelRunner
from rl_consistency.rollout.device.rollout_kernels import (
    RolloutBounds,
    RolloutKernels,
    continued_shapes,
    prompt_shapes,
    row_counts,
)
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.verify.presets import build_preset, preset_config
from tests.rollout.device.launches import Uncaptured, UncapturedRagged
from tests.rollout.engine.engines import content

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def model():
    with patch(found := build_preset("tiny-qwen3", torch.float32)):
        yield found


def weights_of(name):
    """[n, k] of the products of a model."""
    config = preset_config(name)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * head, config.num_key_value_heads * head
    return {(heads, hidden), (kv_heads, hidden), (hidden, heads), (inner, hidden), (hidden, inner)}


def picks(rows, shapes):
    """What the rules pick for so many rows."""
    found = {(n, k, pick(rows, n, k, BF16, "nt", True)) for n, k in shapes}
    return found | {pick_qkv(rows, BF16), pick_gate_up(rows, 8960, BF16, True)}


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen3-0.6b"])
def test_the_numbers_of_rows_meet_nearly_all_schedules_of_any_number(name):
    """A schedule is one kernel for all weights. What is met by no entry may compile later."""
    shapes, most = weights_of(name), 8192
    met = set().union(*(picks(rows, shapes) for rows in row_counts(most)))
    kernels = {found[-1] for found in met if isinstance(found, tuple)}
    for rows in [*range(1, 300, 7), *range(300, most, 97)]:
        missed = {f[-1] for f in picks(rows, shapes) if isinstance(f, tuple)} - kernels
        assert not missed, rows


BLOCK_SIZE = 16
HEADS = [(14, 2, 64), (16, 8, 128), (28, 4, 128), (8, 1, 64), (20, 20, 80)]
SIZES = [(40, 600, 512), (256, 8192, 4096), (64, 2048, 40960)]
"""Sequences, tokens of a step, and tokens of the longest sequence."""


@pytest.fixture
def hopper(monkeypatch):
    """An H200, by what it says of itself."""
    monkeypatch.setattr(schedules, "sm_count", lambda device: 132)
    for name in ("has_tma", "has_wgmma"):
        monkeypatch.setattr(schedules, name, lambda device: True)


def bounds_of(sequences, tokens, longest):
    return RolloutBounds(tokens=tokens, sequences=sequences, longest=longest, batch_sizes=(1,))


def kernel(queries, pasts, heads, cache):
    """What tells attention's kernels for these chunks apart."""
    q = torch.empty(1, heads, cache.shape[-1], dtype=cache.dtype).expand(sum(queries), -1, -1)
    keys = cache.view(-1, *cache.shape[2:])
    plan = plan_forward(q, keys, keys, layout_of(queries, pasts, cache), None)
    dealt = plan.cut and (plan.cut.whole > 0, plan.tiles > plan.cut.whole, plan.slices)
    return plan.schedule, plan.cut and (plan.stored, dealt)


def chunks(draw, bounds):
    """Random lengths of chunks and of what they continue, within the bounds."""
    count = draw.choice([1, 2, 3, draw.randint(1, bounds.sequences), draw.randint(1, 40)])
    most = draw.choice([1, 1, 2, 3, 4, 8, 16, 100])
    queries = [draw.choice([1, draw.randint(1, most)]) for _ in range(count)]
    while sum(queries) > bounds.tokens:
        queries.pop()
    longest = draw.choice([30, 200, bounds.longest - most, bounds.longest - most])
    return queries, [draw.randint(1, min(longest, bounds.longest - most)) for _ in queries]


def layout_of(queries, pasts, cache):
    contexts = [n + past for n, past in zip(queries, pasts, strict=True)]
    return PagedAttention(
        query_starts=[sum(queries[:i]) for i in range(len(queries))],
        query_lens=queries,
        context_lens=contexts,
        block_tables=[range(cdiv(keys, BLOCK_SIZE)) for keys in contexts],
        slot_mapping=torch.empty(0, dtype=torch.int64),
        key_cache=(cache,),
        value_cache=(cache,),
        block_size=BLOCK_SIZE,
    )


@pytest.mark.parametrize("heads, kv_heads, head_dim", HEADS)
@pytest.mark.parametrize("sizes", SIZES)
def test_nearly_every_chunk_behind_a_past_meets_a_kernel_of_the_list(
    sizes, heads, kv_heads, head_dim, hopper
):
    """The others compile when they come."""
    bounds = bounds_of(*sizes)
    cache = torch.empty(2, BLOCK_SIZE, kv_heads, head_dim, dtype=BF16)
    met = {
        kernel([s.queries] * s.sequences, [s.past] * s.sequences, heads, cache)
        for s in continued_shapes(bounds)
    }
    draw = random.Random(heads)
    found = [kernel(*chunks(draw, bounds), heads, cache) for _ in range(200)]
    assert sum(each in met for each in found) >= 0.95 * len(found)


def test_each_draft_without_a_graph_samples_more_rows():
    def most(draft):
        bounds = replace(bounds_of(3, 100, 64), draft=draft)
        return max(shape.sampled for shape in prompt_shapes(bounds))

    assert (most(0), most(4)) == (3, 15)


@pytest.mark.parametrize("sizes", [*SIZES, (2, 100, 30), (1, 1, 2), (3, 40, 17)])
def test_shapes_stay_within_the_bounds_and_continue_a_past(sizes):
    bounds = bounds_of(*sizes)
    continued, prompts = list(continued_shapes(bounds)), list(prompt_shapes(bounds))
    assert len(continued) < 400 and len(prompts) < 90
    for shape in (*continued, *prompts):
        assert shape.sequences * shape.queries <= bounds.tokens
        assert shape.sequences <= bounds.sequences
        assert shape.past + shape.queries <= bounds.longest
        assert 1 <= shape.sampled <= shape.sequences * shape.queries
    assert [{shape.past > 0 for shape in each} for each in (continued, prompts)] == [
        {True}, {False}
    ]  # fmt: skip


def test_layers_that_differ_in_what_they_launch_are_kinds_of_their_own(model):
    layers = model.model.layers
    assert next(index for index, _ in decoder._one_of_each_kind(layers)) == 0
    alike = torch.nn.ModuleList([layers[0]] * 3)
    assert [index for index, _ in decoder._one_of_each_kind(alike)] == [0]
    window, layers[1].self_attn.window = layers[1].self_attn.window, 8
    try:
        both = torch.nn.ModuleList([layers[0], layers[1]])
        assert [index for index, _ in decoder._one_of_each_kind(both)] == [0, 1]
    finally:
        layers[1].self_attn.window = window


@pytest.fixture
def asked(monkeypatch):
    """The bounds that kernels are compiled for, where no prompt is compiled for unasked."""
    found = []
    compiled = RolloutKernels.compile

    def noted(self, bounds):
        if not self._runner.hooked:
            found.append(bounds)
        compiled(self, bounds)

    monkeypatch.setattr(ragged_graphs, "AHEAD", (1,))
    monkeypatch.setattr(RolloutKernels, "compile", noted)
    return found


def engine_of(model, **settings):
    sizes = {"num_kv_blocks": 60, "max_num_seqs": 5}
    return RolloutEngine(model, eos_token_id=None, **sizes | settings)


def test_the_first_rollout_of_a_kind_asks_for_the_sizes_it_has(model, monkeypatch, asked):
    monkeypatch.setattr(rollout_kernels, "SHARED_BLOCK", 2)
    engine = engine_of(model)
    plain, truncated = SamplingParams(n=2, max_tokens=3), SamplingParams(top_k=3, max_tokens=3)
    for sampling in (plain, plain, truncated, truncated):
        engine.generate([[1, 2, 3], [4, 5]], sampling)
    assert [(b.truncates, b.shares) for b in asked] == [(False, True), (True, False)]
    bounds = asked[0]
    assert (bounds.tokens, bounds.sequences, bounds.longest) == (10, 4, 6)
    assert bounds.batch_sizes == (1, 2, 4)
    engine.warm_up(plain, batch_sizes=[2, 5])
    assert asked[-1].batch_sizes == (2, 5) and asked[-1].tokens == 16384
    with pytest.raises(ValueError, match="batch sizes must be 1 to max_num_seqs=5"):
        engine.warm_up(plain, batch_sizes=[6])
    engine.generate([[1] * 40] * 3, plain)
    assert len(asked) == 3


def test_sequences_share_keys_if_two_begin_alike_whoever_asked_for_them(model, asked):
    common = list(range(SHARED_BLOCK))
    for prompts, n, shares in (
        ([[*common, 1], [*common, 2]], 1, True),
        ([[*common, 1]], 2, True),
        ([common, common], 2, False),
        ([[*common, 1], [7, *common]], 1, False),
    ):
        for prefixes in (True, False):
            engine = engine_of(model, enable_prefix_sharing=prefixes)
            engine.generate(prompts, SamplingParams(n=n, max_tokens=1))
            assert asked.pop().shares == (shares and prefixes)


@pytest.mark.parametrize(
    ("prompts", "changes", "sizes"),
    [
        ([[1, 2, 3]], {}, None),
        ([[1, 2, 3]] * 5, {}, (16, 5, 8)),
        ([[1, 2]], {"max_tokens": 9}, (2, 1, 16)),
        ([[1, 2]], {"speculation": 3}, (4, 1, 8)),
        ([[1, 2]], {"speculation": 3, "n": 2}, (8, 2, 8)),
    ],
)
def test_a_later_rollout_compiles_what_the_first_did_not_need(
    model, asked, prompts, changes, sizes
):
    engine, first = engine_of(model), SamplingParams(max_tokens=3)
    for found in ([[1, 2, 3], [4, 5]], [[4, 5]]):
        engine.generate(found, first)
    assert len(asked) == 1
    for _ in range(2):
        engine.generate(prompts, replace(first, **changes))
    later = [(b.tokens, b.sequences, b.longest) for b in asked[1:]]
    assert later == ([] if sizes is None else [sizes])


def test_where_a_sequence_may_be_preempted_a_step_may_have_all_that_it_has_sampled(model, asked):
    for blocks in (6, 8, 9):  # of 16 tokens; a sequence may take three of them
        engine = engine_of(model, num_kv_blocks=blocks, max_num_seqs=3)
        engine.generate([[1, 2]] * 3, SamplingParams(max_tokens=40))
    assert [bounds.tokens for bounds in asked] == [3 * 42, 3 * 42, 3 * 2]


def test_what_hooks_kept_from_being_compiled_is_compiled_without_them(model, asked):
    engine = engine_of(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    handle.remove()
    assert not asked
    engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert len(asked) == 1


def test_prompts_of_lengths_to_come_find_a_graph_that_was_captured_with_the_kernels(
    model, monkeypatch
):
    monkeypatch.setattr(ragged_graphs, "AHEAD", (16, 32, 64))
    engine, fresh = engine_of(model), engine_of(model)
    runner, one = engine._runner, SamplingParams(max_tokens=1, seed=3)
    runner.ragged_graphs = graphs = UncapturedRagged(*runner.parts, most=64)
    engine.generate([[1, 2, 3]], one)
    captured = {shape.rows for shape in graphs._captured}
    assert captured == {16, 32, 64}
    for length in (5, 17, 31, 40):
        prompt = [[(7 * length + i) % 40 for i in range(length)]]
        assert content(engine.generate(prompt, one)) == content(fresh.generate(prompt, one))
        assert engine.stats.replayed_prefills == 1
    assert len(graphs._captured) == 3
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    engine.generate([[1, 2]], one)
    handle.remove()
    assert not graphs._captured


def test_stock_attention_gathers_nothing_while_kernels_compile(model, monkeypatch):
    """It has no kernel to compile, and its longest context may not fit the device."""
    runner = ModelRunner(model, block_size=4, num_blocks=20, max_num_seqs=3)
    call = RaggedCall.padding(RaggedShape(queries=5, past=9), runner._state, 4)
    for name in ("stock_attention", "stock_captured_attention"):
        monkeypatch.setattr(modules, name, lambda *_, **__: pytest.fail("computed"))
    monkeypatch.setattr(modules, "compiles_only", lambda: True)
    with strict(except_=["attention"]):
        runner._run(call, truncates=False)
    monkeypatch.setattr(modules, "compiles_only", lambda: False)
    with strict(except_=["attention"]), pytest.raises(pytest.fail.Exception, match="computed"):
        runner._run(call, truncates=False)


def list_of(model, sampling, **settings):
    """The calls of a warm-up, as on a GPU."""
    engine = engine_of(model, max_batch_tokens=40, **settings)
    kernels, runner = engine._kernels, engine._runner
    runner.decode_graphs = Uncaptured(*runner.parts, capacity=64)
    runner.ragged_graphs = UncapturedRagged(*runner.parts, most=64)
    return runner, kernels._calls(kernels.bounds(sampling, None, 64))


def test_the_list_runs_as_it_is_and_touches_no_sequence(model):
    runner, calls = list_of(model, SamplingParams(top_k=3, n=2))
    kept = [*(c[:-1] for c in (*runner._cache.keys, *runner._cache.values))]
    before = [*(x.clone() for x in kept)], runner._state.last_tokens[:-1].clone()
    with torch.no_grad():
        for call in calls:
            call()
    assert all(x.equal(old) for x, old in zip(kept, before[0]))
    assert runner._state.last_tokens[:-1].equal(before[1]) and not runner._state._stale


def test_nothing_is_compiled_ahead_on_a_cpu(model, monkeypatch):
    monkeypatch.setattr(rollout_kernels, "compile_ahead", lambda *_: pytest.fail("called"))
    engine_of(model).warm_up(SamplingParams(), batch_sizes=[1])


@pytest.mark.parametrize(
    ("told", "ranks", "threads"), [("4", 4, 8), ("64", 64, 1), ("", 1, None), ("x", 1, None)]
)
def test_ranks_of_one_machine_share_its_cores_and_one_speaks(
    model, monkeypatch, told, ranks, threads
):
    used, silent = [], []
    line = rollout_kernels.compile_line
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    monkeypatch.setattr(rollout_kernels, "use_workers", used.append)
    monkeypatch.setattr(rollout_kernels.os, "sched_getaffinity", lambda pid: range(32))
    monkeypatch.setattr(
        rollout_kernels,
        "compile_line",
        lambda *, quiet: (silent.append(quiet), line(quiet=quiet))[1],
    )
    assert rollout_kernels.local_ranks() == ranks
    engine = engine_of(model)
    monkeypatch.setattr(engine._runner, "device", torch.device("cuda"))
    monkeypatch.setattr(engine._runner, "_current_stream", lambda: None)
    monkeypatch.setattr(rollout_kernels, "compile_ahead", lambda *_: 0)
    monkeypatch.setattr(engine._runner, "begin", lambda *_: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        engine.warm_up(SamplingParams(max_tokens=3), batch_sizes=[2])
    assert used == ([] if threads is None else [threads, threads])
    assert silent == [False, True]
