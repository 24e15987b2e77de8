"""Sharing the checks of `verify` among processes: most of a first run on a GPU is compilation."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.context import BaseContext
from threading import Thread

import torch

from rl_consistency.kernels.core.compile_ahead import use_workers
from rl_consistency.verify.claims import Check, Result

LONGEST = ("schedules: attention", "C1 token_logprobs", "8b fp32", "paged attention")
"""Scopes that are begun first, so that none of them is the last to end; then the largest."""
UNSENT = pickle.PickleError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
"""What an error raises that cannot be sent to another process."""
CONTEXT_BYTES = 2**30
"""Device memory that a process takes whatever it runs: context, kernels, stacks."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Checks that one process makes in a row. It can be sent to another process."""

    scope: str
    memory: int = 0
    """Bytes of the device that the checks may hold, estimated from above."""
    open: Callable[[], AbstractContextManager[list[Check]]]
    """Makes the checks and holds what they need, for the length of a block."""

    def run(self, on_result: Callable[[Result], None]) -> list[Result]:
        results: list[Result] = []
        with self.open() as checks:
            for check in checks:
                results.append(check.run())
                on_result(results[-1])
        return results


def run_in_processes(
    jobs: Sequence[Job], processes: int, device: torch.device, on_result: Callable[[Result], None]
) -> list[Result]:
    """Run jobs side by side, as many at a time as the device's free memory holds, and return their
    results in order. A job that finds no memory left all the same runs again, alone.

    `on_result` is called with a job's results as soon as they are there. A job's error ends those
    that still run and is raised, as a RuntimeError with its traceback where it cannot be sent.
    """
    found: dict[int, list[Result]] = {}
    # As many threads compile as there are cores, twice over: they wait for the assembler.
    compiling = max(1, 2 * len(os.sched_getaffinity(0)) // processes)
    given = (device, torch.get_num_threads(), compiling)
    room = math.inf
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] - processes * CONTEXT_BYTES
    held: list[float] = [job.memory for job in jobs]
    ranks = [[job.scope.endswith(op) for op in LONGEST] for job in jobs]
    waiting = sorted(range(len(jobs)), key=lambda i: (ranks[i], held[i]), reverse=True)
    running: dict[Future[list[Result]], int] = {}
    before = {child.pid for child in active_children()}
    context = start_method(device.type, __name__)
    with ProcessPoolExecutor(processes, context, _begin_process, given) as pool:
        try:
            while waiting or running:
                for i in _next(held, waiting, running.values(), room, processes):
                    waiting.remove(i)
                    running[pool.submit(_run_job, jobs[i])] = i
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    i = running.pop(future)
                    lacked_memory = isinstance(future.exception(), torch.OutOfMemoryError)
                    if lacked_memory and held[i] < math.inf:
                        held[i] = math.inf
                        waiting.append(i)
                        continue
                    found[i] = future.result()
                    for result in found[i]:
                        on_result(result)
        except BaseException:
            # They may have minutes to go, and nobody waits for what they find.
            for child in active_children():
                if child.pid not in before:
                    child.terminate()
            pool.shutdown(cancel_futures=True)
            raise
    return [result for i in range(len(jobs)) for result in found[i]]


def start_method(device: str, module: str) -> BaseContext:
    """How processes for a kind of device start: forked from one that has imported a module, torch
    with it, which is most of a start; CUDA bars that."""
    context = get_context("spawn" if device == "cuda" else "forkserver")
    if device != "cuda":
        context.set_forkserver_preload([module])
    return context


def _next(
    held: Sequence[float], waiting: Sequence[int], running: Iterable[int], room: float, most: int
) -> list[int]:
    """The jobs to begin now, by the memory each holds; one that holds more than there is runs
    alone."""
    begun = list(running)
    before = len(begun)
    for i in waiting:
        fits = sum(held[j] for j in begun) + held[i] <= room
        if len(begun) < most and (fits or not begun):
            begun.append(i)
    return begun[before:]


def _begin_process(device: torch.device, threads: int, compiling: int) -> None:
    # An interrupt from the terminal reaches every process; the first one reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    torch.set_num_threads(threads)
    use_workers(compiling)
    if device.type == "cuda" and device.index is not None:
        # A process that waits for the GPU leaves its core to those that compile.
        driver, blocking_sync = ctypes.CDLL("libcuda.so.1"), 4  # CU_CTX_SCHED_BLOCKING_SYNC
        if driver.cuInit(0) or driver.cuDevicePrimaryCtxSetFlags_v2(device.index, blocking_sync):
            raise RuntimeError("the CUDA driver does not take blocking waits.")
        torch.cuda.set_device(device)


def end_with_parent() -> None:
    """Let this process end with its parent. Otherwise a pool's processes would wait for work for
    ever once the first was killed."""
    parent = parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    Thread(target=end, daemon=True).start()


def _run_job(job: Job) -> list[Result]:
    # The processes share the device's memory, and blocks of one size do not serve the next.
    try:
        return job.run(lambda result: torch.cuda.empty_cache())
    except BaseException as error:
        try:
            arrives = type(pickle.loads(pickle.dumps(error))) is type(error)
        except UNSENT:
            arrives = False
        if not arrives:  # it would break the pool
            raise RuntimeError("".join(traceback.format_exception(error))) from None
        raise
    finally:
        gc.collect()  # a patched model is a cycle of references
        torch.cuda.empty_cache()
