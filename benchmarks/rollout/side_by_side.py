"""Our engine and vLLM on the same model and work: one after the other, a process each.

All of them get the same configuration of the model, weights N(0, 0.02), prompts and lengths, and
return logprobs, and have a cache of one size. Ours has the defaults of `RolloutEngine` but for that
and `max_num_seqs`; what vLLM is given is in engine_child.py and contestants.py. Times are
medians of whole calls on the host's clock, prefill included.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.models import model_config
from benchmarks.rollout.batch_dependence import Independence, differing_share
from benchmarks.rollout.child import Budget, Child, ChildError, tail
from benchmarks.rollout.contestants import MODES, OURS, ROOT, Way, kv_cache_size, save_config, ways
from benchmarks.rollout.generation import release_memory
from benchmarks.rollout.workload import TOKENS_BEYOND, Workload
from benchmarks.suite import ERRORS, Case, Suites
from benchmarks.timing import Machine

MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-8b")

PREFILL = Workload.equal(256, 1, 512, 1)
JOINING = Workload(640, 1, 128, longest=256, shortest=20)
"""More sequences than run at a time, of many lengths: prompts join those that decode."""
WORKS = (
    Workload.equal(256, 1, 512, 128),
    PREFILL,
    JOINING,
    Workload.equal(1, 1, 512, 256),
    Workload.equal(256, 1, 512, 1024),
)
"""Workloads in the order in which they are measured; the longest last, as time may run out."""

MAX_NUM_SEQS = 256
START_SECONDS, ANSWER_SECONDS = 300.0, 180.0
"""Most seconds until a child is ready, and for one answer."""
REPEATS, REPEAT_SECONDS = 3, 20.0
"""Runs of a work; no further one begins after so many seconds of them."""
WARM_TOKENS = 8


@dataclass
class Found:
    """What was measured of one engine, as far as it came."""

    seconds: dict[Workload, float] = field(default_factory=dict)
    preemptions: dict[Workload, int] = field(default_factory=dict)
    """Preemptions in a work's last run, where the engine counts them."""
    dependent: float | None = None
    about: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    """Why the rest is missing."""


