"""One decode step as the GPU ran it, kernel by kernel.

`python -m benchmarks.rollout.profile --record` decodes on a GPU under torch's profiler and writes
benchmarks/results/decode_profile.json; without `--record` it draws docs/img/decode_step.png from
that file, which needs no GPU. The profiler itself widens the gaps between kernels; how long the
GPU waits without it is measured by `rl-consistency bench rollout`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rl_consistency.cli.plots import MUTED, OURS, STOCK, STYLE
from rl_consistency.rollout.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/decode_profile.json"
PICTURE = ROOT / "docs/img/decode_step.png"

CLASSES = {
    "attention": r"attention|cache_write|flash|fmha",
    "matmul": r"(tma|pointer|qkv)_kernel|gate_up|gemm|nvjet|cutlass|xmma|splitk",
    "norm, rotary": r"_forward_kernel|rotary|norm",
    "sampling": r"statistic|combine|weights|pick|support|maxim|mass|philox|uniform|sampl|scan|sort",
}
"""Class of kernels to a pattern of their names, tried in this order; the rest is "other"."""

COLORS = {
    "attention": OURS,
    "matmul": "#2563eb",
    "norm, rotary": "#7c3aed",
    "sampling": STOCK,
    "other": MUTED,
}
NEW_TOKENS, SETTLING_STEPS, PROFILED_STEPS = 128, 24, 8
ZOOM = 0.06
"""Share of the step that the second panel shows."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel or copy on the device; times in microseconds."""

    name: str
    start: float
    duration: float
    launch: int
    """What launched it: kernels of one graph replay share it."""


def class_of(name: str, classes: Mapping[str, str] = CLASSES) -> str:
    """The class of a kernel by its name."""
    lowered = name.lower()
    return next((c for c, text in classes.items() if re.search(text, lowered)), "other")


def one_step(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The step in the middle: from one graph replay's first kernel to the next one's.

    Times are counted from its start. The largest launches are the replays.

    Raises:
        ValueError: fewer than three launches of as many kernels: the profiler did not see into
            the graphs, or decoding did not run through them.
    """
    sizes = Counter(kernel.launch for kernel in kernels)
    most = max(sizes.values(), default=0)
    replays = [launch for launch, size in sizes.items() if size > most // 2]
    starts = sorted(min(k.start for k in kernels if k.launch == launch) for launch in replays)
    if most < 10 or len(starts) < 3:
        raise ValueError(f"{len(kernels)} kernels in {len(sizes)} launches: no replays among them.")
    begin, end = starts[len(starts) // 2 - 1], starts[len(starts) // 2]
    inside = sorted((k for k in kernels if begin <= k.start < end), key=lambda k: k.start)
    step = [Kernel(k.name, k.start - begin, k.duration, k.launch) for k in inside]
    return [*step, Kernel("end of step", end - begin, 0.0, -1)]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def shares(step: Sequence[Kernel]) -> dict[str, float]:
    """Share of the step's time in each class, between kernels, and between launches."""
    length, kernels = step[-1].start, step[:-1]
    found = {name: 0.0 for name in COLORS}
    for kernel in kernels:
        found[class_of(kernel.name)] += kernel.duration / length
    launches: dict[int, tuple[float, float]] = {}
    for kernel in kernels:
        start, end = launches.get(kernel.launch, (kernel.start, 0.0))
        launches[kernel.launch] = (start, max(end, kernel.start + kernel.duration))
    busy = covered([(k.start, k.start + k.duration) for k in kernels])
    found["between kernels"] = 1 - busy / length
    found["between launches"] = 1 - covered(list(launches.values())) / length
    return found


def record(preset: str, batch: int, prompt_len: int) -> dict[str, Any]:
    """Decode on the GPU of this machine and keep one step's kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.rollout.cases import engine_for
    from benchmarks.rollout.models import built
    from benchmarks.rollout.workload import Workload
    from rl_consistency.kernels.core.kernels_hash import kernels_hash
    from rl_consistency.models.patch import patch

    device = torch.device("cuda", torch.cuda.current_device())
    model = built(preset, device)
    workload = Workload(
        groups=batch, group_size=1, prompt_len=prompt_len, longest=NEW_TOKENS, shortest=NEW_TOKENS
    )
    with patch(model):
        engine = engine_for(model, workload)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        prompts = workload.prompts("profile", model.config.vocab_size)
        requests = engine.submit(prompts, sampling)
        while engine.stats.decode_tokens < batch * SETTLING_STEPS:
            engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED_STEPS):
                engine.step()
            torch.cuda.synchronize()
        for request in requests:
            engine.cancel(request)
        while engine.has_unfinished:
            engine.step()
    kernels = device_kernels(profiler)
    return {
        "meta": {
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "kernels_sha256": kernels_hash(),
            "model": preset,
            "batch": batch,
            "context": prompt_len + SETTLING_STEPS,
        },
        "step": [asdict(kernel) for kernel in one_step(kernels)],
    }


def device_kernels(profiler: Any) -> list[Kernel]:
    """What ran on the device, from the raw events of a torch profiler that has ended."""
    return [
        Kernel(e.name(), e.start_ns() / 1e3, e.duration_ns() / 1e3, e.correlation_id())
        for e in profiler.profiler.kineto_results.events()
        if "CUDA" in str(e.device_type()) and e.duration_ns() > 0
    ]


def draw(content: Mapping[str, Any]) -> Figure:
    """The step by class of kernel over time, whole and a stretch of it."""
    step, meta = [Kernel(**kernel) for kernel in content["step"]], content["meta"]
    length, found = step[-1].start, shares(step)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        whole, part = figure.subplots(2, 1)
        _lanes(whole, step[:-1], (0.0, length), found)
        middle = 0.4 * length
        _lanes(part, step[:-1], (middle, middle + ZOOM * length), found)
        part.set_xlabel("ms")
        part.set_title(f"{ZOOM:.0%} of it")
        whole.set_title(
            f"One decode step of {length / 1e3:.2f} ms: {meta['model']}, {meta['batch']} sequences "
            f"of {meta['context']:,} tokens, {meta['device']}"
        )
        figure.suptitle(
            f"{found['between launches']:.1%} of the step between launches, "
            f"{found['between kernels']:.1%} between kernels (profiler on)",
            x=0.01, ha="left", fontsize=10, color=MUTED,
        )  # fmt: skip
    return figure


def _lanes(
    axes: Axes,
    kernels: Sequence[Kernel],
    span: tuple[float, float],
    found: Mapping[str, float],
) -> None:
    names = list(COLORS)
    for lane, name in enumerate(reversed(names)):
        bars = [
            (k.start / 1e3, k.duration / 1e3)
            for k in kernels
            if class_of(k.name) == name and k.start < span[1] and k.start + k.duration > span[0]
        ]
        axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=COLORS[name], linewidth=0)
    axes.set_yticks(range(len(names)), [f"{n} {found[n]:.0%}" for n in reversed(names)])
    axes.set_xlim(span[0] / 1e3, span[1] / 1e3)
    axes.set_ylim(-0.6, len(names) - 0.4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record on a GPU, or draw what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="measure; needs a GPU")
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args(arguments)
    if args.record:
        content = record(args.preset, args.batch, args.prompt_len)
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print({k: round(v, 4) for k, v in shares([Kernel(**k) for k in content["step"]]).items()})
    content = json.loads(args.json.read_text(encoding="utf-8"))
    draw(content).savefig(args.picture, format="png", dpi=160)
    print(f"{args.picture}: one step of {content['step'][-1]['start'] / 1e3:.2f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
