"""The estimate of a recipe's memory: its arithmetic, and the parts of a run it counts."""

import pytest
import torch

from rl_consistency.models.patch import patch
from rl_consistency.trainers import dry_run
from rl_consistency.trainers.algorithms.rollout_engine import cache_bytes_of, engine_of
from rl_consistency.trainers.dry_run import extrapolated, largest_pass, memory_told
from rl_consistency.trainers.policy import load_policy

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "expected"),
    [(40, 500), (10, 200), (2560, 25_700)],  # 100 that do not grow, and 10 for each of the size
)
def test_memory_is_extrapolated_with_what_does_not_grow(size, expected):
    assert extrapolated(size, (10, 200), (20, 300)) == expected


def test_a_measured_memory_that_shrinks_is_taken_as_it_is():
    assert extrapolated(100, (10, 300), (20, 200)) == 200


def test_the_sum_stands_against_what_the_gpu_has():
    parts = {"weights": GIB, "optimizer": 0, "KV cache": 2 * GIB + GIB // 2}
    lines = memory_told(parts, 4 * GIB)
    assert lines[0].endswith("estimated: weights 1.0 GiB, KV cache 2.5 GiB")
    assert lines[1].strip() == "together 3.5 GiB of 4.0 GiB that the GPU has for it"
    assert len(lines) == 2


def test_a_sum_above_it_is_one_warning_with_a_remedy():
    *_, warning = memory_told({"weights": GIB + 1}, GIB)
    assert warning.startswith("WARNING: that does not fit: lower training.micro_batch_size")
    assert not any("WARNING" in line for line in memory_told({"weights": GIB}, GIB))


def test_no_room_for_a_part_of_a_pass_is_an_answer_with_a_remedy(tiny_run, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dry_run, "_peak", full)
    found = "a quarter of a pass over 8 sequences of 15 tokens does not fit.*lower training.micro"
    with pytest.raises(ValueError, match=found):
        dry_run.activations(None, tiny_run.config())


def test_without_a_gpu_the_activations_are_said_to_be_missing():
    assert memory_told({"weights": GIB}, None)[1:] == [
        "          together 1.0 GiB, and activations"
    ]


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 8),
        ({"training.micro_batch_size": 3}, 3),
        ({"algorithm.updates_per_rollout": 2, "training.micro_batch_size": 100}, 4),
        ({"consistency.gradient_leaves": 3, "training.micro_batch_size": 3}, 3),
    ],
)
def test_a_pass_has_no_more_sequences_than_a_leaf(tiny_run, changes, size):
    assert largest_pass(tiny_run.config(**changes)) == (size, 6 + 9)


@pytest.mark.parametrize("blocks", [16, None])
def test_the_cache_is_the_one_that_the_engine_allocates(tiny_run, blocks):
    config = tiny_run.config(**{"rollout.num_kv_blocks": blocks})
    model, tokenizer = load_policy(config.policy, config.tokenizer, seed=1)
    with patch(model):
        cache = engine_of(config, model, tokenizer)._runner._cache
        allocated = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
        assert cache_bytes_of(config, model) == allocated > 0
