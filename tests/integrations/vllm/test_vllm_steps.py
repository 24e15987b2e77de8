"""Layouts of a step: what shares a launch, what padding is, and which keys are read once."""

import itertools
import random

import numpy as np
import pytest
import torch

from rl_consistency.kernels.attention.layout import MOST_SHARERS, SHARED_BLOCK
from rl_consistency.rollout.device.shared_prefixes import most_runs
from tests.integrations.vllm.fake_vllm import CommonAttentionMetadata

CACHE = {"key_cache": [torch.zeros(64, 16, 2, 32)], "value_cache": [torch.zeros(64, 16, 2, 32)]}


@pytest.fixture
def steps():
    from rl_consistency.integrations.vllm import steps

    return steps


def common_of(chunks, *, pad=0):
    """Metadata of (new tokens, keys) of each sequence."""
    lens, contexts = ([each[i] for each in chunks] + [0] * pad for i in range(2))
    starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    ends = torch.tensor(contexts, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(lens),
        num_actual_tokens=sum(lens),
        max_query_len=max(lens),
        max_seq_len=max(contexts),
        block_table_tensor=torch.arange(len(lens) * 4, dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.zeros(sum(lens), dtype=torch.int64),
    )


def test_a_step_is_three_launches_of_attention_at_most(steps):
    chunks = [(1, 9), (1, 1), (3, 20), (5, 5), (7, 40), (9, 9)]
    layouts = steps.Step(common_of(chunks, pad=2)).layouts(lambda: CACHE | {"block_size": 16})
    found = [list(zip(x.query_starts, x.query_lens, x.context_lens, strict=True)) for x in layouts]
    assert found == [
        [(0, 1, 9), (1, 1, 1)],
        [(2, 3, 20), (10, 7, 40)],
        [(5, 5, 5), (17, 9, 9)],
    ]
    for layout, spans in zip(layouts, found, strict=True):
        tables = layout.tables(torch.device("cpu"))
        numbers = tables.query_start, tables.query_len, tables.context_len
        assert list(zip(*(x.tolist() for x in numbers), strict=True)) == spans
    assert layouts[1].block_table()[:, 0].tolist() == [8, 16]
    assert layouts[2].by_past()[1] is None  # read from the new keys
    assert layouts[1].by_past() == (None, layouts[1])


def test_padding_is_told_from_tokens_on_the_device(steps):
    step = steps.Step(common_of([(1, 9), (4, 4)], pad=3))
    assert step.used().tolist() == [5]
    assert step.used().data_ptr() != step.common.query_start_loc.data_ptr()


def test_lengths_that_are_only_bounds_are_refused(steps):
    common = common_of([(2, 9)])
    common.seq_lens_cpu_upper_bound = None
    with pytest.raises(ValueError, match="no lengths on the host"):
        steps.Step(common).layouts(lambda: CACHE | {"block_size": 16})


def blocks_of(groups, width, *, block_size=16):
    """Tables of groups of (samples, shared keys), each sample with blocks of its own behind."""
    free = itertools.count(1)
    rows = []
    for samples, keys in groups:
        shared = [next(free) for _ in range(keys // block_size)]
        for _ in range(samples):
            rows.append([*shared, *(next(free) for _ in range(width - len(shared)))])
    return torch.tensor(rows, dtype=torch.int32)


def runs_of(steps, table, past):
    found = steps.shared_tables(table, torch.tensor(past, dtype=torch.int32), 16)
    return [tuple(run) for run in found.runs.tolist() if run[2]], found.keys.tolist()


def test_samples_of_a_prompt_are_a_run_of_at_most_eight(steps):
    table = blocks_of([(16, 512), (4, 256), (1, 0), (9, 300)], 40)
    runs, keys = runs_of(steps, table, [600] * 30)
    assert runs == [(0, 8, 512), (8, 8, 512), (16, 4, 256), (21, 8, 256)]
    assert keys == [512] * 16 + [256] * 4 + [0] + [256] * 8 + [0]


def test_a_head_that_all_prompts_share_does_not_hide_that_of_a_group(steps):
    head = blocks_of([(1, 0)], 10)[0]
    table = blocks_of([(8, 512), (8, 512)], 40)
    table[:, :10] = head
    runs, _ = runs_of(steps, table, [600] * 16)
    assert runs == [(0, 8, 512), (8, 8, 512)]


def test_a_query_is_behind_all_keys_that_it_shares(steps):
    """The newest token's own key is not yet shared, and padding has no key."""
    table = blocks_of([(16, 640)], 64)
    runs, _ = runs_of(steps, table, [300, 129, *[640] * 12, 0, 0])
    assert runs == [(0, 2, 128), (2, 8, 640), (10, 4, 640)]


def test_runs_that_find_no_room_are_read_by_each_sequence(steps):
    runs, keys = runs_of(steps, blocks_of([(2, 128)] * 20, 20), [300] * 40)
    assert runs == [(2 * i, 2, 128) for i in range(most_runs(40))] and most_runs(40) == 10
    assert keys == [128] * 20 + [0] * 20


def test_no_run_is_found_where_nothing_is_shared(steps):
    runs, keys = runs_of(steps, blocks_of([(1, 0)] * 20, 40), [600] * 20)
    assert runs == [] and keys == [0] * 20


@pytest.mark.parametrize("seed", range(8))
def test_every_run_says_what_is_true_of_its_sequences(steps, seed):
    draw = random.Random(seed)
    groups = [(draw.randint(1, 11), draw.choice([0, 96, 128, 400, 640])) for _ in range(9)]
    table = blocks_of(groups, 48)
    past = [draw.randint(0, 48 * 16 - 1) for _ in range(len(table))]
    runs, keys = runs_of(steps, table, past)
    assert len(runs) <= most_runs(len(table))
    expected = np.zeros(len(table), dtype=int)
    for first, count, shared in runs:
        members = range(first, first + count)
        assert 2 <= count <= MOST_SHARERS and shared % SHARED_BLOCK == 0
        assert all(past[i] >= shared for i in members) and not expected[first : first + count].any()
        assert all((table[i] == table[first])[: shared // 16].all() for i in members)
        expected[first : first + count] = shared
    assert keys == expected.tolist()
