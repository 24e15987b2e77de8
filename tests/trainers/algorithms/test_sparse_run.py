"""GRPO on mixtures of experts: equal logprobs, equal experts, equal gradients."""

import re
from io import StringIO

import pytest
from pydantic import ValidationError
from rich.console import Console

from rl_consistency.cli.train import summary_table
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.hooks import ConsistencyHook
from rl_consistency.trainers.policy import build_model
from rl_consistency.trainers.run_directory.step_files import passed
from rl_consistency.verify.substitution import attribute


def sparse(architecture="qwen3_moe", **changes):
    experts = {"count": 8, "per_token": 2}
    build = {"architecture": architecture, "experts": experts}
    if architecture == "olmoe":
        build |= {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 2}
    return {f"policy.build.{name}": value for name, value in build.items()} | changes


CHECKED = {
    "policy.dtype": "bfloat16",
    "consistency.gradient_check_every": 1,
    "consistency.shadow_every": 1,
    "algorithm.updates_per_rollout": 2,
    "algorithm.kl_coefficient": 0.05,
    "training.micro_batch_size": 3,
    "training.steps": 2,
}


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("olmoe", "mixtral")),
    ],
)
def test_no_token_differs_and_none_meets_other_experts(tiny_run, architecture):
    summary, rows = tiny_run(
        **sparse(architecture), **CHECKED, **{"algorithm.balance_coefficient": 0.01}
    )
    for row in rows:
        assert row["consistency/tokens"] > 0
        assert row["consistency/mismatched_tokens"] == row["consistency/rerouted_tokens"] == 0
        assert row["consistency/gradient_check/passed"]
        assert row["stock/rerouted_tokens"] >= 0
        assert row["policy/balance"] >= 0.5
    assert summary["consistency/rerouted_tokens"] == 0
    assert passed(summary) and not passed(summary | {"consistency/rerouted_tokens": 1})
    out = StringIO()
    Console(file=out, width=120).print(summary_table(summary))
    assert re.search(r"tokens that met other experts\s+\S+\s+0\s+\S+\s+\d+", out.getvalue())


def test_a_loss_over_the_batch_is_refused_with_the_reason(tiny_run):
    with pytest.raises(ValidationError, match="no sum over sequences: every cut changes it"):
        tiny_run.config(**{"algorithm.balance_over": "batch"})


@pytest.mark.parametrize("changes", [{}, sparse()], ids=["dense", "without sparse layers"])
def test_balancing_a_loaded_dense_policy_is_refused_before_anything_is_computed(tiny_run, changes):
    """A model of a sparse family may have no sparse layer."""
    model = build_model(tiny_run.config(**changes).policy.build, byte_tokenizer(), seed=1)
    if changes:
        model.config.mlp_only_layers = list(range(model.config.num_hidden_layers))
        model = type(model)(model.config)
    loaded = tiny_run.save_model()
    model.save_pretrained(loaded["policy.path"])
    with pytest.raises(ValueError, match=r"algorithm.balance_coefficient 0.1: .* no experts to"):
        tiny_run(**loaded, **{"algorithm.balance_coefficient": 0.1})
    assert not (tiny_run.directory / "run").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"policy.build.architecture": "qwen3_moe"}, "architecture qwen3_moe: set experts"),
        (sparse("qwen3"), "architecture qwen3: leave experts out"),
        (sparse() | {"policy.build.experts": {"count": 2, "per_token": 3}}, "more than the 2"),
        (sparse("mixtral") | {"policy.build.architecture": "olmoe", "policy.build.head_dim": 16},
         "leave head_dim out"),
    ],
)  # fmt: skip
def test_experts_belong_to_a_sparse_architecture(tiny_run, changes, message):
    with pytest.raises(ValidationError, match=message):
        tiny_run.config(**changes)


def test_a_token_that_met_other_experts_stops_the_run(tiny_run):
    """Negative control: equal logprobs alone do not pass."""
    run = ConsistencyHook.on_training_logprobs

    def rerouted(self, logprobs, routing):
        first, *others = routing
        return run(self, logprobs, [first + 1, *others])

    with (
        attribute(ConsistencyHook, "on_training_logprobs", rerouted),
        pytest.raises(Exception, match="0 of .* tokens have other logprobs .* met other experts"),
    ):
        tiny_run(**sparse())
