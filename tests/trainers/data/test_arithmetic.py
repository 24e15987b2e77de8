import re
from pathlib import Path

import pytest

from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.data.examples import problem, problems, split_of
from rl_consistency.trainers.data.prompts import load_prompts
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.reward_functions import arithmetic

SIZES = {"num_terms": 4, "max_value": 9}


def test_a_problem_is_a_function_of_seed_split_and_index():
    assert problem(5, "train", 3, **SIZES) == problems(5, "train", 8, **SIZES)[3]
    assert problem(5, "train", 3, **SIZES) != problem(6, "train", 3, **SIZES)
    assert problem(0, "train", 0, **SIZES).prompt == "2+4+6+5="


@pytest.mark.parametrize(("num_terms", "max_value"), [(2, 8), (4, 9), (6, 99)])
def test_the_target_is_the_running_totals_and_the_answer_the_last(num_terms, max_value):
    for example in problems(1, "train", 50, num_terms=num_terms, max_value=max_value):
        assert re.fullmatch(r"\d+(\+\d+)+=", example.prompt)
        terms = list(map(int, example.prompt[:-1].split("+")))
        assert len(terms) == num_terms and min(terms) >= 1 and max(terms) <= max_value
        totals = [str(sum(terms[:n])) for n in range(2, num_terms + 1)]
        assert example.target == ",".join(totals)
        assert example.answer == totals[-1] == str(sum(terms))


def test_spaces_change_the_text_alone():
    for plain, spaced in zip(
        *(problems(1, "eval", 9, spaces=s, **SIZES) for s in (False, True)), strict=True
    ):
        assert spaced.prompt == plain.prompt.replace("+", " + ").replace("=", " =")
        assert (spaced.target, spaced.answer) == (plain.target, plain.answer)


def test_worked_examples_stand_before_a_generated_sum():
    recipe = Path(__file__).parents[3] / "recipes" / "grpo_sums_smollm2_135m_cpu.yaml"
    config = load_config(recipe, ["data.max_prompt_tokens=64"])
    train, held_out = load_prompts(config, byte_tokenizer(), context_length=128, vocab_size=259)
    for split, found in (("train", train), ("eval", held_out[""])):
        sizes = {"num_terms": 2, "max_value": 30, "spaces": True}
        plain = problems(17, split, len(found.examples), **sizes)
        texts = [f"2 + 5 = 7\n9 + 4 = 13\n{example.prompt}" for example in plain]
        assert [bytes(prompt).decode() for prompt in found.prompts] == texts


def test_training_and_evaluation_share_no_sum():
    train = {example.prompt for seed in (0, 1) for example in problems(seed, "train", 500, **SIZES)}
    held_out = {
        example.prompt for seed in (0, 1) for example in problems(seed, "eval", 100, **SIZES)
    }
    assert not train & held_out
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in held_out} == {"eval"}


def test_the_target_earns_the_reward_and_another_total_does_not():
    example = problem(0, "train", 0, **SIZES)
    completions = [example.target, example.answer, example.target + "0", ""]
    scores = arithmetic([example.prompt] * 4, completions, [example.answer] * 4)
    assert scores == [1.0, 1.0, 0.0, 0.0]
