"""`python -m benchmarks`: measures this clone and writes what the docs say about it.

The last line of ops, rollout and train is JSON. Exit status: 0; 1 where a case raised or a schedule
gave other bytes; 2 on bad input, and where there is no GPU to measure.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this clone's rl_consistency, whatever is installed

import torch  # noqa: E402

# `timing` reads the library settings of a fresh process, so it comes before what sets them.
from benchmarks import timing  # noqa: E402
from benchmarks.results import Results, compare, load  # noqa: E402
from benchmarks.suite import Run, Suite, bar_lines, run_meta  # noqa: E402
from rl_consistency.cli.output_file import require_writable  # noqa: E402

CASE_SECONDS, QUICK_CASE_SECONDS = 0.12, 0.06


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
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="what")
    for name, run, text in (
        ("ops", _measure, "every op against its stock counterpart"),
        ("rollout", _measure, "generation: against stock ops, Hugging Face, the roofline"),
        ("train", _measure, "training steps of whole models"),
        ("tune", _tune, "every schedule of an op"),
        ("accuracy", _accuracy, "errors against fp64; docs/accuracy.md"),
        ("speed-doc", _speed_doc, "docs/speed.md and the README's speed table"),
        ("compare", _compare, "the same cases of two results files"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        if name not in ("speed-doc", "compare"):
            command.add_argument("--json", type=Path, metavar="FILE", help="the results file")
        if run is _measure:
            command.add_argument("--only", metavar="SUITE,...", help="only these suites")
            command.add_argument("--quick", action="store_true", help="a few shapes of each suite")
            command.add_argument("--commit", help="the commit measured, where there is no git")
    rollout, tune = commands.choices["rollout"], commands.choices["tune"]
    rollout.add_argument("--model", help="a preset or directory; only its decoding")
    rollout.add_argument("--batch", type=int, default=256, help="its sequences")
    rollout.add_argument("--prompt-len", type=int, default=512, help="its prompts")
    rollout.add_argument("--new-tokens", type=int, default=1024, help="most new tokens")
    tune.add_argument("op", nargs="?", help="only this op")
    tune.add_argument("--write", action="store_true", help="write the matmul table")
    commands.choices["accuracy"].add_argument("--device", default="cpu")
    for name in ("old", "new"):
        commands.choices["compare"].add_argument(name, type=Path)
    return parser


def _machine(case_seconds: float) -> timing.Machine:
    if not torch.cuda.is_available():
        raise ValueError("the benches measure an NVIDIA GPU (sm_80 or later); none is here.")
    return timing.Machine(torch.device("cuda", torch.cuda.current_device()), case_seconds)


def _measure(args: argparse.Namespace) -> int:
    suites = chosen(args)
    machine = _machine(QUICK_CASE_SECONDS if args.quick else CASE_SECONDS)
    meta = run_meta(machine.device, args.command_line, args.commit)
    results = Results() if args.json is None else load(args.json, meta["device"])
    run = Run(results, meta, args.json, args.quick)
    failed = run.measure(suites, machine)
    print("\n".join(bar_lines(run.results)))
    bars = run.results.bars.items()
    figures = {name: bar["figure"] for name, bar in bars if bar["figure"] is not None}
    print(json.dumps({"failed": failed, "figures": figures}))
    return 1 if failed else 0


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
    known = {suite.name: suite for suite in suites_of(quick=args.quick)}
    names = list(known) if args.only is None else args.only.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {','.join(unknown)}: `{args.what}` has {', '.join(known)}.")
    return [known[name] for name in names]


def _tune(args: argparse.Namespace) -> int:
    from benchmarks.tune.harness import tune
    from benchmarks.tune.matmul_table import write_table
    from benchmarks.tune.works import OPS

    if args.op not in (None, *OPS):
        raise ValueError(f"tune {args.op}: the ops are {', '.join(OPS)}.")
    if args.write and args.op != "matmul":
        raise ValueError("--write goes with `tune matmul`: no other op has a measured table.")
    machine = _machine(CASE_SECONDS)
    works = (work for op in OPS if args.op in (None, op) for work in OPS[op](machine.device))
    rows = tune(works, machine, args.json)
    if args.write:
        write_table(rows, f"device {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return 1 if any(row["refused"] for row in rows.values()) else 0


def _accuracy(args: argparse.Namespace) -> int:
    from benchmarks.accuracy_doc import measure

    return measure(torch.device(args.device), args.json, args.command_line)


def _speed_doc(_: argparse.Namespace) -> int:
    from benchmarks.speed_doc import write

    return write()


def _compare(args: argparse.Namespace) -> int:
    print("\n".join(compare(load(args.old), load(args.new))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
