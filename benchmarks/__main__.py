"""`python -m benchmarks`: measures this clone and writes what the docs say about it.

The last line of ops, rollout, train, distributed and trl is JSON. Exit status: 0; 1 where a case
raised or a schedule gave other bytes; 2 on bad input, and where there is no GPU to measure.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import accuracy_doc
from benchmarks.distributed.suites import distributed_suites
from benchmarks.ops.suites import op_suites, random_op_suites
from benchmarks.results import Results, compare, load, save
from benchmarks.rollout.contestants import MODES
from benchmarks.rollout.side_by_side import MODELS, vllm_suites
from benchmarks.rollout.suites import (
    named_rollout_suites,
    random_rollout_suites,
    rollout_suites,
)
from benchmarks.suite import Suites, measure, run_meta
from benchmarks.timing import QUICK, ROUNDS, Machine
from benchmarks.train.step import (
    named_training_suites,
    random_training_suites,
    training_suites,
)
from benchmarks.trl.grpo import trl_suites
from benchmarks.tune.harness import tune, write_shipped
from benchmarks.tune.random_works import RANDOM_OPS, compile_schedules
from benchmarks.tune.winners import own_winners
from benchmarks.tune.works import OPS
from rl_consistency.cli.verify import chosen_device
from rl_consistency.numerics.files import require_writable

SUITES = {
    "ops": op_suites,
    "rollout": rollout_suites,
    "train": training_suites,
    "distributed": distributed_suites,
    "trl": trl_suites,
}

RANDOM_SUITES = {
    "ops": random_op_suites,
    "rollout": random_rollout_suites,
    "train": random_training_suites,
}
"""Suites of `--random-shapes`, by seed."""

NAMED_SUITES = {"rollout": named_rollout_suites, "train": named_training_suites}
"""Suites of `--model`, by the names of models."""

RANDOM_COUNT = 100
"""Shapes that `tune --random-shapes` draws unless `--count` says how many."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(arguments)
    args.command_line = f"python -m benchmarks {shlex.join(arguments)}"
    try:
        if getattr(args, "json", None) is not None:
            require_writable("--json", args.json)
        return args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="what")
    for name, run, text in (
        ("ops", _measure, "every op against its stock counterpart"),
        ("rollout", _measure, "generation: against stock ops, Hugging Face, the roofline"),
        ("train", _measure, "training steps of whole models"),
        ("distributed", _measure, "sums, steps and GRPO steps on all GPUs of this machine"),
        ("trl", _measure, "TRL's GRPO step as it comes, attached, and our own recipe's"),
        ("tune", _tune, "every schedule of an op"),
        ("accuracy", _accuracy, "errors against fp64"),
        ("compare", _compare, "the same cases of two results files"),
        ("merge", _merge, "results that several GPUs measured side by side, into the first file"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        if name not in ("compare", "merge"):
            command.add_argument("--json", type=Path, metavar="FILE", help="the results file")
        if name in SUITES:
            command.add_argument("--only", metavar="SUITE,...", help="only these suites")
            command.add_argument("--commit", help="the commit measured, where there is no git")
        if name in RANDOM_SUITES:
            text = "instead, shapes that no table has seen, drawn by this seed"
            command.add_argument("--random-shapes", type=int, metavar="SEED", help=text)
    text = "instead, a step of these models: presets, or sizes as benchmarks/models.py names them"
    for name in NAMED_SUITES:
        commands.choices[name].add_argument("--model", metavar="NAME,...", help=text)
    rollout = commands.choices["rollout"]
    text = "instead, beside vLLM, which lies in this site-packages folder; with --model of these"
    rollout.add_argument("--vllm", type=Path, metavar="FOLDER", help=text)
    rollout.add_argument("--against", metavar="MODE,...", help=f"of vLLM: {', '.join(MODES)}")
    text = "most seconds beside vLLM; what does not fit is named in the rows"
    rollout.add_argument("--seconds", type=float, metavar="N", help=text)
    tune = commands.choices["tune"]
    tune.add_argument("op", nargs="?", help="only this op")
    tune.add_argument("--write", action="store_true", help="write the matmul table")
    tune.add_argument(
        "--random-shapes", type=int, metavar="SEED", help="matmul or fold at shapes of this seed"
    )
    tune.add_argument("--count", type=int, metavar="N", help=f"so many of them ({RANDOM_COUNT})")
    tune.add_argument(
        "--compile-workers", type=int, metavar="N", help="compile them in N processes beforehand"
    )
    commands.choices["accuracy"].add_argument("--device", default="cpu")
    for name in ("old", "new"):
        commands.choices["compare"].add_argument(name, type=Path)
    text = "is written; it may be absent"
    commands.choices["merge"].add_argument("into", type=Path, metavar="FILE", help=text)
    text = "each was new when it was measured; the last counts where two have the same"
    commands.choices["merge"].add_argument("others", type=Path, nargs="+", help=text)
    return parser


def _machine() -> Machine:
    if not torch.cuda.is_available():
        raise ValueError("the benches measure an NVIDIA GPU (sm_80 or later); none is here.")
    return Machine(torch.device("cuda", torch.cuda.current_device()))


def _measure(args: argparse.Namespace) -> int:
    suites, machine = _chosen(args), _machine()
    meta = run_meta(machine.device, args.command_line, args.commit)
    results = Results() if args.json is None else load(args.json, meta["device"])
    models, seed = getattr(args, "model", None), getattr(args, "random_shapes", None)
    only = {} if models is None else {"model": _names(models)}
    only |= {} if seed is None else {"seed": [seed]}
    with own_winners(machine.device):
        results = measure(suites, machine, results, meta, args.json, only)
    failed = [row.case for row in results.of(*suites) if row.error is not None]
    bars = {name: bar for name, bar in results.bars.items() if bar["figure"] is not None}
    figures = {name: bar["figure"] for name, bar in bars.items()}
    missed = [name for name, bar in bars.items() if not bar["met"]]
    print(json.dumps({"failed": failed, "figures": figures, "missed": missed}))
    return 1 if failed else 0


def _names(text: str) -> list[str]:
    """Names between commas, each once."""
    return list(dict.fromkeys(text.split(",")))


def _chosen(args: argparse.Namespace) -> Suites:
    """The suites to measure; ValueError where an option names an unknown one."""
    seed, models = getattr(args, "random_shapes", None), getattr(args, "model", None)
    if seed is not None and models is not None:
        raise ValueError("--random-shapes draws its models; give it or --model.")
    if args.what == "rollout" and (args.vllm, args.against, args.seconds) != (None, None, None):
        suites = _beside_vllm(args)
    elif seed is not None:
        suites = RANDOM_SUITES[args.what](seed)
    elif models is not None:
        suites = NAMED_SUITES[args.what](_names(models))
    else:
        suites = SUITES[args.what]()
    names = list(suites) if args.only is None else args.only.split(",")
    if unknown := [name for name in names if name not in suites]:
        raise ValueError(f"--only {','.join(unknown)}: `{args.what}` has {', '.join(suites)}.")
    return {name: suites[name] for name in names}


def _beside_vllm(args: argparse.Namespace) -> Suites:
    """The suites of `--vllm`; ValueError where options contradict each other."""
    if args.vllm is None or args.random_shapes is not None:
        raise ValueError("--against and --seconds go with --vllm FOLDER, --random-shapes does not.")
    if args.seconds is not None and not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds:g}: give more than 0.")
    models = MODELS if args.model is None else _names(args.model)
    modes = tuple(MODES) if args.against is None else args.against.split(",")
    return vllm_suites(args.vllm, models, modes, seconds=args.seconds, json_file=args.json)


def _tune(args: argparse.Namespace) -> int:
    if args.op not in (None, *OPS):
        raise ValueError(f"tune {args.op}: the ops are {', '.join(OPS)}.")
    if args.random_shapes is not None:
        return _tune_random(args)
    if args.count is not None or args.compile_workers is not None:
        raise ValueError("--count and --compile-workers go with --random-shapes.")
    if args.write and args.op != "matmul":
        raise ValueError("--write goes with `tune matmul`: no other op has a measured table.")
    machine = _machine()
    works = [work for op in OPS if args.op in (None, op) for work in OPS[op](machine.device)]
    rows = tune(works, machine, args.json, ROUNDS)
    if args.write:
        # The file may hold random shapes too.
        of_table = {work.key: rows[work.key] for work in works}
        names = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        write_shipped(of_table, names)
    return _refusals(rows)


def _tune_random(args: argparse.Namespace) -> int:
    """Times schedules at random shapes, each for a short time."""
    if args.op not in RANDOM_OPS or args.write:
        raise ValueError(
            f"--random-shapes goes with `tune {' | '.join(RANDOM_OPS)}` and without --write: the "
            "table holds the shapes of the models."
        )
    count = RANDOM_COUNT if args.count is None else args.count
    if count < 1 or (args.compile_workers is not None and args.compile_workers < 1):
        raise ValueError("--count and --compile-workers are at least 1.")
    machine = _machine()
    if args.compile_workers is not None:
        compile_schedules(args.op, args.compile_workers)
    works = RANDOM_OPS[args.op](machine.device, args.random_shapes, count)
    return _refusals(tune(works, machine, args.json, QUICK))


def _refusals(rows: Mapping[str, Any]) -> int:
    return 1 if any(row["refused"] for row in rows.values()) else 0


def _accuracy(args: argparse.Namespace) -> int:
    return accuracy_doc.measure(chosen_device(args.device), args.json, args.command_line)


def _compare(args: argparse.Namespace) -> int:
    for path in (args.old, args.new):
        if not path.exists():
            raise ValueError(f"{path} does not exist; give two results files.")
    print("\n".join(compare(load(args.old), load(args.new))))
    return 0


def _merge(args: argparse.Namespace) -> int:
    require_writable("FILE", args.into)
    results = load(args.into)
    for path in args.others:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give results files.")
        results = results.joined(load(path, results.meta.get("device")))
    save(args.into, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
