import pytest

from rl_consistency.models import modules
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.trainers.algorithms import grpo

TWO_LAYERS = {"policy.build.num_hidden_layers": 2, "training.steps": 2}
TWO_CHECKED = {
    "training.steps": 2,
    "training.micro_batch_size": 3,
    "consistency.gradient_check_every": 1,
}
EXACT = ("mismatched_tokens", "nonfinite_tokens", "logprob_abs_diff/max", "ulp/max", "kl/k3")


def require_no_drift(summary, rows):
    """Every sampled token of every step, and the first ratio of every rollout."""
    steps = [row for row in rows if row["step"] > 0]
    assert steps
    for record in (summary, *steps):
        assert record["consistency/tokens"] > 0
        for name in EXACT:
            assert record[f"consistency/{name}"] == 0, name
        for name in ("min", "mean", "max"):
            assert record[f"consistency/importance_ratio/{name}"] == 1.0
    assert summary["consistency/gradient_check/mismatched_elements"] == 0


def digests(rows):
    return [
        (row["consistency/gradient_digest"], row["rollout/weights_digest"], row["loss"])
        for row in rows
        if row["step"] > 0
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Digests of the run that others are compared with, by what they have in common with it."""
    return {}


def same_trajectory(plain, tiny_run, common, **changes):
    """Whether `changes` leave all gradients, weights and losses of a run alone."""
    key = repr(sorted(common.items()))
    if key not in plain:
        plain[key] = digests(tiny_run.of_its_own("plain", **TWO_LAYERS, **common)[1])
    summary, rows = tiny_run(**TWO_LAYERS, **common, **changes)
    require_no_drift(summary, rows)
    assert all(row["gradient_norm"] > 0 for row in rows if row["step"] > 0)
    return digests(rows) == plain[key]


CUTS = [
    {"training.micro_batch_size": 1},
    {"training.micro_batch_size": 64},
    {"rollout.prefill_chunk_size": 3},
    {"rollout.max_num_seqs": 1},
    {"rollout.prefix_sharing": False},
    {"rollout.kv_block_size": 5},
    {"consistency.gradient_check_every": 1, "consistency.shadow_every": 1},
]


@pytest.mark.parametrize(
    "changes",
    [
        {"training.micro_batch_size": 3},
        {"training.layout": "padded", "training.micro_batch_size": 3},
        {"policy.gradient_checkpointing": True},
        {"rollout.max_batch_tokens": 5},
        {"rollout.sampling.speculation": 7},
        *(pytest.param(cut, marks=pytest.mark.thorough) for cut in CUTS),
    ],
    ids=lambda changes: ",".join(f"{k.split('.')[-1]}={v}" for k, v in changes.items()),
)
def test_how_the_work_is_cut_does_not_change_a_bit(plain, tiny_run, changes):
    assert same_trajectory(plain, tiny_run, {}, **changes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {"training.micro_batch_size": 1},
        {"training.micro_batch_size": 3, "training.layout": "padded"},
        {"policy.gradient_checkpointing": True},
    ],
    ids=["micro-batch 1", "padded", "checkpointing"],
)
@pytest.mark.parametrize(
    "common",
    [
        {"policy.dtype": "bfloat16"},
        {
            "algorithm.loss": "dapo",
            "algorithm.updates_per_rollout": 2,
            "algorithm.kl_coefficient": 0.1,
            "algorithm.entropy_coefficient": 0.01,
            "policy.build.tie_word_embeddings": False,
        },
    ],
    ids=["bf16", "everything"],
)
def test_nor_does_it_in_bf16_or_with_every_term_of_the_loss(plain, tiny_run, common, changes):
    assert same_trajectory(plain, tiny_run, common, **changes)


def test_a_training_forward_that_computes_otherwise_is_caught(tiny_run, monkeypatch):
    """The control: one rounding more in training's attention must show as drift."""
    real = modules.attention_varlen

    def otherwise(*args, **given):
        out, lse = real(*args, **given)
        return out * (1 + 2**-22), lse

    monkeypatch.setattr(modules, "attention_varlen", otherwise)
    summary, _ = tiny_run(**{"consistency.on_drift": "record"})
    assert summary["consistency/mismatched_tokens"] > 0


def test_a_loss_that_depends_on_the_micro_batch_is_caught(tiny_run, monkeypatch):
    """The control: weights from the counts at hand must fail the gradient check."""
    real = grpo.token_weights

    def local(lengths, kind, **counts):
        return real(lengths, kind, **{**counts, "total_tokens": sum(lengths)})

    monkeypatch.setattr(grpo, "token_weights", local)
    with pytest.raises(ConsistencyError, match="gradients depend on how the batch was cut"):
        tiny_run(**{"algorithm.loss": "dapo", "consistency.gradient_check_every": 1})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.loss": "grpo", "algorithm.advantage": "grpo"},
        {"algorithm.loss": "dr_grpo", "algorithm.advantage": "dr_grpo"},
        {"algorithm.loss": "dapo", "algorithm.clip_high": 0.28},
        {"algorithm.kl_coefficient": 0.1},
        {"algorithm.entropy_coefficient": 0.01},
        {"algorithm.updates_per_rollout": 2},
        {"algorithm.updates_per_rollout": 4, "algorithm.epochs_per_rollout": 2},
        {"algorithm.epochs_per_rollout": 3},
        {"algorithm.overlong": "penalty", "algorithm.overlong_buffer": 4},
        {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 1},
        {"optimizer.max_grad_norm": None, "optimizer.weight_decay": 0.1},
        {"data.shuffle": False},
    ],
    ids=lambda changes: ",".join(f"{k.split('.')[-1]}={v}" for k, v in changes.items()),
)
def test_every_variant_of_the_algorithm_keeps_its_promise(tiny_run, changes):
    summary, rows = tiny_run(
        **TWO_CHECKED | changes,
    )
    require_no_drift(summary, rows)
    assert summary["consistency/gradient_check/passed"] == 2
    assert len({row["rollout/weights_digest"] for row in rows}) == 2


