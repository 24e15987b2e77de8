"""`train` on a GPU, end to end: no drift, a trajectory that repeats and resumes, an audit that
stops the run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_consistency.kernels.matmul.audit import AuditReport
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.replay import load_replay_bundle
from rl_consistency.trainers import hooks
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.config.sections import PolicySection, TokenizerSection
from rl_consistency.trainers.policy import load_policy
from rl_consistency.trainers.run import train
from rl_consistency.trainers.run_directory.checkpoint import list_checkpoints
from rl_consistency.trainers.run_directory.step_files import read_metrics

pytestmark = pytest.mark.gpu

RECIPE = {
    "run": {"name": "tiny", "device": "cuda", "seed": 3},
    "policy": {
        "build": {
            "architecture": "qwen3",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 64,
        },
        "dtype": "bfloat16",
    },
    "tokenizer": {"kind": "byte"},
    "data": {
        "task": {"name": "arithmetic", "num_terms": 3, "train_size": 64, "eval_size": 4},
        "max_prompt_tokens": 6,
    },
    "reward": {"functions": [{"name": "arithmetic"}]},
    "rollout": {"prompts_per_step": 8, "sampling": {"n": 4, "max_tokens": 20}},
    # Few rewards differ at the start: the entropy bonus gives every token a gradient.
    "algorithm": {"entropy_coefficient": 0.01, "kl_coefficient": 0.01, "updates_per_rollout": 2},
    "optimizer": {"learning_rate": 1e-3},
    "warm_start": {"steps": 3, "batch_size": 16},
    "training": {"steps": 4, "micro_batch_size": 5, "save_every": 2, "eval_every": 2},
    "consistency": {"gradient_check_every": 2, "shadow_every": 2},
    "tracking": {"console": False},
}

WIDE = RECIPE["policy"]["build"] | {
    "hidden_size": 512,
    "intermediate_size": 12288,
    "num_attention_heads": 8,
}
"""Few rows by a long K: the library splits the sum, by another number for rollout's rows than for
training's. With the small model above it does not, and the stock path then drifts not at all."""

ROOT = Path(__file__).resolve().parents[2]


def config(directory, **changes):
    tree = json.loads(json.dumps(RECIPE))
    for path, value in ({"run.output_dir": str(directory)} | changes).items():
        section, key = path.split(".")
        tree[section][key] = value
    return RunConfig.model_validate(tree)


def run(directory, *, resume=False, **changes):
    """(summary, rows of metrics)."""
    summary = train(config(directory, **changes), resume=resume, announce=lambda line: None)
    return summary, read_metrics(directory / "metrics.jsonl")