class SideBySide:
    """One model on every engine; all is measured when the first row is asked for."""

    def __init__(
        self,
        model: str,
        contestants: Sequence[Way],
        *,
        works: Sequence[Workload] = WORKS,
        independence: Independence | None = None,
        budget: Budget | None = None,
        logs: Callable[[str], Path],
    ):
        """`logs` gives the file for the output of a child, by a name made of model and engine."""
        self._model, self._ways, self._works = model, contestants, works
        self._independence = independence or Independence()
        self._budget, self._logs = budget or Budget(), logs
        self._found: dict[str, Found] = {}

    def row(self, workload: Workload, bench: Machine) -> dict[str, Any]:
        """The fields of one work's row; ChildError, saying why, where ours was not measured."""
        if not self._found:
            self._measure(bench.device)
        ours = self._found[OURS]
        if workload not in ours.seconds:
            raise ChildError(ours.failure or "ours was not measured")
        tokens = _tokens(workload)
        seconds: dict[str, float] = {}
        figures: dict[str, Any] = {}
        unavailable: dict[str, str] = {}
        for name, found in self._found.items():
            figures |= self._figures(name, found, workload)
            if workload in found.seconds:
                seconds[name] = found.seconds[workload]
            else:
                unavailable[name] = found.failure or "not measured"
            if name != OURS and name in seconds:
                figures[f"{name}/ratio"] = seconds[name] / seconds[OURS]
        return {
            "ours_us": 1e6 * seconds[OURS],
            "peers": {name: 1e6 * s for name, s in seconds.items() if name != OURS},
            "tokens_per_second": {name: tokens / s for name, s in seconds.items()},
            "figures": figures,
            "unavailable": unavailable,
        }

    def _figures(self, name: str, found: Found, workload: Workload) -> dict[str, Any]:
        figures: dict[str, Any] = {f"{name}/{key}": value for key, value in found.about.items()}
        if workload == self._works[0] and found.dependent is not None:
            figures[f"{name}/batch_dependent"] = found.dependent
        if workload in found.preemptions:
            figures[f"{name}/preemptions"] = found.preemptions[workload]
        for work, seconds in found.seconds.items():
            same = (work.sequences, work.prompt_len) == (workload.sequences, workload.prompt_len)
            if same and work.longest == 1:
                figures[f"{name}/prefill_seconds"] = seconds
        return figures

    def _measure(self, device: torch.device) -> None:
        """Measure all engines, one after the other; a failure keeps what came before it."""
        if device.type == "cuda":
            release_memory()
        for way in self._ways:
            self._found[way.name] = found = Found()
            if way.name != OURS and not self._found[OURS].seconds:
                found.failure = "not begun: ours gave no figure to hold it against"
                continue
            began, log = time.perf_counter(), self._logs(f"{self._model}.{way.name}")
            folder = Path(tempfile.mkdtemp(prefix="rl_consistency_"))
            try:
                settings = self._settings(folder, device)
                command = (*way.command, str(folder))
                with Child(command, folder, log, way.environment, ROOT) as child:
                    self._fill(found, child, settings["vocabulary"], way.name)
            except ERRORS as error:
                # Of either engine: what failed here hides nothing that was measured.
                kind = "" if isinstance(error, ChildError) else f"{type(error).__name__}: "
                found.failure = f"{kind}{error} (log: {log.name})"
                print(tail(log), file=sys.stderr, flush=True)
            finally:
                shutil.rmtree(folder)
            seconds = time.perf_counter() - began
            end = found.failure or "ok"
            print(f"{self._model}, {way.name}: {seconds:.0f} s, {end}", flush=True)

    def _settings(self, folder: Path, device: torch.device) -> dict[str, Any]:
        """Write and give what a child is built from."""
        config, check = save_config(self._model, folder / "model"), self._independence
        length = max(work.prompt_len + work.longest for work in self._works)
        length = max(length, check.longest_prompt + check.new_tokens)
        sequences = max(check.prompts + check.others, *(w.sequences for w in self._works))
        sequences = min(sequences, MAX_NUM_SEQS)
        settings = {
            "model": str(folder / "model"),
            "device": str(device),
            "max_num_seqs": MAX_NUM_SEQS,
            "tokens_per_sequence": length + TOKENS_BEYOND,
            "vocabulary": config.vocab_size,
            **kv_cache_size(config, sequences, length),
        }
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        return settings

    def _fill(self, found: Found, child: Child, vocabulary: int, name: str) -> None:
        """Measure one engine, work by work."""
        found.about = child.ready(self._budget.within(START_SECONDS))
        found.about["start_seconds"] = found.about.pop("seconds")
        print(f"{self._model}, {name}: ready: {found.about}", flush=True)
        warm: set[tuple[int, int]] = set()
        for place, work in enumerate(self._works):
            prompts = partial(work.prompts, vocabulary=vocabulary)
            size = work.sequences, work.prompt_len
            if size not in warm:
                warm.add(size)
                self._ask(child, prompts("warm"), min(WARM_TOKENS, work.longest))
            times: list[float] = []
            while len(times) < REPEATS and sum(times) < REPEAT_SECONDS:
                answer = self._ask(child, prompts(f"{place} {len(times)}"), work.lengths())
                times.append(answer["seconds"])
                if "preemptions" in answer:
                    found.preemptions[work] = answer["preemptions"]
            found.seconds[work] = median(times)
            rate = _tokens(work) / found.seconds[work]
            shown = ", ".join(f"{seconds:.3f}" for seconds in times)
            size = f"{work.sequences} x ({work.prompt_len} + {work.longest})"
            print(f"{self._model}, {name}: {size}: {rate:,.0f} tokens/s, {shown} s", flush=True)
            if place == 0:
                found.dependent = self._dependent_share(child, vocabulary)
                share = f"{found.dependent:.2%}"
                print(f"{self._model}, {name}: {share} depend on the batch", flush=True)

    def _dependent_share(self, child: Child, vocabulary: int) -> float:
        check = self._independence
        alone, batch, start = check.batches(vocabulary)
        ask = partial(self._ask, child, new_tokens=check.new_tokens, temperature=0.0, keep=True)
        one, other = ask(alone)["completions"], ask(batch)["completions"]
        return differing_share(one, other[start : start + len(alone)])

    def _ask(
        self, child: Child, prompts: Sequence[Sequence[int]], new_tokens: int | list[int],
        temperature: float = 1.0, keep: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        request = {"prompts": prompts, "new_tokens": new_tokens}
        request |= {"temperature": temperature, "keep": keep}
        return child.ask(request, self._budget.within(ANSWER_SECONDS))


def _tokens(workload: Workload) -> int:
    """Tokens that count: new ones, of prefill alone those of the prompts."""
    if workload.longest == 1:
        return workload.sequences * workload.prompt_len
    return sum(workload.lengths())


def work_name(workload: Workload) -> str:
    """Name of a workload in a row."""
    if workload.longest == 1:
        return "prefill"
    return "generate" if workload.shortest == workload.longest else "generate, joining"


def vllm_suites(
    site: Path,
    models: Sequence[str] = MODELS,
    modes: Sequence[str] = tuple(MODES),
    *,
    seconds: float | None = None,
    json_file: Path | None = None,
) -> Suites:
    """A suite of each model, so that its rows are saved when it is done. ValueError on a folder
    without vLLM, and on unknown models and modes. Logs lie beside `json_file`."""
    contestants, budget = ways(site, modes), Budget(seconds)
    for model in models:
        model_config(model)

    def log(name: str) -> Path:
        place = _file_name(name)
        if json_file is None:
            return Path(tempfile.gettempdir()) / f"rollout_vllm.{place}.log"
        return json_file.parent / f"{json_file.stem}.{place}.log"

    found: dict[str, list[Case]] = {}
    for model in dict.fromkeys(models):
        side_by_side = SideBySide(model, contestants, budget=budget, logs=log)
        found[f"rollout_vllm_{model}"] = [
            Case(
                work=work_name(work),
                shape={"model": model, **work.shape},
                run=partial(side_by_side.row, work),
            )
            for work in WORKS
        ]
    return found


def _file_name(name: str) -> str:
    """A name as a part of a file's name."""
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in name)
