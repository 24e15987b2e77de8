"""vLLM with and without the plug-in: in this process, in one of its own, and behind HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from benchmarks.rollout.engines import ENVIRONMENT as BENCHED
from tests.gpu.vllm.policies import Drawn

ENVIRONMENT = {**BENCHED, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""No network, and no kernels that need a CUDA toolkit."""

SWITCH = "RL_CONSISTENCY_VLLM"
GRAPHS = {
    "eager": {"enforce_eager": True},
    "decode": {
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 32, 128, 256],
        }
    },
    "graphs": {
        "compilation_config": {
            "cudagraph_capture_sizes": [1, 2, 4, 8, 32, 128, 256, 512],
        }
    },
    "eight": {
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [8],
        }
    },
}
"""How the model runs -> vLLM's options: op by op, decode steps as graphs, prefill too, and decode
steps of which most are padding."""

READY_SECONDS = 150.0


class Engine:
    """`vllm.LLM` of a checkpoint, whose random numbers are those of seed i and prompt id i."""

    def __init__(self, folder: Path, graphs: str = "eager", **options: Any) -> None:
        self.vllm: Any = import_module("vllm")
        assert any(
            each.name == "rl_consistency" for each in entry_points(group="vllm.general_plugins")
        ), "the plug-in's entry point is not installed"
        given: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 1 << 29,
            "gpu_memory_utilization": 0.02,
            "logprobs_mode": "processed_logprobs",
            "seed": 0,
        }
        self.llm = self.vllm.LLM(model=str(folder), **given | GRAPHS[graphs] | options)

    def drawn(
        self, prompts: Sequence[list[int]], new: int = 24, *, ids: Sequence[int] | None = None,
        logprobs: int = 0, **sampling: Any,
    ) -> Drawn:  # fmt: skip
        """Completions of `new` tokens. `cached` then says how many prompt tokens were known."""
        options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
        ids = range(len(prompts)) if ids is None else ids
        wanted = [
            self.vllm.SamplingParams(
                max_tokens=new, logprobs=logprobs, seed=i, extra_args={"prompt_id": i},
                **options | sampling,
            )
            for i in ids
        ]  # fmt: skip
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self.llm.generate(given, wanted, use_tqdm=False)
        self.cached = sum(each.num_cached_tokens or 0 for each in found)
        outputs = [each.outputs[0] for each in found]
        return [
            (
                list(each.token_ids),
                [row[token].logprob for token, row in zip(each.token_ids, each.logprobs)],
            )
            for each in outputs
        ]

    def load(self, weights: Sequence[tuple[str, Any]]) -> None:
        """Give the workers a trainer's weights, and forget what the old ones computed."""
        self.llm.apply_model(lambda model: len(model.load_weights(iter(weights))))
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Free the GPU, so that this process may start another engine."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.platforms import current_platform

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        # A pool whose graphs are gone cannot be captured into again.
        type(current_platform)._global_graph_pool = None


@contextmanager
def engine_of(
    folder: Path, graphs: str = "eager", *, own_process: bool = False, **options: Any
) -> Iterator[Engine]:
    """An engine with the plug-in, in this process or in one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv(SWITCH, "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(own_process)))
        engine = Engine(folder, graphs, **options)
        try:
            yield engine
        finally:
            engine.close()


class Server:
    """`vllm serve` of a checkpoint in a process of its own."""

    def __init__(self, folder: Path, log: Path, *options: str, plugin: bool = True) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address, self.log, self.model = f"http://127.0.0.1:{port}", log, str(folder)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        command += ["--max-model-len", "4096", "--seed", "0", "--generation-config", "vllm"]
        command += ["--kv-cache-memory-bytes", str(1 << 29), "--gpu-memory-utilization", "0.02"]
        command += ["--logprobs-mode", "processed_logprobs", *options]
        # An engine with the plug-in in this process sets the last one.
        stock = {SWITCH: "0", "VLLM_PLUGINS": "", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
        environment = os.environ | ENVIRONMENT | ({SWITCH: "1"} if plugin else stock)
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Until it answers. RuntimeError with its last lines where it ends or takes too long."""
        began = time.monotonic()
        while time.monotonic() - began < READY_SECONDS and self._process.poll() is None:
            try:
                with urlopen(f"{self.address}/health", timeout=5):
                    return
            except (URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise RuntimeError(f"no server at {self.address}:\n{self.log.read_text()[-4000:]}")

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """The status of a request, and the JSON that came back."""
        data = json.dumps({"model": self.model, **body}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with urlopen(Request(self.address + path, data, headers), timeout=120) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def completion(self, prompt: list[int], seed: int, new: int = 24, **more: Any) -> Drawn:
        """One completion of `new` tokens, as a list of one."""
        body = {
            "prompt": prompt, "max_tokens": new, "temperature": 1.0, "seed": seed, "logprobs": 0,
            "ignore_eos": True, "return_token_ids": True, "vllm_xargs": {"prompt_id": seed},
        }  # fmt: skip
        status, found = self.post("/v1/completions", body | more)
        assert status == 200, found
        (choice,) = found["choices"]
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"])]

    def completions(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], *, at_once: int, **more: Any
    ) -> Drawn:
        """A request for each prompt, so many at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            found = pool.map(lambda each: self.completion(*each, **more), zip(prompts, seeds))
            return [drawn for each in found for drawn in each]

    def close(self) -> None:
        """End the server and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                try:
                    self._process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
