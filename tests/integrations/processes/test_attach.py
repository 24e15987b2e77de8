"""`attach` in two processes under DistributedDataParallel, as torchrun starts them."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
import torch.distributed as dist
from transformers import TrainerCallback

import rl_consistency
from rl_consistency.models import modules
from rl_consistency.parity.replay import load_replay_bundle
from rl_consistency.verify.substitution import attribute
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
        sampled = trainer.vllm_generation.drift._samples
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


def worse_decode(q, layout, index, *, run=modules.attention_paged, **named):
    out, lse = run(q, layout, index, **named)
    return (out * (1 + 2**-5) if index == 1 else out), lse


def drifting(world, directory, folder):
    with attribute(modules, "attention_paged", worse_decode), pytest.warns() as caught:
        found = trained(world, directory, folder, 4)
    return found | {"told": [str(w.message) for w in caught if "process" in str(w.message)]}


@pytest.mark.thorough
def test_each_process_localizes_its_own_first_mismatch(run_ranks, directory, tmp_path):
    ranks = run_ranks(2, drifting, directory, tmp_path)
    for rank, found in enumerate(ranks):
        (line,) = (line for line in found["told"] if line.startswith("step 1, process"))
        assert line.startswith(f"step 1, process {rank}: ")
        assert "differs first in: attention of layer 1" in line
    processes = [load_replay_bundle(p).config["process"] for p in (tmp_path / "replay").iterdir()]
    assert sorted(processes) == [0, 1]
    assert all(map(torch.equal, *(found["weights"] for found in ranks)))
