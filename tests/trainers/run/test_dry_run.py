"""A dry run finds what a run would stumble over, estimates its memory, and leaves nothing."""

import tempfile

import pytest
import torch
import yaml

from rl_consistency.cli.main import main
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.trainers import dry_run as dry_run_module
from rl_consistency.trainers import services
from rl_consistency.trainers.algorithms.rollout_engine import cache_bytes_of, engine_of
from rl_consistency.trainers.dry_run import largest_pass, memory_told, reduced
from rl_consistency.trainers.policy import load_policy
from rl_consistency.trainers.run import train
from rl_consistency.trainers.run_directory import directory
from rl_consistency.trainers.run_directory.directory import RunDirectoryError

SHARED = {
    "algorithm.updates_per_rollout": 2,
    "consistency.gradient_leaves": 2,
    "training.micro_batch_size": 1,
}


@pytest.fixture
def dry_run(tiny_run, tmp_path, monkeypatch):
    """Takes changes of the tiny recipe; the status, and the files under all folders then."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(**changes):
        recipe = tiny_run.directory / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tiny_run.tree(**changes)))
        before = sorted(tiny_run.directory.rglob("*"))
        status = main(["train", str(recipe), "--dry-run"])
        after = sorted(f for f in tiny_run.directory.rglob("*") if "__pycache__" not in f.parts)
        assert after == before
        return status

    return run


def test_a_dry_run_tells_what_it_saw_and_leaves_nothing(dry_run, tiny_run, capsys):
    assert dry_run(**tiny_run.LONG) == 0
    told = capsys.readouterr().out
    assert "data      32 prompts, the longest 6 tokens; 4 for evaluation" in told
    assert "completions of at most 9 tokens" in told
    assert "tokens    0 of " in told and "toy_rewards:varied 0." in told
    assert "weights 0.1 MiB" in told and "and activations" in told
    assert told.endswith("A dry run writes no run directory and saves no weights.\n")


def test_a_tracker_that_is_not_installed_is_named(dry_run, capsys, monkeypatch):
    monkeypatch.setattr(services, "find_spec", lambda name: None)
    assert dry_run(**{"tracking.tensorboard": True}) == 0
    assert "tensorboard logs nothing from here on" in capsys.readouterr().out


def test_the_memory_is_that_of_the_whole_recipe(tiny_run, monkeypatch):
    parts = {}
    monkeypatch.setattr(dry_run_module, "memory_told", lambda given, _: parts.update(given) or [])
    changes = {"policy.dtype": "bfloat16", "algorithm.name": "ppo", "algorithm.kl_coefficient": 0.1}
    config = tiny_run.config(**changes, **{"rollout.num_kv_blocks": None})
    train(config, dry_run=True)
    weights = parts["weights"]
    assert parts["reference"] == weights and parts["fp32 gradients"] == 2 * weights
    assert 0 < parts["optimizer"] - 6 * weights < 1000  # masters, two moments, step numbers
    assert 0 < parts["critic and its optimizer"] < 8 * weights
    # 8 sequences of 15 tokens, and a block of padding; keys and values of 2 heads of 16.
    assert parts["KV cache"] == (8 + 1) * 16 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("changes", [{}, SHARED])
def test_on_a_gpu_short_passes_tell_what_the_longest_need(tiny_run, monkeypatch, changes):
    """A GPU on which a parameter's gradient takes its bytes, and a token ten."""
    told, passes = [], []
    built = tiny_run.config()
    policy, _ = load_policy(built.policy, built.tokenizer, seed=1)
    sizes = sum(p.numel() for p in policy.parameters())

    def scored(model, sequences, **given):
        passes.append(sum(map(len, sequences)))
        return token_logprobs(model, sequences, **given)

    monkeypatch.setattr(dry_run_module, "token_logprobs", scored)
    monkeypatch.setattr(dry_run_module, "available_bytes", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    peak = lambda device: 7 + 4 * sizes + 2**20 + 2**17 * passes[-1]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    config = tiny_run.config(**{"training.micro_batch_size": 4} | changes)
    train(config, dry_run=True, announce=told.append)
    size, length = dry_run_module.largest_pass(config)
    leaves = config.consistency.gradient_leaves.count
    assert passes == [size * 2] * 2 * leaves + [size * 3] * 2 * leaves
    tokens = size * length
    assert f"activations of {tokens} tokens {1 + tokens / 8:.1f} MiB" in "".join(told)
    assert any(line.startswith("WARNING: that does not fit") for line in told)


def test_a_dry_run_leaves_a_run_that_is_there_alone(dry_run, tiny_run):
    tiny_run(**{"training.steps": 1})
    (tiny_run.directory / "run" / "notes.txt").write_text("mine")
    before, told = tiny_run.files(), []
    assert dry_run() == 0
    train(tiny_run.config(), dry_run=True, announce=told.append)
    assert tiny_run.files() == before
    assert "which a dry run leaves alone. To run: continue it (resume)" in told[0]
    train(tiny_run.config(), dry_run=True, overwrite=True, announce=told.append)
    assert tiny_run.files() == before
    (tiny_run.directory / "run" / "summary.json").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"summary\.json .* overwrite removes nothing else"):
        train(tiny_run.config(), dry_run=True, overwrite=True)


