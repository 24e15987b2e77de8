"""The keys of several processes, and what must fit them."""

import pytest

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.trainers.config.recipe import dump_config, load_config
from tests.trainers.config.test_config import DEMO, refusal


@pytest.mark.parametrize(("text", "order"), [("4", PartOrder(4)), ("[2, 2]", PartOrder(2, 2))])
def test_gradient_leaves_are_a_number_or_two(text, order, tmp_path):
    config = load_config(DEMO, [f"consistency.gradient_leaves={text}"])
    assert config.consistency.gradient_leaves == order
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(resolved) == config


@pytest.mark.parametrize("text", ["0", "true", "4.0", "[]", "[2, 2, 2]", "[2, 0]", "null"])
def test_other_gradient_leaves_are_refused(text):
    text = refusal(f"consistency.gradient_leaves={text}")
    assert "consistency.gradient_leaves: a positive number, or two: [in a group, groups]" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["consistency.gradient_leaves=257"], "256 sequences cannot be cut into 257 leaves"),
        (["consistency.gradient_leaves=[2, 4]"], "64 sequences does not fit into a leaf"),
        (["consistency.gradient_leaves=65", "training.micro_batch_size=1"], "of 64 sequences"),
        (["consistency.gradient_leaves=4", "consistency.strict=false"], "needs canonical ops"),
        (["consistency.gradient_leaves=4", "consistency.strict_except=[glu]"], "canonical ops"),
    ],
)
def test_leaves_that_do_not_fit_the_recipe_are_refused(overrides, message):
    text = refusal(*overrides)
    assert "  consistency.gradient_leaves: " in text and message in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["consistency.gradient_leaves=4"],
            "false gives each process one leaf: leave out gradient",
        ),
        (["consistency.strict=false"], "needs canonical ops"),
        (["consistency.strict_except=[glu]"], "needs canonical ops"),
    ],
)
def test_an_unordered_sum_has_no_leaves_and_canonical_ops(overrides, message):
    text = refusal("consistency.ordered=false", *overrides)
    assert "  consistency.ordered: " in text and message in text


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_the_stock_shadow_is_refused_where_deepspeed_takes_gradients(stage):
    text = refusal(f"training.strategy={stage}")
    assert f"consistency.shadow_every: under {stage} DeepSpeed takes every gradient" in text


def test_zero1_is_refused_for_bfloat16():
    text = refusal("training.strategy=zero1", "policy.dtype=bfloat16")
    assert "training.strategy: zero1 has no fp32 gradients of a bfloat16 policy" in text


def test_an_unknown_strategy_is_refused():
    assert "training.strategy: " in refusal("training.strategy=ddp")


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_gradient_checks_of_deepspeeds_stock_sums_are_refused(stage):
    unordered = [f"training.strategy={stage}", "consistency.ordered=false"]
    text = refusal(*unordered, "consistency.gradient_check_every=1")
    assert f"gradient_check_every: the stock sums of {stage} add each micro-batch" in text
    others = ["consistency.gradient_check_every=0", "consistency.shadow_every=0"]
    assert load_config(DEMO, [*unordered, *others]).consistency.ordered is False
