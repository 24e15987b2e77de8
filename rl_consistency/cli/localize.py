"""`rl-consistency localize`: the first op, layer and token at which two ways to run part."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from rl_consistency.cli.console import compact_table, print_whole
from rl_consistency.cli.outputs import outputs
from rl_consistency.cli.verify import chosen_device
from rl_consistency.models.patch import patch
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.localize import (
    Localization,
    check_bundle,
    check_sides,
    localize,
    localize_bundle,
)
from rl_consistency.parity.replay import FILES, ReplayBundle, load_replay_bundle
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.tokenizer import eos_token_ids
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.tokenizer import load_tokenizer
from rl_consistency.trainers.launch import refuse_many_processes, threads
from rl_consistency.trainers.policy import load_policy, read_config, read_model
from rl_consistency.trainers.run_directory.checkpoint import WEIGHTS, list_checkpoints, load_weights
from rl_consistency.trainers.run_directory.directory import CHECKPOINTS


def run(args: argparse.Namespace) -> int:
    """Localize; 1 where two sides differ that promise equal bytes, else 0."""
    refuse_many_processes()
    if args.between is None:
        args.between = ["rollout" if args.other is None else "training", "training"]
    check_sides(args.between)
    if (args.bundle is None) == (args.prompt is None):
        raise ValueError("give a replay bundle, or --model DIR and --prompt TEXT.")
    if args.prompt is not None and args.model is None:
        raise ValueError("--prompt needs --model DIR.")
    if args.bundle is not None and args.max_tokens is not None:
        raise ValueError("--max-tokens goes with --prompt; a bundle has its own tokens.")
    options = {"between": tuple(args.between), "ablation": args.ablation}
    with outputs(args, "localize", "json", "picture") as written:
        found = _of_bundle(args, options) if args.bundle is not None else _of_prompt(args, options)
        _print(found)
        record = found.as_record()
        if "json" in written:
            written["json"](record)
        if "picture" in written:
            from rl_consistency.cli.plots import growth_figure

            written["picture"](growth_figure(record["ops"]))
    return 0 if found.equal or not found.promised else 1


def _of_bundle(args: argparse.Namespace, options: dict[str, Any]) -> Localization:
    bundle = load_replay_bundle(args.bundle)
    given = bundle.fingerprint.get("num_threads", "")
    with threads(int(given) if given.isdecimal() else None):
        if args.model is not None:
            model = _read(args.model, args)
        else:
            model = _policy(args.bundle, bundle, args.device)
        with patch(model), _other(args) as other:
            found = localize_bundle(model, bundle, other=other, **options)
    recorded = bundle.drift()
    print(
        f"recorded: {recorded.mismatched_tokens} of {recorded.tokens} tokens differed, by "
        f"{recorded.max_abs_diff:g} at most"
    )
    return found


def _policy(path: Path, bundle: ReplayBundle, device: str | None) -> nn.Module:
    """The model of a bundle's run with the bundle's weights: those the recipe makes, or those of a
    checkpoint. ValueError where none has them."""
    config = {key: value for key, value in bundle.config.items() if key != "step"}
    try:
        recipe = RunConfig.model_validate(config)
    except ValidationError as error:
        raise ValueError(f"{path}: its configuration is no recipe. Give --model DIR.") from error
    where = str(chosen_device(device or recipe.run.device))
    model, _ = load_policy(recipe.policy, recipe.tokenizer, seed=recipe.run.seed, device=where)
    if parameter_digest(model) == bundle.parameter_digest:
        return model
    checkpoints = list_checkpoints(path.resolve().parents[1] / CHECKPOINTS)
    for checkpoint in reversed(checkpoints):
        file = checkpoint / WEIGHTS
        try:
            weights = load_file(file)
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{file} is damaged ({error}). Give --model DIR.") from error
        if parameter_digest(weights) == bundle.parameter_digest:
            load_weights(model, weights)
            return model
    raise ValueError(
        f"{path}: neither its recipe's first weights nor one of {len(checkpoints)} checkpoints of "
        f"its run has its weights, {bundle.parameter_digest[:16]} (SHA-256). Give --model DIR."
    )


def _of_prompt(args: argparse.Namespace, options: dict[str, Any]) -> Localization:
    """Of the prompt and what the engine draws after it."""
    model: Any = _read(args.model, args)
    tokenizer: Any = load_tokenizer(args.model)
    if not (prompt := tokenizer.encode(args.prompt)):
        raise ValueError("--prompt has no token.")
    most = 32 if args.max_tokens is None else args.max_tokens
    sampling = SamplingParams(max_tokens=most, seed=0)
    with patch(model), _other(args) as other:
        engine = RolloutEngine(model, eos_token_id=eos_token_ids(model, tokenizer))
        (completion,) = engine.generate([prompt], sampling)
        options = {"prompt_lengths": [len(prompt)], "sampling": sampling, **options}
        return localize(model, [[*prompt, *completion.token_ids]], other=other, **options)


@contextmanager
def _other(args: argparse.Namespace) -> Iterator[nn.Module | None]:
    """The patched model of --other, if it is given."""
    if args.other is None:
        yield None
        return
    bundle = load_replay_bundle(args.other) if (args.other / FILES[0]).exists() else None
    model = _policy(args.other, bundle, args.device) if bundle else _read(args.other, args)
    with patch(model):
        if bundle is not None:
            check_bundle(model, bundle)
        yield model


def _read(directory: Path, args: argparse.Namespace) -> nn.Module:
    """The model of a directory, in the dtype and on the device that are asked for."""
    device = chosen_device(args.device or "cpu")
    own = getattr(read_config(directory), "dtype", None) or torch.float32
    model: Any = read_model(directory, getattr(torch, args.dtype) if args.dtype else own)
    return model.to(device)


def _print(found: Localization) -> None:
    """The verdict, how the difference grows, and the ablation."""
    console, (a, b) = Console(), found.between
    if found.of_two_runs:
        b = f"{b} of the other run"
    drift = found.logprobs
    if found.first is None:
        passes = " and ".join(dict.fromkeys(op.pass_ for op in found.ops))
        size = f"{drift.tokens} tokens, {len(found.ops)} tensors, {passes}"
        print(f"{a} and {b} are equal, byte for byte: {size}")
    else:
        print(f"{a} and {b} differ first in: {found.first}")
        print(
            f"{drift.mismatched_tokens} of {drift.tokens} logprobs differ, by {drift.max_abs:.3g} "
            f"at most; {drift.argmax_flips} most likely tokens are others"
        )
        print_whole(console, _growth_table(found))
    for mode, rows in groupby(found.ablation, key=lambda row: row.mode):
        rest = "canonical" if mode == "stock" else "stock"
        table = compact_table(f"One op {mode}, the rest {rest}: drift of logprobs")
        for name in (f"{mode} op", "tokens that differ", "largest", "RMS", "argmax flips"):
            side = "left" if name.endswith(" op") else "right"
            table.add_column(name, justify=side, no_wrap=True)
        for row in rows:
            tokens = f"{row.mismatched_tokens} of {row.tokens}"
            sizes = (f"{size:.2g}" for size in (row.max_abs, row.rms))
            table.add_row(row.op, tokens, *sizes, str(row.argmax_flips))
        print_whole(console, table)


def _growth_table(found: Localization) -> Table:
    """The first op that differs, and the last one of each layer and pass."""
    table = compact_table("How the difference grows (all ops: --json)")
    names = ("pass", "layer", "op", "tensor", "differing", "largest", "RMS", "relative")
    for name in names:
        side, fixed = "left" if name in names[:4] else "right", name != "tensor"
        table.add_column(name, justify=side, no_wrap=fixed, overflow="fold")
    for op, after in zip(found.ops, [*found.ops[1:], None], strict=True):
        ends = after is None or (op.pass_, op.layer) != (after.pass_, after.layer)
        if op is not found.first and not ends:
            continue
        layer = "" if op.layer is None else str(op.layer)
        share = f"{op.differing / op.elements:.1%}" if op.elements else "-"
        sizes = (f"{size:.2g}" for size in (op.max_abs, op.rms, op.relative_rms))
        style = "red" if op is found.first else None
        table.add_row(op.pass_, layer, op.op, op.what, share, *sizes, style=style)
    return table
