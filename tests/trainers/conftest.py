"""A tiny run, and rewards that tell its samples apart: an untrained policy earns no others."""

import copy
import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import ClassVar

import pytest

from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.config.sections import BuildSection
from rl_consistency.trainers.data.examples import examples_of, jsonl_rows
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.policy import build_model
from rl_consistency.trainers.run import train
from rl_consistency.trainers.run_directory.checkpoint import list_checkpoints
from rl_consistency.trainers.run_directory.step_files import read_metrics

TOY_REWARDS = """
def varied(prompts, completions, answers, **extra):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]

def short(prompts, completions, answers, **extra):
    return [1.0 - len(text) / 9 for text in completions]

def demanding(prompts, completions, answers, level):
    return [0.0] * len(completions)

def raising(prompts, completions, answers, **extra):
    raise RuntimeError("no judge at home")

def exiting(prompts, completions, answers, **extra):
    raise SystemExit(0)

def nan_for_the_third(prompts, completions, answers, **extra):
    return [float("nan") if i == 2 else 0.0 for i in range(len(completions))]

def one_too_few(prompts, completions, answers, **extra):
    return [0.0] * (len(completions) - 1)
"""

RECIPE = {
    "run": {"name": "tiny", "num_threads": 1, "seed": 3},
    "policy": {
        "build": {
            "architecture": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
        }
    },
    "tokenizer": {"kind": "byte"},
    "data": {
        "task": {"name": "arithmetic", "num_terms": 3, "train_size": 32, "eval_size": 4},
        "max_prompt_tokens": 6,
    },
    "reward": {"functions": [{"name": "toy_rewards:varied"}]},
    "rollout": {
        "prompts_per_step": 4,
        "sampling": {"n": 2, "max_tokens": 9},
        "num_kv_blocks": 16,  # by default 8: half of the samples would wait for the others
    },
    "optimizer": {"learning_rate": 1e-2},
    "training": {"steps": 3},
    "tracking": {"console": False},
}


def read_jsonl(path, *, limit=None, **fields):
    """The examples of a JSONL file."""
    return examples_of(jsonl_rows(Path(path), limit), **fields)


class TinyRun:
    """Makes configs from `RECIPE` and dotted changes, and runs them."""

    LONG: ClassVar = {
        "training.steps": 6,
        "training.save_every": 2,
        "training.eval_every": 3,
        "warm_start.steps": 2,
        "warm_start.batch_size": 4,
        "algorithm.kl_coefficient": 0.05,
        "algorithm.updates_per_rollout": 2,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 3,
        "consistency.gradient_check_every": 3,
        "consistency.shadow_every": 2,
    }
    """Something of everything that a resumed run has to continue."""

    def __init__(self, directory):
        self.directory = directory

    def files(self):
        """The bytes of every file of the run, by its path in the run directory."""
        root = self.directory / "run"
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def checkpoints(self, name="run"):
        """The names of the complete checkpoints, oldest first."""
        return [path.name for path in list_checkpoints(self.directory / name / "checkpoints")]

    def save_model(self, *, seed=2, tokenizer=None, **sizes):
        """Saves a model with its tokenizer; the changes of the recipe that take it."""
        tokenizer, directory = tokenizer or byte_tokenizer(), self.directory / "model"
        build = BuildSection(**RECIPE["policy"]["build"] | sizes)
        build_model(build, tokenizer, seed=seed).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return {"policy.build": None, "policy.path": str(directory), "tokenizer.kind": "auto"}

    def tree(self, **changes):
        """The recipe with `section.key` values changed; None removes a key."""
        tree = copy.deepcopy(RECIPE)
        changes = {"run.output_dir": str(self.directory / "run")} | changes
        for path, value in changes.items():
            *parents, key = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            if value is None:
                node.pop(key, None)
            else:
                node[key] = value
        return tree

    def config(self, **changes):
        return RunConfig.model_validate(self.tree(**changes))

    def __call__(self, *, resume=False, overwrite=False, announce=lambda line: None, **changes):
        """(summary, rows of metrics) of a run."""
        config = self.config(**changes)
        summary = train(config, resume=resume, overwrite=overwrite, announce=announce)
        return summary, read_metrics(config.run.output_dir / "metrics.jsonl")

    def refused(self, error, match, **given):
        """A run that is refused, and leaves every file of the one that is there as it was."""
        before = self.files()
        with pytest.raises(error, match=match):
            self(**given)
        assert self.files() == before

    def of_its_own(self, name, **changes):
        """The same in a directory of its own."""
        return self(**changes | {"run.output_dir": str(self.directory / name)})

    def example_file(self, count=20, name="train.jsonl"):
        """A JSONL file of sums."""
        lines = [{"question": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(count)]
        file = self.directory / name
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return file


@pytest.fixture
def toy_rewards(tmp_path, monkeypatch):
    """The module `toy_rewards`, importable from its folder."""
    (tmp_path / "toy_rewards.py").write_text(TOY_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    # Bytecode of a file that was edited within the same second would stand for the new one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "toy_rewards", raising=False)
    return tmp_path


@pytest.fixture
def tiny_run(toy_rewards):
    return TinyRun(toy_rewards)


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory):
    """Run directories by what was changed in the recipe; those that nothing made do not exist."""
    return defaultdict(lambda: tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def finished(tiny_run, finished_runs):
    """Puts a finished run into the run directory; what was trained once is copied."""

    def put(**changes):
        run, kept = tiny_run.directory / "run", finished_runs[repr(sorted(changes.items()))]
        if kept.exists():
            shutil.copytree(kept, run)
        else:
            tiny_run(**changes)
            shutil.copytree(run, kept)

    return put


def lasting(rows):
    """Rows of metrics without what a clock decides."""
    return [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"}
        for row in rows
    ]


@pytest.fixture(name="lasting")
def lasting_fixture():
    return lasting


@pytest.fixture
def lasting_summary():
    """Takes a summary without what a clock decides."""
    return lambda summary: {
        k: v for k, v in summary.items() if k != "seconds" and not k.startswith("time/")
    }