def lasting(entries):
    """Metrics without what a clock decides."""
    clocked = ("time/", "tokens_per_second", "seconds")
    return {k: v for k, v in entries.items() if not k.startswith(clocked)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_has_no_drift_and_says_how_fast_both_paths_are(tmp_path, dtype):
    changes = {"policy.dtype": dtype, "policy.build": WIDE, "training.save_every": 4}
    summary, rows = run(tmp_path / "run", **changes)
    assert summary["consistency/tokens"] > 0
    assert summary["consistency/mismatched_tokens"] == 0
    assert summary["consistency/importance_ratio/min"] == 1.0
    assert summary["consistency/importance_ratio/max"] == 1.0
    assert summary["consistency/gradient_check/passed"] == 2
    assert summary["stock/mismatched_tokens"] > 0
    assert all(row["consistency/schedule_audit"] == 0 for row in rows if row["step"])
    assert all(row["gradient_norm"] > 0 for row in rows if row["step"])
    for path in ("rollout", "training", "stock_rollout", "stock_training"):
        assert summary[f"time/{path}_tokens_per_second"] > 0
    assert torch.cuda.get_device_name() in summary["fingerprint"]["device"]


def test_a_dry_run_estimates_the_memory_with_its_activations(tmp_path):
    told = []
    train(config(tmp_path / "run"), dry_run=True, announce=told.append)
    estimate = " ".join(told)
    assert "activations of 130 tokens" in estimate  # 5 sequences of 6 and 20 tokens
    assert "that the GPU has for it" in estimate and "WARNING" not in estimate


def test_a_run_repeats_itself(tmp_path):
    first, rows = run(tmp_path / "first")
    again, rows_again = run(tmp_path / "again")
    assert lasting(first) == lasting(again)
    assert [lasting(row) for row in rows] == [lasting(row) for row in rows_again]


def test_the_trajectory_depends_on_the_seed(tmp_path):
    """Negative control of the comparison above."""
    first, _ = run(tmp_path / "first")
    other, _ = run(tmp_path / "other", **{"run.seed": 4})
    assert first["parameter_digest"] != other["parameter_digest"]


@pytest.mark.parametrize(
    "changes",
    [
        {"training.micro_batch_size": 1},
        {"training.layout": "padded"},
        {"policy.gradient_checkpointing": True},
        {"rollout.max_num_seqs": 3},
        {"rollout.num_kv_blocks": 30, "rollout.kv_block_size": 8},
    ],
    ids=str,
)
def test_what_only_moves_memory_moves_no_weight(tmp_path, changes):
    expected, _ = run(tmp_path / "expected")
    other, _ = run(tmp_path / "other", **changes)
    assert other["parameter_digest"] == expected["parameter_digest"]


def test_a_run_resumed_takes_the_same_trajectory(tmp_path, monkeypatch):
    expected, rows = run(tmp_path / "whole")

    real, ended = hooks.ConsistencyHook.on_step_end, []

    def killed(self):
        ended.append(real(self))
        if len(ended) == 3:
            raise KeyboardInterrupt
        return ended[-1]

    monkeypatch.setattr(hooks.ConsistencyHook, "on_step_end", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    monkeypatch.undo()
    resumed, resumed_rows = run(tmp_path / "cut", resume=True)
    assert resumed["parameter_digest"] == expected["parameter_digest"]
    assert [lasting(row) for row in resumed_rows] == [lasting(row) for row in rows]


def test_a_checkpoint_is_a_model_directory_with_the_weights_of_the_gpu(tmp_path):
    summary, _ = run(tmp_path / "run")
    last = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    policy = PolicySection(path=last, dtype="bfloat16")
    model, _ = load_policy(policy, TokenizerSection(kind="auto"), seed=0, device="cuda")
    assert next(model.parameters()).is_cuda
    assert parameter_digest(model) == summary["parameter_digest"]


def test_a_checkpoint_of_a_gpu_is_not_continued_on_a_cpu(tmp_path):
    """In a process of its own, since Accelerate keeps one device for a process."""
    run(tmp_path / "run", **{"training.steps": 2})
    file, written = tmp_path / "cpu.yaml", tmp_path / "run" / "config.yaml"
    file.write_text(written.read_text().replace("device: cuda", "device: cpu"))
    ended = subprocess.run(
        [sys.executable, "-m", "rl_consistency", "train", str(file), "--resume"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode != 0
    assert "another fingerprint" in said and "device" in said, said


def test_a_logprob_that_differs_stops_the_run_and_is_saved(tmp_path, monkeypatch):
    """Negative control: one bit of one token, changed on the GPU."""
    real = hooks.ConsistencyHook.on_training_logprobs

    def changed(self, logprobs):
        logprobs = [part.clone() for part in logprobs]
        assert logprobs[5].is_cuda
        logprobs[5].view(torch.int32)[0] += 1
        return real(self, logprobs)

    monkeypatch.setattr(hooks.ConsistencyHook, "on_training_logprobs", changed)
    with pytest.raises(ConsistencyError, match="1 of .* tokens have other logprobs"):
        run(tmp_path / "run")
    (bundle,) = (tmp_path / "run" / "replay").iterdir()
    assert load_replay_bundle(bundle).sequence_indices == [5]


def test_a_library_product_that_differs_stops_the_run(tmp_path, monkeypatch):
    names = ["nt/bf16/plain/n64/k64/m64"]
    report = AuditReport(calls=514, audited=2, differing=3, found=3, withdrawn=names)
    monkeypatch.setattr(hooks, "schedule_audit", lambda: report)
    with pytest.raises(ConsistencyError, match=r"step 1: library .* 3 sampled .*nt/bf16/plain"):
        run(tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["consistency/schedule_audit"] == 3


def test_ppo_keeps_its_values_and_its_critic_under_another_micro_batch(tmp_path):
    ppo = {"algorithm.name": "ppo", "consistency.value_check_every": 1}
    summary, _ = run(tmp_path / "a", **ppo)
    assert summary["consistency/mismatched_tokens"] == 0
    assert summary["consistency/value_check/mismatched_values"] == 0
    assert summary["consistency/value_check/values"] == summary["consistency/tokens"] > 0
    other, _ = run(tmp_path / "b", **ppo | {"training.micro_batch_size": 3})
    for name in ("parameter_digest", "critic_digest"):
        assert other[name] == summary[name]
