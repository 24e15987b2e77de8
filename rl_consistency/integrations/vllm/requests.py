"""Which requests of vLLM are covered, and how their tokens are drawn; the others fail by name.

The front end refuses a request with a ValueError, which is status 400 over HTTP. One that comes
from a front end without this plug-in fails in the engine's process, with finish reason "error".

The random stream is that of `RolloutEngine` for the same seed, prompt id and sample index. The last
two are `extra_args` of vLLM's SamplingParams, `vllm_xargs` over HTTP, and 0 by default:

    SamplingParams(seed=3, n=8, logprobs=0, extra_args={"prompt_id": 17})

Of n completions, number i has the seed of all and the sample index i, as in a group of the engine;
without this plug-in in the front end it has vLLM's own seed + i. A request without a seed draws
one, and another when it goes on after a preemption.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from rl_consistency.rollout.sampling_params import SamplingParams, check_integer

COVERED = frozenset(
    {
        # Those that the draw and the logprobs depend on.
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "extra_args"),
        # Those that end a completion, those of how it is returned, and those of vLLM's own work.
        *("stop", "stop_token_ids", "ignore_eos", "max_tokens", "repetition_detection"),
        *("_eos_token_id", "_all_stop_token_ids", "output_text_buffer_length", "output_kind"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "flat_logprobs"),
        *("include_stop_str_in_output", "stream_interval", "routed_experts_prompt_start"),
        *("skip_clone", "skip_reading_prefix_cache", "watermarking", "_watermarking_skipped"),
    }
)
"""Fields of vLLM's SamplingParams that may have any value; every other has to keep its default."""

HINTS = {
    "repetition_penalty": "vLLM may have it from the model's generation_config.json: start it with "
    "--generation-config vllm",
    "min_tokens": "it masks the tokens that stop; ignore_eos gives a fixed length",
    "prompt_logprobs": "rl_consistency.token_logprobs scores prompts; over HTTP `echo` asks for it",
    "structured_outputs": "response formats and required tool calls ask for it",
}

FIRST_SEED = "first_seed"  # in `extra_args` of each of n completions: the seed of all
STREAM = ("prompt_id", "sample_index", "greedy_logprobs", FIRST_SEED)
OF_VLLM = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")


def asked(given: Any, drawn: int = 0) -> tuple[SamplingParams, int, int]:
    """What vLLM's SamplingParams ask for: params with a seed, `drawn` where they have none, the
    prompt id, and the sample index.

    `extra_args` may hold "prompt_id" below 2**64, "sample_index" below 2**32 and "greedy_logprobs"
    as in `rl_consistency.SamplingParams`. ValueError naming the first field that is not covered.
    """
    for name, default in _defaults(type(given)).items():
        value = getattr(given, name)
        if not (name in COVERED or value == default or _is_empty(value)):
            hint = f" ({HINTS[name]})" if name in HINTS else ""
            raise ValueError(
                f"{name}={value!r} is not covered by rl_consistency: the logprobs would not be "
                f"those that training computes. Leave it at {default!r}{hint}."
            )
    extra = given.extra_args or {}
    if unknown := sorted(map(str, extra.keys() - {*STREAM, *OF_VLLM})):
        allowed = ", ".join((*STREAM, *OF_VLLM))
        raise ValueError(f"extra_args hold {', '.join(unknown)}; allowed: {allowed}.")

    def number(name: str, usual: int, low: int, high: int) -> int:
        return check_integer(f"extra_args[{name!r}]", extra.get(name, usual), low, high)

    prompt_id = number("prompt_id", 0, 0, 2**64 - 1)
    index = number("sample_index", 0, 0, 2**32 - given.n)
    seed = drawn
    if given.seed is not None:
        own = check_integer("seed", given.seed, 0, 2**63 - given.n)
        seed = number(FIRST_SEED, own, max(own + index - 2**32 + 1, 0), own)
        index += own - seed
    params = SamplingParams(
        temperature=given.temperature,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        min_p=given.min_p,
        seed=seed,
        greedy_logprobs=extra.get("greedy_logprobs", "zero"),
    )
    return params, prompt_id, index


@cache
def _defaults(kind: type[Any]) -> dict[str, Any]:
    """All fields of a release's SamplingParams, with their defaults."""
    usual = kind()
    return {name: getattr(usual, name) for name in usual.__struct_fields__}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (list, dict)) and not value)


def require_covered(request: Any) -> None:
    """ValueError unless vLLM's EngineCoreRequest is covered, naming the field that is not."""
    for name in ("lora_request", "prompt_embeds", "mm_features"):
        if not _is_empty(getattr(request, name)):
            raise ValueError(f"{name} is not covered by rl_consistency; leave it out.")
    if request.sampling_params is not None:  # those of a pooling request are vLLM's to refuse
        asked(request.sampling_params)


def install_refusals() -> None:
    """Have vLLM refuse requests that are not covered, in this process; may run several times."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    process, preprocess = InputProcessor.process_inputs, EngineCore.preprocess_add_request
    if hasattr(process, "refuses_uncovered"):
        return

    @wraps(process)
    def process_inputs(*args: Any, **kwargs: Any) -> Any:
        request = process(*args, **kwargs)
        require_covered(request)
        params = request.sampling_params
        if params is not None and params.n > 1 and params.seed is not None:
            # Another dict: the caller may hold this one.
            params.extra_args = {**(params.extra_args or {}), FIRST_SEED: params.seed}
        return request

    @wraps(preprocess)
    def preprocess_add_request(engine: Any, request: Any) -> Any:
        require_covered(request)
        return preprocess(engine, request)

    vars(process_inputs)["refuses_uncovered"] = True
    InputProcessor.process_inputs = process_inputs
    EngineCore.preprocess_add_request = preprocess_add_request
