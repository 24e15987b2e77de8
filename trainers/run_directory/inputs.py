"""What a run was given, as text to compare: a checkpoint is continued only under the same.

Each input enters as it was read, not as the file it came from: data and model may move.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_consistency.distributed.gradient_norm import ORDER as GRADIENT_NORM
from rl_consistency.distributed.ordered_sum import ORDER as PART_SUM
from rl_consistency.numerics.files import file_digest
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.numerics.strict import current
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.prompts import PromptSet
from rl_consistency.trainers.reward_files import module_name
from rl_consistency.trainers.rewards import RewardFunction
from rl_consistency.trainers.run_directory.checkpoint import REWARD_FUNCTION, explained

FREE = {
    "run": {"name", "output_dir", "collective_timeout"},
    "policy": {"path"},
    "data": {
        *("path", "name", "split", "revision", "sources"),
        *("eval_path", "eval_split", "eval_sets"),
    },
    "training": {"save_every", "keep_checkpoints", "strategy"},
    "reward": {
        **dict.fromkeys(("timeout", "accept_changed", "folder"), True),
        "functions": {"__all__": {"model"}},
    },
    "tracking": True,
}
"""Keys of a recipe that may be others when it is resumed: what they name is compared by content, or
no bit depends on them."""
CHANGEABLE = (
    *(f"optimizer.{key}" for key in ("learning_rate", "schedule", "warmup_steps")),
    *("optimizer.min_lr", "optimizer.min_lr_ratio", "optimizer.muon.adamw_learning_rate"),
    *("algorithm.ppo.critic_learning_rate", "training.steps"),
)
"""Keys that may be others when a run is resumed, and then are from there on: moments stay, and the
rate is that of the new schedule after as many optimizer steps. The run records it."""
CHECKS = {
    "consistency": {
        *("gradient_check_every", "gradient_check_sequences", "value_check_every"),
        *("shadow_every", "shadow_budget", "on_drift"),
    }
}
"""What looks at a run and moves nothing in it."""
EVALUATION = ("eval_samples", "eval_sampling", "eval_pass_at", "eval_pass_reward")
SCHEDULING = {
    "policy": {"gradient_checkpointing"},
    "rollout": {
        *("kv_block_size", "num_kv_blocks", "max_batch_tokens", "max_num_seqs"),
        *("prefill_chunk_size", "prefix_sharing", "cuda_graphs"),
    },
    "training": {"micro_batch_size", "layout", "cuda_graphs", "eval_every", *EVALUATION},
}
"""What no bit depends on while all ops are canonical."""


def settings(config: RunConfig) -> dict[str, str]:
    """The recipe's values that decide on the trajectory, by dotted key.

    Without a schedule that ends, nothing before a step depends on how many steps follow.
    """
    tree = config.model_dump(mode="json", exclude=FREE)
    for part, key, meant in (
        ("algorithm", "ppo", config.algorithm.of_ppo),
        ("optimizer", "muon", config.optimizer.of_muon),
    ):
        tree[part][key] = meant and meant.model_dump(mode="json")
    canonical = not current().stock and config.consistency.ordered
    for section, keys in (CHECKS | (SCHEDULING if canonical else {})).items():
        for key in keys:
            tree[section].pop(key, None)
    if config.optimizer.schedule.startswith("constant"):
        del tree["training"]["steps"]
    tree = {name: section for name, section in tree.items() if section}
    eight_bit = config.optimizer.name == "adamw_8bit"
    return dict(flat(tree)) | ({"bitsandbytes": version("bitsandbytes")} if eight_bit else {})


def common_settings(config: RunConfig) -> dict[str, str]:
    """The recipe's values that must be equal on all ranks of a run, by dotted key.

    A path may be another on another machine: what it names is compared by content. Only rank 0
    tracks.
    """
    free = {section: keys for section, keys in FREE.items() if section != "training"}
    exclude: dict[str, Any] = {**free, "run": {"output_dir"}}
    return dict(flat(config.model_dump(mode="json", exclude=exclude)))


def fingerprint_of(config: RunConfig) -> Fingerprint:
    """Fingerprint of the machine, with the orders that only a gradient of several leaves has."""
    orders = (PART_SUM, GRADIENT_NORM) if config.consistency.gradient_leaves.count > 1 else ()
    return fingerprint(config.run.device, orders=orders)


def policy_digests(model: Any, tokenizer: Any) -> dict[str, str]:
    """Digests of the policy as it was loaded or built, and of its tokenizer's files."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    generation = model.generation_config and model.generation_config.to_json_string()
    remedy = "Free some space in the folder of temporary files, or set TMPDIR to another."
    with explained("the tokenizer's files", lambda: remedy), TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = sorted(file for file in Path(directory).rglob("*") if file.is_file())
        contents = [[str(f.relative_to(directory)), file_digest(f)] for f in files]
    return {
        "policy's weights": parameter_digest(model),
        "policy's config": _digest([config, generation]),
        "tokenizer": _digest(contents),
    }


def data_digests(train: PromptSet, evaluations: Mapping[str, PromptSet]) -> dict[str, str]:
    """Digests of the examples and the tokens of their prompts."""
    sets = {f"evaluation data {name}".rstrip(): one for name, one in evaluations.items()}
    found = {}
    for name, prompts in {"training data": train, **sets}.items():
        rows: list[Any] = [
            [e.id, e.prompt, e.answer, e.target, dict(e.extra), tokens]
            for e, tokens in zip(prompts.examples, prompts.prompts, strict=True)
        ]
        rows += [e.messages for e in prompts.examples if e.messages is not None]
        rows += [["number", e.id, e.number] for e in prompts.examples if e.number is not None]
        found[name] = _digest([*rows, *prompts.parts])
    return found


def reward_digests(rewards: Sequence[RewardFunction]) -> dict[str, str]:
    """Digests of the files of reward functions' modules, of the source of functions that have none,
    and of reward models; what a module imports does not enter."""
    found = {}
    for term in rewards:
        if term.digest is not None:
            found[f"{REWARD_FUNCTION} {term.name}"] = term.digest
            continue
        named = module_name(term.name)
        given = {named, getattr(term.function, "__module__", named)} - {""}
        names = sorted(name for name in given if isinstance(name, str))
        files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
        digests = [file_digest(Path(file)) for file in files if file]
        found[f"{REWARD_FUNCTION} {term.name}"] = _digest(digests)
    return found


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a recipe, and their values as JSON."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value)


def _digest(content: Any) -> str:
    text = json.dumps(content, default=str)  # of Parquet a value may be a date, say
    return hashlib.sha256(text.encode()).hexdigest()
