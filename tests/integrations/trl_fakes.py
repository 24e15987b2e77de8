"""A vLLM that is not installed, as TRL calls it: an LLM, and a server behind TRL's own client.

Both hold a patched model and generate by our engine. What TRL reads of vLLM has vLLM's names.
"""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM
from trl.generation.vllm_client import VLLMClient

import rl_consistency as rlc
from rl_consistency.integrations.vllm import weights
from rl_consistency.integrations.vllm.calls import CALLS


class Served(torch.nn.Module):
    """The interface of `CanonicalForCausalLM` that trainers use."""

    def __init__(self, path, dtype):
        super().__init__()
        self.hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).requires_grad_(False)
        self.session = rlc.patch(self.hf)
        weights.watch(self.hf)

    def load_weights(self, sent):
        return weights.load_weights(self.hf, sent)

    def fingerprint(self):
        return rlc.fingerprint("cpu").entries

    def digest(self):
        return weights.digest(self.hf)

    def digests(self):
        return weights.digests(self.hf)


class StockWorker:
    def __init__(self, model):
        self.model_runner = SimpleNamespace(model=model)

    def get_model(self):
        return self.model_runner.model


Worker = type("Worker", (StockWorker,), CALLS)
"""A worker that the plug-in gave its calls."""


class LLM:
    """`vllm.LLM` with the executor in the process."""

    worker, served, dtype, resets = Worker, Served, torch.float32, True
    server_logprobs = "processed_logprobs"

    def __init__(self, *, model, seed, logprobs_mode, tensor_parallel_size=1, **_):
        self.worker = type(self).worker(self.served(model, self.dtype))
        executor = SimpleNamespace(driver_worker=self.worker)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tensor_parallel_size, data_parallel_size=1
            ),
            model_config=SimpleNamespace(
                logprobs_mode=logprobs_mode, dtype=self.dtype, max_model_len=64
            ),
        )
        self.llm_engine = SimpleNamespace(
            model_executor=executor, vllm_config=config, model_config=config.model_config
        )
        self.seed, self.drawn, self.engine = seed, 0, None

    def collective_rpc(self, method):
        """As vLLM's `run_method` finds it."""
        if not hasattr(self.worker, method):
            raise NotImplementedError(f"Method {method!r} is not implemented.")
        return [getattr(self.worker, method)()]

    def reset_prefix_cache(self):
        return self.resets

    def sleep(self, level):
        for received in weights.watched():
            received.asleep = True
            received.distrust("they were thrown away")

    def wake_up(self, tags):
        for received in weights.watched():
            received.asleep &= "weights" not in tags

    def generate(self, prompts, sampling_params, use_tqdm):
        asked = vars(sampling_params)
        limits = rlc.SamplingParams(
            **{name: asked[name] for name in ("temperature", "top_p", "top_k", "min_p")},
            max_tokens=asked["max_tokens"],
            seed=self.seed,
        )
        if self.engine is None:
            self.engine = rlc.RolloutEngine(
                self.worker.get_model().hf, eos_token_id=258, max_num_seqs=8, tokens_per_sequence=64
            )
        ids = [prompt["prompt_token_ids"] for prompt in prompts for _ in range(asked["n"])]
        places = list(range(self.drawn, self.drawn + len(ids)))
        self.drawn += len(ids)
        outputs = [
            self.told(c.token_ids, c.token_logprobs.tolist())
            for c in self.engine.generate(ids, limits, prompt_ids=places)
        ]
        return [
            SimpleNamespace(prompt_token_ids=ids[i], outputs=outputs[i : i + asked["n"]])
            for i in range(0, len(ids), asked["n"])
        ]

    def told(self, tokens, logprobs):
        """A vLLM CompletionOutput."""
        named = [{t: SimpleNamespace(logprob=v, rank=1)} for t, v in zip(tokens, logprobs)]
        return SimpleNamespace(token_ids=list(tokens), logprobs=named)


class Client(VLLMClient):
    """TRL's client; tensors go over in memory in the place of NCCL."""

    served = None  # what runs behind the server

    def init_communicator(self, device=0):
        self.communicator = None

    def update_named_params(self, metadata, named_params):
        sent = list(named_params)
        assert [name for name, *_ in metadata] == [name for name, _ in sent]
        self.served.worker.model_runner.model.load_weights(sent)


@contextmanager
def server(llm):
    """vLLM's routes that TRL and we use, over HTTP; gives the base URL."""

    class Routes(BaseHTTPRequestHandler):
        def log_message(self, *_):
            """Quiet."""

        def answer(self, content, status=200):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            config = llm.llm_engine.vllm_config
            parts = {k: {n: str(v) for n, v in vars(p).items()} for k, p in vars(config).items()}
            self.answer(
                {
                    "/health": {},
                    "/v1/models": {"data": [{"id": "tiny"}]},
                    "/server_info": {"vllm_config": parts},
                }[self.path.partition("?")[0]]
            )

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            if self.path == "/reset_prefix_cache":
                return self.answer({"success": llm.reset_prefix_cache()})
            if self.path == "/collective_rpc":
                try:
                    return self.answer({"results": llm.collective_rpc(asked["method"])})
                except NotImplementedError as error:
                    return self.answer({"error": {"message": str(error)}}, 501)
            assert self.path == "/v1/completions"
            prompts = [{"prompt_token_ids": ids} for ids in asked["prompt"]]
            found = llm.generate(prompts, SimpleNamespace(**asked), use_tqdm=False)
            return self.answer(
                {
                    "choices": [
                        {
                            "prompt_token_ids": request.prompt_token_ids,
                            "token_ids": output.token_ids,
                            "logprobs": self.completion_logprobs(output),
                        }
                        for request in found
                        for output in request.outputs
                    ]
                }
            )

        def completion_logprobs(self, output):
            """Tokens as token ids."""
            values = [each[t].logprob for t, each in zip(output.token_ids, output.logprobs)]
            names = [f"token_id:{token}" for token in output.token_ids]
            tops = [{name: value} for name, value in zip(names, values)]
            return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}

    with ThreadingHTTPServer(("127.0.0.1", 0), Routes) as http:
        Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
