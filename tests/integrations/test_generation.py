from itertools import chain
from types import SimpleNamespace

import pytest

from rl_consistency.integrations.generation import EngineGeneration
from tests.integrations.trainers import quick_at


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


def test_the_cache_has_room_for_the_batch_and_grows(attach, make):
    """An engine with the defaults would take 4 GiB on a CPU for a model that is not as tiny."""
    trainer = make()
    attach(trainer)
    generation = trainer.vllm_generation

    def drawn(prompts):
        generation.on_train_begin()
        return generation.generate(prompts, None, 1)[1], generation._engine

    short, first = drawn([[65] * 9] * 4)
    rooms = [generation._engine._runner.num_blocks]
    assert rooms[0] == 4 * ((16 + 6 + 15) // 16)
    assert drawn([[66] * 5] * 4)[1] is first  # smaller ones need no other
    _, second = drawn([[66] * 40] * 4)
    third = drawn([[66] * 40] * 6)[1]
    rooms += [second._runner.num_blocks, third._runner.num_blocks]
    assert second is not first and rooms[1:] == [16, 24]  # the context of 64, not 70
    assert drawn([[65] * 9] * 4)[0] == short  # whatever the cache

    fixed = make()
    attach(fixed, num_kv_blocks=9, max_num_seqs=2)
    fixed.vllm_generation.generate([[65] * 9] * 4, None, 1)
    only = fixed.vllm_generation._engine
    assert only._runner.num_blocks == 9
    fixed.vllm_generation.generate([[65] * 30] * 6, None, 1)
    assert fixed.vllm_generation._engine is only


STOPS = {
    "transformers": {"stop_strings": "e"},
    "vLLM": {"stop": ["e", "=="]},
    "a token": {"stop_token_ids": [101]},
}


@pytest.mark.parametrize("stops", quick_at("transformers", STOPS))
def test_stop_strings_end_completions_which_rewards_see_with_them(stops, make, attach):
    seen = []

    def ends(completions, completion_ids, **_):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    trainer = make(
        generation_kwargs=stops,
        per_device_train_batch_size=32,
        max_completion_length=40,
        max_steps=1,
    )
    trainer.reward_funcs = [ends]
    attachment = attach(trainer)
    trainer.train()
    assert attachment.drift.mismatched_tokens == 0
    assert any(text.endswith("e") for text, _ in seen)
    assert not any("e" in text[:-1] for text, _ in seen)
    assert attachment.drift.tokens == sum(len(ids) for _, ids in seen)  # the last are learned too


def test_two_names_of_one_stop_are_refused(make, attach):
    trainer = make(generation_kwargs={"stop_strings": "a", "stop": "b"})
    with pytest.raises(ValueError, match="stop_strings and stop; give one"):
        attach(trainer)
    assert not trainer.use_vllm


def test_images_are_refused():
    generation = EngineGeneration(SimpleNamespace(), None, None, None, {})
    with pytest.raises(ValueError, match="images are not covered"):
        generation.generate([[1]], [["an image"]], 1)
