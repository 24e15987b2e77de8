from itertools import chain
from types import SimpleNamespace

import pytest

from rl_consistency.integrations.generation import EngineGeneration


def trainer_of(processes, rank):
    return SimpleNamespace(
        state=SimpleNamespace(global_step=3),
        accelerator=SimpleNamespace(num_processes=processes, process_index=rank),
        args=SimpleNamespace(generation_batch_size=8, per_device_eval_batch_size=8),
    )


def prompt_ids(processes, counts, *, training=True):
    """Ids of some calls in one optimizer step and one in the next, of each process in order."""
    found = []
    for rank in range(processes):
        trainer = trainer_of(processes, rank)
        policy = SimpleNamespace(training=training)
        generation = EngineGeneration(trainer, policy, None, None, {})
        calls = [generation._prompt_ids(count) for count in counts]
        trainer.state.global_step = 4
        found.append([*calls, generation._prompt_ids(counts[0])])
    return [list(chain(*calls)) for calls in zip(*found, strict=True)]


def test_ids_do_not_depend_on_the_number_of_processes():
    alone = prompt_ids(1, [8, 8])
    assert alone == prompt_ids(2, [4, 4]) == prompt_ids(4, [2, 2])


@pytest.mark.parametrize("processes", [1, 2])
def test_no_two_prompts_of_a_run_have_one_id(processes):
    width = 8 // processes
    calls = prompt_ids(processes, [width, width, 1]) + prompt_ids(processes, [8], training=False)
    ids = list(chain(*calls))
    assert len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < 2**64


def test_ids_of_training_depend_on_no_evaluation_and_no_broken_training():
    trainer = trainer_of(1, 0)
    policy = SimpleNamespace(training=True)

    def ids(*modes, of="train"):
        generation = EngineGeneration(trainer, policy, None, None, {})
        found = []
        for mode in modes:
            if mode == "begin":
                generation.on_train_begin()
                continue
            policy.training = mode == "train"
            found.append((mode, generation._prompt_ids(8)))
        return [drawn for mode, drawn in found if mode == of]

    right = ids("train", "train")
    assert right == ids("eval", "eval", "train", "eval", "train")
    assert right == ids("train", "begin", "train", "train")[1:] and right[0] != right[1]
    first, second = ids("train", "eval", "eval", of="eval")
    assert not set(first) & set(second)


def test_images_are_refused():
    generation = EngineGeneration(SimpleNamespace(), None, None, None, {})
    with pytest.raises(ValueError, match="images are not covered"):
        generation.generate([[1]], [["an image"]], 1)