def test_a_directory_that_takes_no_file_is_named_before_the_model_is_loaded(tiny_run, monkeypatch):
    monkeypatch.setattr(directory.os, "access", lambda path, mode: False)
    for dry_run in (True, False):
        with pytest.raises(RunDirectoryError, match="nothing can be written into"):
            train(tiny_run.config(), dry_run=dry_run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward.functions": [{"name": "toy_rewards:raising"}]}, "no judge at home"),
        ({"reward.functions": [{"name": "toy_rewards:one_too_few"}]}, "1 scores for 2 completions"),
        ({"reward.functions": [{"name": "toy_rewards:demanding"}]}, "missing a required argument"),
        # A dry run draws short completions; the context is checked for whole ones.
        (
            {"rollout.sampling": {"n": 2, "max_tokens": 60}},
            "max_position_embeddings: 64 positions are fewer than",
        ),
        ({"data.max_prompt_tokens": 3}, "its prompt has 6 tokens"),
        ({"run.device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_a_dry_run_finds_what_a_run_would_stumble_over(dry_run, capsys, changes, message):
    assert dry_run(**changes) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "prompts", "size"),
    [
        ({}, 1, 8),
        (SHARED, 2, 1),
        ({"training.micro_batch_size": 3}, 1, 3),
        ({"algorithm.updates_per_rollout": 2, "training.micro_batch_size": 100}, 1, 4),
        ({"consistency.gradient_leaves": 3, "training.micro_batch_size": 3}, 4, 3),
    ],
)
def test_as_few_prompts_as_allowed_and_passes_of_a_leaf_at_most(
    tiny_run, tmp_path, changes, prompts, size
):
    config = reduced(tiny_run.config(**changes), tmp_path)
    assert config.rollout.prompts_per_step == prompts
    assert config.training.steps == 1 and config.run.output_dir == tmp_path
    assert largest_pass(tiny_run.config(**changes)) == (size, 6 + 9)


def test_a_dry_run_of_several_processes_is_refused(tiny_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start it without torchrun"):
        train(tiny_run.config(), dry_run=True)


GIB = 2**30


def test_the_sum_stands_against_what_the_gpu_has_and_above_it_is_a_warning_with_a_remedy():
    lines = memory_told({"weights": GIB, "optimizer": 0, "KV cache": 2 * GIB + GIB // 2}, 4 * GIB)
    assert lines[0].endswith("estimated: weights 1.0 GiB, KV cache 2.5 GiB")
    assert lines[1].strip() == "together 3.5 GiB of 4.0 GiB that the GPU has for it"
    assert len(lines) == len(memory_told({"weights": GIB}, GIB)) == 2
    *_, warning = memory_told({"weights": GIB + 1}, GIB)
    assert warning.startswith("WARNING: that does not fit: lower training.micro_batch_size")


def test_no_room_for_a_part_of_a_pass_is_an_answer_with_a_remedy(tiny_run, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dry_run_module, "_peak", full)
    found = "a quarter of a pass over 8 sequences of 15 tokens does not fit.*lower training.micro"
    with pytest.raises(ValueError, match=found):
        dry_run_module.activations(None, tiny_run.config())


@pytest.mark.parametrize("blocks", [16, None])
def test_the_cache_is_the_one_that_the_engine_allocates(tiny_run, blocks):
    config = tiny_run.config(**{"rollout.num_kv_blocks": blocks})
    model, tokenizer = load_policy(config.policy, config.tokenizer, seed=1)
    with patch(model):
        cache = engine_of(config, model, tokenizer)._runner._cache
        allocated = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
        assert cache_bytes_of(config, model) == allocated > 0
