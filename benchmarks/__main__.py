"""`python -m benchmarks`: measures this clone and writes what the docs say about it.

The last line of ops, rollout and train is JSON. Exit status: 0; 1 where a case raised or a schedule
gave other bytes; 2 on bad input, and where there is no GPU to measure.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this clone's rl_consistency, whatever is installed

import torch  # noqa: E402

# `timing` reads the library settings of a fresh process, so it comes before what sets them.
from benchmarks import timing  # noqa: E402
from benchmarks.results import Results, compare, load  # noqa: E402
from benchmarks.session import Session, bar_lines, command_line, run_meta  # noqa: E402
from benchmarks.suite import Suite  # noqa: E402
from rl_consistency.cli.output_file import require_writable  # noqa: E402

CASE_SECONDS, QUICK_CASE_SECONDS = 0.12, 0.06


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(arguments)
    args.command_line = command_line(arguments)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    helps = {
        "ops": "every op against its stock counterpart",
        "rollout": "generation: against stock ops, Hugging Face, the roofline",
        "train": "training steps of whole models",
        "tune": "every schedule of an op",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=_tune if name == "tune" else _measure, what=name)
        command.add_argument("--json", type=Path, metavar="FILE", help="merge the results into it")
        command.add_argument("--device", default="cuda", help="the GPU (default cuda)")
        command.add_argument("--seconds", type=float, help="start no further case after so many")
        if name == "tune":
            command.add_argument("op", nargs="?", help="only this op")
            command.add_argument("--write", action="store_true", help="write the matmul table")
            continue
        command.add_argument("--only", metavar="SUITE,...", help="only these suites")
        command.add_argument("--quick", action="store_true", help="a few shapes of each suite")
        command.add_argument("--commit", help="the commit measured, where there is no git")
        if name == "rollout":
            command.add_argument("--model", help="a preset or directory; only its decoding")
            command.add_argument("--batch", type=int, default=256, help="its sequences")
            command.add_argument("--prompt-len", type=int, default=512, help="its prompts")
            command.add_argument("--new-tokens", type=int, default=1024, help="most new tokens")
    command = commands.add_parser("accuracy", help="errors against fp64; docs/accuracy.md")
    command.set_defaults(run=_accuracy)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    command.add_argument("--device", default="cpu")
    command = commands.add_parser("speed-doc", help="docs/speed.md and the README's speed table")
    command.set_defaults(run=_speed_doc)
    command = commands.add_parser("compare", help="the same cases of two results files")
    command.set_defaults(run=_compare)
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    return parser


def _machine(args: argparse.Namespace, case_seconds: float) -> timing.Machine:
    """The GPU, with the deadline of the command.

    Raises:
        ValueError: `--seconds` is no positive number, or there is no GPU.
    """
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds {args.seconds}: must be a positive number.")
    device = torch.device(args.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError("the benches measure an NVIDIA GPU (sm_80 or later); none is here.")
    if device.index is not None:
        torch.cuda.set_device(device)
    machine = timing.Machine(torch.device("cuda", torch.cuda.current_device()), case_seconds)
    if args.seconds is not None:
        machine.deadline = time.perf_counter() + args.seconds
    return machine


def _measure(args: argparse.Namespace) -> int:
    if args.json is not None:
        require_writable("--json", args.json)
    suites = chosen(args)
    machine = _machine(args, QUICK_CASE_SECONDS if args.quick else CASE_SECONDS)
    meta = run_meta(machine.device, args.command_line, args.commit)
    results = Results() if args.json is None else load(args.json, meta["device"])
    session = Session(results, meta, args.json, args.quick)
    session.measure(suites, machine)
    print("\n".join(bar_lines(session.results)))
    bars = session.results.bars.items()
    figures = {name: bar["figure"] for name, bar in bars if bar["figure"] is not None}
    print(json.dumps({"failed": session.failed, "figures": figures}))
    return 1 if session.failed else 0


def chosen(args: argparse.Namespace) -> list[Suite]:
    """The suites to measure.

    Raises:
        ValueError: `--only` names an unknown suite.
    """
    if args.what == "ops":
        from benchmarks.ops.suites import op_suites as suites_of
    elif args.what == "train":
        from benchmarks.train.step import training_suites as suites_of
    else:
        from benchmarks.rollout.suites import own_suite
        from benchmarks.rollout.suites import rollout_suites as suites_of

        if args.model is not None:
            return [own_suite(args.model, args.batch, args.prompt_len, args.new_tokens)]
    suites = suites_of(quick=args.quick)
    if args.only is None:
        return suites
    known = {suite.name: suite for suite in suites}
    unknown = [name for name in args.only.split(",") if name not in known]
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: `{args.what}` has {', '.join(known)}.")
    return [known[name] for name in args.only.split(",")]


def _tune(args: argparse.Namespace) -> int:
    from benchmarks.tune.harness import tune
    from benchmarks.tune.matmul_table import write_table
    from benchmarks.tune.works import OPS

    if args.op not in (None, *OPS):
        raise ValueError(f"tune {args.op}: the ops are {', '.join(OPS)}.")
    if args.write and args.op != "matmul":
        raise ValueError("--write goes with `tune matmul`: no other op has a measured table.")
    if args.json is not None:
        require_writable("--json", args.json)
    machine = _machine(args, CASE_SECONDS)
    works = (work for op in OPS if args.op in (None, op) for work in OPS[op](machine.device))
    rows = tune(works, machine, args.json)
    if args.write:
        where = f"device {torch.cuda.get_device_name()}, torch {torch.__version__}"
        write_table(rows, where)
    return 1 if any(row["refused"] for row in rows.values()) else 0


def _accuracy(args: argparse.Namespace) -> int:
    from benchmarks.accuracy_doc import measure

    return measure(torch.device(args.device), args.json, args.command_line)


def _speed_doc(args: argparse.Namespace) -> int:
    from benchmarks.speed_doc import write

    write()
    return 0


def _compare(args: argparse.Namespace) -> int:
    print("\n".join(compare(load(args.old), load(args.new))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
