"""`attach` in two processes under DistributedDataParallel, as torchrun starts them."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch

import rl_consistency
from tests.integrations.trainers import grpo, loaded, logged


def trained(world, directory, folder, batch):
    """What a process logged and sampled in one step, its own drift and its final weights."""
    trainer = grpo(
        directory,
        folder,
        model=loaded(directory, dtype=torch.bfloat16),
        beta=0.1,
        ddp_backend="gloo" if world else None,
        per_device_train_batch_size=batch,
        max_steps=1,
    )
    with rl_consistency.attach(trainer) as attachment:
        sampled = trainer.vllm_generation._drift._samples
        trainer.train()
    return {
        "wrapper": type(trainer.model_wrapped).__name__,
        "tokens": logged(trainer, "consistency/tokens"),
        "mismatched": logged(trainer, "consistency/mismatched_tokens"),
        "uncompared": logged(trainer, "consistency/uncompared_tokens"),
        "own": attachment.drift.tokens,
        "weights": [parameter.detach() for parameter in trainer.model.parameters()],
        "sampled": sampled,
    }


def test_two_processes_agree_and_complete_as_one_does(run_ranks, directory, tmp_path):
    ranks = run_ranks(2, trained, directory, tmp_path, 4)
    assert [rank["wrapper"] for rank in ranks] == ["DistributedDataParallel"] * 2
    assert [rank["mismatched"] for rank in ranks] == [[0]] * 2
    assert [rank["uncompared"] for rank in ranks] == [[], []]
    assert [rank["tokens"] for rank in ranks] == [[sum(rank["own"] for rank in ranks)]] * 2
    assert all(map(torch.equal, *(rank["weights"] for rank in ranks)))
    alone = trained(None, directory, tmp_path, 8)
    assert ranks[0]["sampled"].keys() | ranks[1]["sampled"].keys() == alone["sampled"].keys()
    assert not ranks[0]["sampled"].keys() & ranks[1]["sampled"].keys()
