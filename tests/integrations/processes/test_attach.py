"""`attach` in two processes under DistributedDataParallel, as torchrun starts them."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
import torch.distributed as dist
from transformers import TrainerCallback

import rl_consistency
from tests.integrations.trainers import grpo, loaded, logged


class KeepsItsGradients(TrainerCallback):
    """Rank 1 takes part in every sum, and steps by gradients of its own."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        def own(_, bucket):
            mine = bucket.buffer().clone()
            mean = dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
            return mean.then(lambda found: mine if dist.get_rank() == 1 else found.value()[0])

        self.trainer.model_wrapped.register_comm_hook(None, own)


def trained(world, directory, folder, batch, *callbacks):
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
    for callback in callbacks:
        trainer.add_callback(callback(trainer))
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


def with_a_mutant(world, directory, folder):
    apart = trained(world, directory, folder, 4, KeepsItsGradients)
    return trained(world, directory, folder, 4), apart["weights"]


def test_two_processes_agree_and_complete_as_one_does(run_ranks, directory, tmp_path):
    """Mutant: one rank that is not synchronised ends with other weights."""
    ranks, apart = zip(*run_ranks(2, with_a_mutant, directory, tmp_path), strict=True)
    assert [rank["wrapper"] for rank in ranks] == ["DistributedDataParallel"] * 2
    assert [rank["mismatched"] for rank in ranks] == [[0]] * 2
    assert [rank["uncompared"] for rank in ranks] == [[], []]
    assert [rank["tokens"] for rank in ranks] == [[sum(rank["own"] for rank in ranks)]] * 2
    assert all(map(torch.equal, *(rank["weights"] for rank in ranks)))
    assert not all(map(torch.equal, *apart))
    alone = trained(None, directory, tmp_path, 8)
    assert ranks[0]["sampled"].keys() | ranks[1]["sampled"].keys() == alone["sampled"].keys()
    assert not ranks[0]["sampled"].keys() & ranks[1]["sampled"].keys()
