"""Every mistake of a recipe in one error: what is wrong is left out, and the rest checked again."""

from __future__ import annotations

import copy
import re
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

_THEIRS = """
policy.path: model_name_or_path model_path
data.path: train_files dataset_name
data.eval_path: val_files
data.max_prompt_tokens: max_prompt_length
reward.functions: reward_funcs custom_reward_function
rollout.prompts_per_step: train_batch_size
rollout.sampling.n: num_generations samples_per_prompt
rollout.sampling.max_tokens: max_completion_length max_response_length max_new_tokens
rollout.num_kv_blocks: gpu_memory_utilization
algorithm.advantage: adv_estimator scale_rewards
algorithm.loss: loss_type loss_agg_mode loss_mode importance_sampling_level
algorithm.dynamic_sampling: filter_groups
algorithm.clip_low: epsilon clip_ratio clip_ratio_low
algorithm.clip_high: epsilon_high clip_ratio_high
algorithm.kl_coefficient: beta kl_coef kl_loss_coef
algorithm.entropy_coefficient: entropy_coeff
algorithm.epochs_per_rollout: num_iterations ppo_epochs
algorithm.updates_per_rollout: ppo_mini_batch_size
optimizer.learning_rate: lr
optimizer.max_grad_norm: grad_clip
optimizer.name: optim
optimizer.schedule: lr_scheduler_type
optimizer.min_lr: lr_scheduler_kwargs
training.steps: max_steps total_training_steps
training.micro_batch_size: per_device_train_batch_size ppo_micro_batch_size_per_gpu
training.eval_every: eval_steps test_freq
training.save_every: save_steps save_freq
training.keep_checkpoints: save_total_limit
tracking.wandb.project: project_name
"""
OTHER_NAMES = {
    name: key
    for key, names in (row.split(": ") for row in _THEIRS.strip().splitlines())
    for name in names.split()
}
"""Keys of TRL and verl -> ours, for the error message and the pages about them."""
Location = tuple[int | str, ...]

PASSES = 8
"""Validations of a recipe at most; each but the first is without what the ones before refused."""
STANDS_IN: dict[str, Any] = {
    "run": {"name": "run"},
    "policy": {"path": "."},
    "tokenizer": {"kind": "byte"},
    "data": {"path": "."},
    "reward": {"functions": [{"name": "exact_match"}]},
    "rollout": {"prompts_per_step": 1, "sampling": {"n": 2, "max_tokens": 1}},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 1},
}
"""What has to be given, for a recipe from which it is missing."""


def every_error(
    model: type[BaseModel], tree: dict[str, Any], error: ValidationError
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """pydantic's items of the `error` of a tree, and those of the tree without what they name; with
    what is left of it.

    A rule that names a key which was left out may only fail for that: it waits for the next try.
    """
    tree, found, seen = copy.deepcopy(tree), [], set[Location]()
    left_out: set[str] = set()
    for _ in range(PASSES):
        items = [dict(item) for item in error.errors(include_url=False)]
        found += [item for item in items if _is_news(item, seen, left_out)]
        for item in items:
            left_out |= _leave_out(tree, item, seen)
        try:
            model.model_validate(tree)
            break
        except ValidationError as next_error:
            if any(not item["loc"] for item in items):
                break  # rules between sections come last
            error = next_error
    return found, tree


def _is_news(item: dict[str, Any], seen: set[Location], left_out: set[str]) -> bool:
    """Whether an item says something that is not due to what was left out; its text keeps that."""
    location = item["loc"]
    if location and any(location[: len(one)] == one[: len(location)] for one in seen):
        return False
    if item["type"] != "value_error" or not left_out:
        return True
    lines = str(item["ctx"]["error"]).splitlines()
    kept = [line for line in lines if not _names_any(line, left_out)]
    item["ctx"] = {"error": ValueError("\n".join(kept))}
    return bool(kept)


def _names_any(text: str, names: set[str]) -> bool:
    words = re.findall(r"\w+", text)
    return any(get_close_matches(name, words, n=1, cutoff=0.85) for name in names)


def _leave_out(tree: dict[str, Any], item: dict[str, Any], seen: set[Location]) -> set[str]:
    """Take what an item names out of the tree, or give what is missing; the names of its keys."""
    location: Location = item["loc"]
    if not location:
        return set()
    if item["type"] == "missing":
        given: Any = STANDS_IN
        for key in location:
            given = given.get(key) if isinstance(given, dict) else None
        if given is not None:
            seen.add(location)
            node: Any = tree
            for key in location[:-1]:
                node = node[key]
            node[location[-1]] = copy.deepcopy(given)
            return {str(location[-1])}
        location = location[:-1]  # nothing stands in for it: the section goes
    # As far as the tree goes: pydantic names members of unions too. A list is taken out whole.
    node, path = tree, list[Any]()
    for key in location:
        if not (isinstance(node, dict) and key in node):
            break
        path.append((node, key))
        node = node[key]
    if not path:
        return set()
    parent, key = path[-1]
    del parent[key]
    seen.add(tuple(key for _, key in path))
    return {str(key)} | _keys(node)


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()
