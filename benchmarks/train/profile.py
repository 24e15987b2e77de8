"""Where a training step's time goes on a GPU, kernel by kernel, for us and for others.

`python -m benchmarks.train.profile --record` runs training steps (forward and backward, packed
16k tokens, as in `rl-consistency bench model`) under torch's profiler and writes
benchmarks/results/training_profile.json: for each model and contestant the microseconds a step
spends in each kernel, the number of its launches, and the time in which no kernel runs, with the
kernels that were waited for. Without `--record` it draws docs/img/training_step_profile.png from
that file, which needs no GPU. Of the LM head's products ours are in the kernels of the logprobs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.rollout.profile import Kernel, class_of, covered, device_kernels
from rl_consistency.cli.plots import MUTED, OURS, STOCK, STYLE

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/training_profile.json"
PICTURE = ROOT / "docs/img/training_step_profile.png"
MODELS = ("qwen3-0.6b", "qwen3-1.7b")
CONTESTANTS = ("ours", "liger", "stock")
SEQUENCES, LENGTH = 16, 1024
WARM_UP, STEPS = 3, 3
MOST_WAITS = 12
"""Kernels listed by the time that the GPU waited for them."""

CLASSES = {
    "attention backward": r"attention_(backward|statistics|dq|dkv|delta)|bprop|flash_bwd|dot_do_o"
    r"|convert_dq|reduce_head",
    "attention forward": r"attention|fprop|flash_fwd",
    "logprobs, loss": r"^(statistics|gradient|combine|target)_kernel|cross_entropy|softmax|nll",
    "norm, rotary, GLU": r"norm|rotary|rope|glu|silu|_(forward|backward)_kernel|fold_steps|narrow",
    "matrix products": r"nvjet|gemm|cutlass|xmma|splitk|(tma|pointer|qkv|gate_up)\w*_kernel",
}
"""Class of kernels to a pattern of their names, tried in this order; the rest is "other"."""

COLORS = {
    "matrix products": "#2563eb",
    "attention forward": OURS,
    "attention backward": "#15803d",
    "logprobs, loss": STOCK,
    "norm, rotary, GLU": "#7c3aed",
    "other": "#d1d5db",
    "no kernel": MUTED,
}


def summed(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """What one of `steps` equal steps spends: microseconds and launches by kernel, and idle."""
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.duration)
    begin = min(k.start for k in kernels)
    end = max(k.start + k.duration for k in kernels)
    busy = covered([(k.start, k.start + k.duration) for k in kernels])
    return {
        "step_us": (end - begin) / steps,
        "idle_us": (end - begin - busy) / steps,
        "idle_before": {
            name: round(us / steps, 2) for name, us in list(waits(kernels).items())[:MOST_WAITS]
        },
        "kernels": {
            name: {"us": round(sum(times) / steps, 2), "launches": len(times) / steps}
            for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
        },
    }


def waits(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds in which nothing ran, by the kernel that ended the wait, longest first."""
    found: dict[str, float] = {}
    in_order = sorted(kernels, key=lambda k: k.start)
    reached = in_order[0].start
    for kernel in in_order:
        if kernel.start > reached:
            found[kernel.name] = found.get(kernel.name, 0.0) + kernel.start - reached
        reached = max(reached, kernel.start + kernel.duration)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def classes(summary: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a step by class of kernel, and those in which none runs."""
    found = dict.fromkeys(COLORS, 0.0)
    for name, kernel in summary["kernels"].items():
        found[class_of(name, CLASSES)] += kernel["us"] / 1e3
    found["no kernel"] = summary["idle_us"] / 1e3
    return found


def record(models: Sequence[str]) -> dict[str, Any]:
    """Profile every contestant on every model, one after another."""
    import torch

    from rl_consistency.kernels.core.kernels_hash import kernels_hash

    return {
        "meta": {
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "kernels_sha256": kernels_hash(),
            "tokens": f"{SEQUENCES} x {LENGTH}",
        },
        "steps": {model: {who: _profiled(model, who) for who in CONTESTANTS} for model in models},
    }


def _profiled(name: str, who: str) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.peers import patch_by_liger
    from benchmarks.train.step import hugging_face_step, own_step
    from rl_consistency.models.patch import patch
    from rl_consistency.verify.presets import build_preset

    device = torch.device("cuda", torch.cuda.current_device())
    model = build_preset(name, torch.bfloat16, device=device).train()
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(0, vocabulary, (SEQUENCES, LENGTH), generator=generator).to(device)
    step: Callable[[], Any] = (own_step if who == "ours" else hugging_face_step)(model, ids)
    around: Any = nullcontext()
    if who == "ours":
        around = patch(model)
    elif who == "liger":
        patched = patch_by_liger(model)
        if patched is None:
            raise ModuleNotFoundError("liger_kernel is not installed; pip install liger-kernel.")
        around = patched()
    with around:
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
    return summed(device_kernels(profiler), STEPS)


def draw(content: Mapping[str, Any]) -> Figure:
    """A bar for every model and contestant, by class of kernel."""
    rows = [(model, who) for model, found in content["steps"].items() for who in found]
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 0.8 + 0.5 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        reached = [0.0] * len(rows)
        for name, color in COLORS.items():
            widths = [classes(content["steps"][model][who])[name] for model, who in rows]
            axes.barh(range(len(rows)), widths, 0.7, left=reached, color=color, label=name)
            reached = [left + width for left, width in zip(reached, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [f"{model}: {who}" for model, who in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms of one step, forward and backward, profiler on")
        axes.set_title(f"{content['meta']['tokens']} tokens, {content['meta']['device']}")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=4, frameon=False)
    return figure


def table(content: Mapping[str, Any]) -> str:
    """Milliseconds by class, as text."""
    lines = []
    for model, found in content["steps"].items():
        for who, summary in found.items():
            parts = ", ".join(f"{name} {ms:.1f}" for name, ms in classes(summary).items())
            lines.append(f"{model} {who}: {summary['step_us'] / 1e3:.1f} ms: {parts}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record on a GPU, or draw what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="measure; needs a GPU")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args(arguments)
    if args.record:
        content = record(args.models)
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    content = json.loads(args.json.read_text(encoding="utf-8"))
    draw(content).savefig(args.picture, format="png", dpi=160)
    print(table(content))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
