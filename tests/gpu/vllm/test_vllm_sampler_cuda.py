"""The sampler's CUDA graphs give the bytes of the same calls op by op; neighbours move none."""

import pytest
import torch

from rl_consistency.rollout.device.sampling_table import SamplingTable
from rl_consistency.rollout.sampling_params import SamplingParams, Truncation
from tests.gpu.vllm.engines import ENVIRONMENT

pytestmark = pytest.mark.gpu

SLOTS = 40
VOCABULARY = 151_936


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from rl_consistency.integrations.vllm import sampler
    return sampler


@pytest.fixture(scope="module")
def table():
    made = SamplingTable(SLOTS, torch.device("cuda"))
    kinds = (
        {},
        {"temperature": 0.7},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_p": 0.8, "top_k": 1000, "min_p": 0.01},
        {"temperature": 0.0},
        {"temperature": 0.0, "greedy_logprobs": "full"},
    )
    for slot in range(SLOTS):
        params = SamplingParams(seed=2**60 + slot, **kinds[slot % len(kinds)])
        made.write(slot, params, prompt_id=slot, sample_index=3)
    made.withhold(SLOTS - 1)
    slots = torch.arange(SLOTS)
    new = {name: torch.from_numpy(x).cuda() for name, x in made.written(slots.numpy()).items()}
    made.load(slots.cuda(), new)
    return made


def logits_of(rows, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(rows, VOCABULARY, generator=generator, device="cuda") * 2
    values[:, 11] += 9
    values[:, [70, 90_000]] = 12.5  # equal ones
    return values


def same(found, expected):
    return [
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and a.isnan().equal(b.isnan())
        for a, b in zip(found, expected, strict=True)
    ] == [True] * 3


def test_graphs_give_the_bytes_of_calls_op_by_op(plugin, table):
    graphs = plugin.SamplerGraphs(table, 40, logits_of(1))
    results = []
    for step, count in enumerate((40, 1, 3, 17, 40, 32, 2)):
        slots = torch.randperm(SLOTS)[:count].to("cuda", torch.int32)
        logits, positions = logits_of(count, seed=step), torch.arange(count, device="cuda") + step
        call = logits, slots, positions, Truncation.DRAW
        results.append((graphs.draw(*call), plugin.draw(table, *call)))
    # Compared at the end, when other replays have run.
    assert all(same(*pair) for pair in results)


@pytest.mark.parametrize("truncates", Truncation)
def test_neither_other_rows_nor_the_truncation_asked_for_move_a_bit(plugin, table, truncates):
    kinds = {Truncation.NONE: (0, 1), Truncation.SUPPORT: (0, 3, 5, 6), Truncation.DRAW: (7, 2, 1)}
    slots = torch.tensor(kinds[truncates], device="cuda")
    logits, positions = logits_of(len(slots)), torch.zeros_like(slots)
    whole = plugin.draw(table, logits, slots, positions, Truncation.DRAW)
    assert same(plugin.draw(table, logits, slots, positions, truncates), whole)
    alone = [
        plugin.draw(table, logits[i : i + 1], slots[i : i + 1], positions[i : i + 1], truncates)
        for i in range(len(slots))
    ]
    assert same([torch.cat(column) for column in zip(*alone, strict=True)], whole)


def test_the_most_likely_ids_are_those_of_a_stable_sort(plugin, table):
    logits = logits_of(70)
    expected = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :20]
    assert plugin.most_likely(logits, 20).equal(expected)
    slots, positions = (torch.zeros(70, dtype=torch.int64, device="cuda") for _ in range(2))
    plain = plugin.draw(table, logits, slots, positions, Truncation.NONE)
    more = plugin.draw(table, logits, slots, positions, Truncation.NONE, 20)
    assert same([more[0][:, :1], more[1][:, :1], more[2]], plain)
    assert more[1][:, 1:].diff(dim=1).max() <= 0 and more[1].isfinite().all()


def test_a_withheld_row_is_nan_and_leaves_the_others_alone(plugin, table):
    slots = torch.tensor([3, SLOTS - 1, 6, 0], device="cuda")
    logits, positions = logits_of(4), torch.zeros_like(slots)
    found = plugin.draw(table, logits, slots, positions, Truncation.SUPPORT, 2)
    assert found[0][1, 0] == 0 and found[1][1].isnan().all()
    others = [0, 2, 3]
    alone = plugin.draw(
        table, logits[others], slots[others], positions[others], Truncation.SUPPORT, 2
    )
    assert same([x[others] for x in found], alone)
