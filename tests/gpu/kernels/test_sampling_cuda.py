"""Sampling, its support, its random numbers and the digest of weights on a GPU."""

import itertools
import random
from functools import partial

import pytest
import torch

from rl_consistency.kernels.reduction.weights_digest import weights_digest
from rl_consistency.kernels.sampling.op import (
    SamplingRows,
    distribution,
)
from rl_consistency.kernels.sampling.vocabulary_triton import philox_uniforms
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.rollout.device.random_stream import device_uniforms, stream_keys
from tests.kernels.sampling.references import (
    KINDS,
    by_selection,
    by_sort,
    by_torch,
    logits,
    sample,
    uniforms_of,
)

pytestmark = pytest.mark.gpu

QWEN = 151936
logits = partial(logits, device="cuda")
SETTINGS = {
    "temperature": (1.0, 1.0, 0.7, 1.3, 0.0, 100.0, 1e-4),
    "top_k": (0, 0, 1, 2, 20, 50, 1000, 5000, 10**6),
    "top_p": (1.0, 1.0, 0.01, 0.5, 0.9, 0.95, 0.999),
    "min_p": (0.0, 0.0, 0.0, 0.001, 0.1, 0.5, 1.0),
}


def random_rows(count, seed=0):
    rng = random.Random(seed)
    rows = [
        SamplingRows.uniform(1, **{name: rng.choice(v) for name, v in SETTINGS.items()})
        for _ in range(count)
    ]
    return SamplingRows.concatenate(rows).to("cuda")


@pytest.mark.parametrize("vocabulary", [1, 2, 127, 129, 5011, QWEN])
@pytest.mark.parametrize("kind", KINDS)
def test_the_support_is_the_one_a_sort_gives(kind, vocabulary):
    values = logits(kind, 256, vocabulary)
    rows = random_rows(256, seed=vocabulary)
    for span in (slice(0, 128), slice(128, 256)):  # the sort takes 60 bytes an id
        expected = by_sort(values[span], rows.select(span))
        assert torch.equal(by_selection(values[span], rows.select(span)), expected)


def test_equal_logits_in_the_other_order_fail_the_same_check():
    values, rows = logits("ties", 64, 5011), random_rows(64)
    assert not torch.equal(by_selection(values.flip(1), rows).flip(1), by_sort(values, rows))


def test_a_vocabulary_with_more_blocks_than_a_tile():
    values = logits("plain", 4, 2**19 + 77)
    rows = SamplingRows.concatenate(
        [SamplingRows.uniform(1, top_k=k, top_p=p) for k, p in ((0, 0.9), (50, 0.9), (9999, 1.0))]
        + [SamplingRows.uniform(1, temperature=0.0)]
    ).to("cuda")
    assert torch.equal(by_selection(values, rows), by_sort(values, rows))


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("kind", ["plain", "flat", "peaked", "masked"])
def test_tokens_and_logprobs_are_those_of_the_torch_definition(kind, truncated):
    values = logits(kind, 256, QWEN)
    rows = random_rows(256) if truncated else SamplingRows.uniform(256, device="cuda")
    token_ids, logprobs = sample(values, rows, uniforms_of(256).cuda())
    expected_ids, expected_logprobs = by_torch(distribution(values, rows), uniforms_of(256).cuda())
    assert torch.equal(token_ids, expected_ids) and same_bytes(logprobs, expected_logprobs)


def test_a_row_does_not_depend_on_its_neighbours():
    values, rows, u = logits("plain", 256, 5011), random_rows(256), uniforms_of(256).cuda()
    together = sample(values, rows, u)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2)).cuda()
    permuted = sample(values[order], rows.select(order), u[order])
    assert all(same_bytes(a[order], b) for a, b in zip(together, permuted, strict=True))
    for i in range(0, 256, 17):
        one = slice(i, i + 1)
        alone = sample(values[one], rows.select(one), u[one])
        assert all(same_bytes(a[one], b) for a, b in zip(together, alone, strict=True))
    again = sample(values, rows, u)
    assert all(same_bytes(a, b) for a, b in zip(together, again, strict=True))


def test_nan_logits_disturb_no_other_row():
    values, rows, u = logits("plain", 64, 5011), random_rows(64), uniforms_of(64).cuda()
    clean = sample(values, rows, u)
    for bad in (torch.nan, torch.inf):
        spoilt = values.clone()
        spoilt[::2, 3000] = bad
        spoilt[4] = -torch.inf
        token_ids, logprobs = sample(spoilt, rows, u)
        assert token_ids[::2].eq(0).all() and logprobs[::2].isnan().all()
        assert torch.equal(token_ids[1::2], clean[0][1::2])
        assert same_bytes(logprobs[1::2], clean[1][1::2])