@pytest.mark.parametrize(
    "changes",
    [
        *(
            pytest.param({f"rollout.sampling.{name}": value}, marks=pytest.mark.thorough)
            for name, value in {"top_k": 5, "top_p": 0.6, "min_p": 0.3, "temperature": 1.7}.items()
        ),
        {
            "rollout.sampling.top_k": 20,
            "rollout.sampling.top_p": 0.9,
            "rollout.sampling.min_p": 0.02,
        },
        {"rollout.sampling.temperature": 0.6, "rollout.sampling.top_k": 8},
    ],
    ids=lambda changes: ",".join(f"{k.split('.')[-1]}={v}" for k, v in changes.items()),
)
def test_truncated_and_tempered_sampling_do_not_drift(tiny_run, changes):
    require_no_drift(*tiny_run(**TWO_CHECKED | {"consistency.gradient_check_every": 2} | changes))


@pytest.mark.parametrize("leaves", [1, 2])
def test_a_check_of_a_gradient_that_is_zero_everywhere_is_not_counted(tiny_run, leaves):
    changes = {"consistency.gradient_leaves": leaves, "training.steps": 1}
    summary, rows = tiny_run(
        **{"reward.functions": [{"name": "exact_match"}], **TWO_CHECKED, **changes}
    )
    assert rows[0]["gradient_norm"] == 0 and "consistency/gradient_check/passed" not in rows[0]
    counts = [summary[f"consistency/gradient_check/{n}"] for n in ("checks", "without_gradient")]
    assert counts == [0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.overlong": "mask", "algorithm.loss": "dapo"},
        {"algorithm.overlong": "mask_counted", "algorithm.kl_coefficient": 0.1},
        {
            "algorithm.overlong": "mask",
            "consistency.gradient_leaves": 2,
            "training.micro_batch_size": 2,
        },
        {"algorithm.overlong": "mask", "algorithm.name": "ppo"},
    ],
    ids=["mask", "counted", "leaves", "ppo"],
)
def test_an_update_in_which_everything_is_masked_is_left_out_and_told(tiny_run, changes):
    """Weight decay alone would move the weights."""
    told, decay = [], {"optimizer.weight_decay": 0.5, "optimizer.decay_norms": True}
    given = changes | decay | {"training.steps": 2, "algorithm.updates_per_rollout": 2}
    _, rows = tiny_run(**given, announce=told.append)
    for row in rows:
        assert row["completion/cut_fraction"] == 1 and row["gradient_norm"] == 0
        assert row["policy/skipped_updates"] == 2
    for name in ("rollout/weights_digest", "consistency/critic_digest"):
        assert len({row.get(name) for row in rows}) == 1
    lines = [line for line in told if "all completions of 2 updates were cut" in line]
    assert len(lines) == 1 and lines[0].startswith("step 1: ")


def test_the_reference_is_the_policy_the_run_began_with(tiny_run):
    _, rows = tiny_run(**{"algorithm.kl_coefficient": 0.1, "training.steps": 2})
    assert rows[0]["policy/kl/k3"] == 0.0
    assert rows[1]["policy/kl/k3"] > 0.0
    _, rows = tiny_run.of_its_own(
        "warm", **{"algorithm.kl_coefficient": 0.1, "warm_start.steps": 2, "training.steps": 1}
    )
    assert rows[1]["policy/kl/k3"] == 0.0


@pytest.mark.thorough
def test_rewards_lead_the_policy(tiny_run):
    summary, _ = tiny_run(
        **{
            "reward.functions": [{"name": "toy_rewards:short"}],
            "rollout.prompts_per_step": 8,
            "rollout.sampling.n": 4,
            "optimizer.learning_rate": 0.05,
            "training.steps": 10,
            "training.micro_batch_size": 32,
        }
    )
    assert summary["reward/last"] > summary["reward/first"] + 0.2
