"""`python -m benchmarks`: measures this clone.

Prints a line a row and, last, JSON: the cases that failed, and of each suite the mean and the
lowest of stock time / our time. `--json FILE` also gets the rows. With `--device cpu` all shapes
are tiny: that tries a suite, and its times say nothing. Exit status: 0; 1 where a case raised, or
where an error is above its limit; 2 on bad input.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.distributed import distributed_suites
from benchmarks.ops.suites import op_suites
from benchmarks.rollout.engines import MODES
from benchmarks.rollout.plugin import plugin_suites
from benchmarks.rollout.suites import rollout_suites
from benchmarks.suite import Choice, Suites, code_meta, measure, run_meta, shipped_findings, summary
from benchmarks.timing import Machine
from benchmarks.train import training_suites
from benchmarks.trl import trl_suites
from rl_consistency.cli.arguments import add_outputs
from rl_consistency.cli.outputs import Outputs, outputs
from rl_consistency.cli.verify import chosen_device
from rl_consistency.verify.checks.accuracy import ERROR_GROWTH_LIMIT, accuracy_rows, long_fold_rows

SUITES = {
    "ops": (op_suites, "every op against its stock counterpart"),
    "rollout": (rollout_suites, "generation: against stock ops, Hugging Face, the roofline, vLLM"),
    "train": (training_suites, "training steps of whole models"),
    "distributed": (distributed_suites, "sums, optimizer steps and GRPO steps on all GPUs here"),
    "trl": (trl_suites, "TRL's GRPO step as it comes, attached, and our own recipe's"),
    "vllm": (plugin_suites, "vLLM with the plug-in, as it comes, and our own engine"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(arguments)
    args.command_line = f"python -m benchmarks {shlex.join(arguments)}"
    try:
        with outputs(args, f"benchmarks {args.what}", "json") as written:
            return (_accuracy if args.what == "accuracy" else _measure)(args, written)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="what")
    texts = {name: text for name, (_, text) in SUITES.items()} | {"accuracy": "errors against fp64"}
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("--device", default="cpu" if name == "accuracy" else "cuda")
        add_outputs(command, json="the results file")
        command.add_argument("--commit", help="the commit measured, where there is no git")
        command.set_defaults(random_shapes=None, model=[], vllm=None, against=[], quick=False)
        if name != "accuracy":
            text = "only these suites"
            command.add_argument("--only", type=_names, metavar="SUITE,...", help=text)
        if name in ("ops", "rollout", "train"):
            text = "instead, shapes that no table has seen, drawn by this seed"
            command.add_argument("--random-shapes", type=int, metavar="SEED", help=text)
        if name in ("rollout", "train"):
            text = "instead, of these models: presets, or sizes as benchmarks/models.py names them"
            command.add_argument("--model", type=_names, metavar="NAME,...", help=text)
    plugin = commands.choices["vllm"]
    text = "of these models: directories, or names as benchmarks/models.py has them"
    plugin.add_argument("--model", type=_names, metavar="DIR,...", help=text)
    plugin.add_argument(
        "--quick", action="store_true", help="two runs, and groups of 512 new tokens"
    )
    rollout = commands.choices["rollout"]
    text = "instead, beside vLLM, which lies in this site-packages folder; with --model of these"
    rollout.add_argument("--vllm", type=Path, metavar="FOLDER", help=text)
    text = f"of vLLM: {', '.join(MODES)}"
    rollout.add_argument("--against", type=_names, metavar="MODE,...", help=text)
    return parser


def _measure(args: argparse.Namespace, written: Outputs) -> int:
    device = chosen_device(args.device)
    suites = chosen_suites(args, tiny=device.type == "cpu")
    machine = Machine(device)
    meta = run_meta(machine, args.command_line, args.commit)
    with shipped_findings(machine.device):
        rows = measure(suites, machine, meta, written.get("json"))
    failed = [f"{row['suite']} {row['shape']}" for row in rows if "error" in row]
    figures = {name: summary([row for row in rows if row["suite"] == name]) for name in suites}
    figures = {name: figure for name, figure in figures.items() if figure}
    print(json.dumps({"failed": failed, "figures": figures}))
    return 1 if failed else 0


def chosen_suites(args: argparse.Namespace, *, tiny: bool) -> Suites:
    """The suites to measure; ValueError where an option names an unknown one."""
    seed = args.random_shapes
    if seed is not None and (args.model or args.vllm):
        raise ValueError("--random-shapes draws its models; give it or --model and --vllm.")
    if seed is not None and tiny:
        raise ValueError("--random-shapes draws shapes of a GPU's size; leave --device cpu out.")
    if args.against and args.vllm is None:
        raise ValueError("--against goes with --vllm FOLDER.")
    if args.what == "vllm" and find_spec("vllm") is None:
        raise ValueError("vLLM is not installed: pip install 'rl-consistency[vllm]'.")
    asked = {"models": args.model, "vllm": args.vllm, "against": args.against}
    suites = SUITES[args.what][0](Choice(tiny=tiny, seed=seed, quick=args.quick, **asked))
    if seed is not None:
        suites = {
            f"{name}_random": [replace(case, shape={"seed": seed, **case.shape}) for case in found]
            for name, found in suites.items()
        }
    names = args.only or list(suites)
    if unknown := [name for name in names if name not in suites]:
        raise ValueError(f"--only {','.join(unknown)}: `{args.what}` has {', '.join(suites)}.")
    return {name: suites[name] for name in names}


def _names(text: str) -> list[str]:
    """Names between commas, each once."""
    return list(dict.fromkeys(text.split(",")))


def _accuracy(args: argparse.Namespace, written: Outputs) -> int:
    """Errors of all ops against fp64, beside those of stock ops; and of long folds, which have no
    limit."""
    device = chosen_device(args.device)
    rows, long = accuracy_rows(device, (torch.float32, torch.bfloat16)), long_fold_rows(device)
    content = {
        name: [{**vars(row), "ratio": row.ratio} for row in found]
        for name, found in (("rows", rows), ("long", long))
    }
    for row in content["rows"] + content["long"]:
        sizes = f"{row['op']} {row['dtype']} {row['size']} {row['quantity']}"
        print(f"{sizes}: {row['ours']:.3e} and {row['stock']:.3e}, ratio {row['ratio']:.3f}")
    if "json" in written:
        meta = code_meta(args.command_line, args.commit)
        meta |= {"device": str(device), "threads": torch.get_num_threads()}
        written["json"]({"meta": meta, **content})
    over = [row for row in rows if not row.ratio <= ERROR_GROWTH_LIMIT]  # NaN too
    for row in over:
        print(f"above {ERROR_GROWTH_LIMIT}: {row}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