@pytest.mark.parametrize("truncates", [False, True])
def test_a_captured_draw_is_the_eager_one(truncates):
    count = 32
    settings = {"top_k": 20, "top_p": 0.95} if truncates else {}
    values = logits("plain", count, QWEN)
    rows = SamplingRows.uniform(count, temperature=0.6, device="cuda", **settings)
    keys = torch.from_numpy(stream_keys(range(count), [3] * count, [1] * count)).cuda()
    positions = torch.arange(count, device="cuda")

    def step():
        return sample(values, rows, device_uniforms(keys, positions))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        values.copy_(logits("plain", count, QWEN, seed))
        positions += 1
        rows.temperature.fill_(0.5 + 0.1 * seed)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bytes(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.parametrize("truncates", [False, True])
def test_nothing_of_the_size_of_the_logits_is_written_and_nobody_waits(truncates):
    values = logits("plain", 256, QWEN)
    settings = {"top_p": 0.95, "min_p": 0.01} if truncates else {}
    rows = SamplingRows.uniform(256, temperature=0.7, device="cuda", **settings)
    u = uniforms_of(256).cuda()
    sample(values, rows, u)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(values, rows, u)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < values.numel() * 4 // 8


@pytest.mark.large
def test_logits_past_two_to_the_31_elements():
    count = 14200
    values = torch.zeros(count, QWEN, device="cuda")
    values[-3:] = logits("plain", 3, QWEN)
    settings = ({}, {"top_p": 0.9}, {"top_k": 30, "min_p": 0.01})
    rows = SamplingRows.concatenate(
        [SamplingRows.uniform(count - 3, temperature=0.0)]
        + [SamplingRows.uniform(1, **s) for s in settings]
    ).to("cuda")
    u = uniforms_of(count).cuda()
    found = sample(values, rows, u)
    last = slice(count - 3, count)
    alone = sample(values[last].clone(), rows.select(last), u[last])
    assert all(same_bytes(a[last], b) for a, b in zip(found, alone, strict=True))
    assert found[0][: count - 3].eq(0).all()


def test_random_numbers_have_the_bits_of_the_host():
    rng = random.Random(5)
    columns = [
        [0, 2**bits - 1, *(rng.getrandbits(bits) for _ in range(5000))] for bits in (64, 64, 32, 32)
    ]
    keys = torch.from_numpy(stream_keys(*columns[:3]))
    positions = torch.tensor(columns[3], dtype=torch.int64)
    expected = device_uniforms(keys, positions).numpy().tobytes()
    for given in (keys, keys.t().contiguous().t()):
        found = device_uniforms(given.cuda(), positions.cuda())
        assert found.cpu().numpy().tobytes() == expected
    nothing = philox_uniforms(keys[:0].cuda(), positions[:0].cuda())
    assert nothing.shape == (0,) and nothing.is_cuda


def test_the_digest_is_that_of_a_cpu():
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(3_000_017, generator=generator)
    named = {
        "a": large[:999_999].view(333, 3003),
        "b": large[:5].bfloat16(),
        "c": large[1000:1400].view(20, 20).t(),
        "d": large[7:2_000_018],
        "e": large[:0],
        "f": large[:3].half()[1:],
        "g": torch.tensor(7, dtype=torch.uint8),
        "h": large.bfloat16()[3:],
    }
    expected = weights_digest(named.items())
    moved = {name: tensor.cuda() for name, tensor in named.items()}
    moved["f"], moved["h"] = large[:3].half().cuda()[1:], large.bfloat16().cuda()[3:]
    assert weights_digest(moved.items()) == expected
    halves = itertools.chain(list(named.items())[:4], list(moved.items())[4:])
    assert weights_digest(halves) == expected
    moved["d"].view(torch.int32)[1_234_567] ^= 1
    assert weights_digest(moved.items()) != expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_a_digest_is_found_on_a_device_that_is_not_the_current_one():
    values = torch.randn(5003, generator=torch.Generator().manual_seed(0))
    halves = {"a": values[:2000].to("cuda:0"), "b": values[2000:].to("cuda:1")}
    expected = weights_digest((name, tensor.cpu()) for name, tensor in halves.items())
    assert weights_digest(halves.items()) == expected
    assert torch.cuda.current_device() == 0
