"""What other engines sampled, read from their own outputs: token ids and fp32 logprobs.

    found = of_vllm(llm.generate(prompts, SamplingParams(logprobs=0)))
    print(rl_consistency.compare_logprobs(found.logprobs, training_logprobs))

The outputs are read as data: neither vLLM nor SGLang is imported. A logprob is taken as it was
returned, so the engine has to return those of the distribution that it drew from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_consistency.models.stock import selective_log_softmax


@dataclass(frozen=True, eq=False)
class Sampled:
    """Completions in the order of the outputs, all samples of a prompt one after another."""

    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    """[tokens] fp32 on the CPU for each completion; NaN where the engine gave none."""
    routing: list[Tensor] | None = None
    """[tokens] each, `Completion.routing`; None in a dense model, and of other engines."""

    def add(self, token_ids: Iterable[int], logprobs: Iterable[float | None]) -> None:
        """Another completion."""
        values = [float("nan") if value is None else value for value in logprobs]
        self.token_ids.append(list(token_ids))
        self.logprobs.append(torch.tensor(values, dtype=torch.float32))


def of_vllm(outputs: Iterable[Any]) -> Sampled:
    """What `vllm.LLM.generate` returned: RequestOutputs, or mappings with their fields.

    ValueError if logprobs were not asked for, or the sampled token is not among them.
    """
    found = Sampled()
    for place, request in enumerate(outputs):
        for sample in _field(request, "outputs"):
            where = f"output {place}"
            ids, logprobs = _field(sample, "token_ids"), _field(sample, "logprobs")
            _check_asked(logprobs, where, "SamplingParams(logprobs=0)")
            _check_length(ids, logprobs, where)
            drawn = (_of(token, among, where) for token, among in zip(ids, logprobs, strict=True))
            found.add(ids, [_field(each, "logprob") for each in drawn])
    return found


def of_sglang(outputs: Iterable[Any]) -> Sampled:
    """What SGLang's `Engine.generate` or `/generate` returned: one mapping, or a list of them.

    ValueError if logprobs were not asked for, or are of other tokens than `output_ids`.
    """
    found = Sampled()
    for place, output in enumerate([outputs] if isinstance(outputs, Mapping) else outputs):
        where = f"output {place}"
        triples = output["meta_info"].get("output_token_logprobs")
        _check_asked(triples, where, "return_logprob=True")
        ids = [token for _, token, *_ in triples]
        if ids != list(output.get("output_ids", ids)):
            raise ValueError(f"{where} has logprobs of other tokens than its output_ids.")
        found.add(ids, [logprob for logprob, *_ in triples])
    return found


def of_generate(output: Any, eos_token_id: int | Collection[int]) -> Sampled:
    """What Hugging Face's `generate` returned for a decoder, up to each row's first eos.

    ValueError if scores were not asked for, or it searched with beams.
    """
    scores: Any = getattr(output, "scores", None)
    _check_asked(scores, "generate", "return_dict_in_generate=True, output_scores=True")
    if getattr(output, "beam_indices", None) is not None:
        raise ValueError("generate searched with beams, whose scores are sums; set num_beams=1.")
    eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    drawn = output.sequences[:, output.sequences.shape[1] - len(scores) :]
    columns = [
        selective_log_softmax(step, token)
        for step, token in zip(scores, drawn.unbind(1), strict=True)
    ]
    found = Sampled()
    for ids, values in zip(drawn.tolist(), torch.stack(columns, 1).tolist(), strict=True):
        end = next((place for place, token in enumerate(ids, 1) if token in eos), len(ids))
        found.add(ids[:end], values[:end])
    return found


def of_trl_backend(
    token_ids: list[list[int]],
    logprobs: list[list[list[float | None]]] | None,
    candidates: list[list[list[int]]] | None,
) -> Sampled:
    """What TRL's `VLLMGeneration.generate` returned after the prompts.

    For each token it holds the logprobs of `candidates`, the most likely first. The sampled token
    is one of them. A server that sends no candidates sends the sampled token alone.
    """
    _check_asked(logprobs, "vllm_generation.generate", "vllm_generation.logprobs = 0")
    assert logprobs is not None
    found = Sampled()
    for place, (ids, values) in enumerate(zip(token_ids, logprobs, strict=True)):
        where = f"completion {place}"
        _check_length(ids, values, where)
        names = [[token] for token in ids] if candidates is None else candidates[place]
        if list(map(len, values)) != list(map(len, names)):
            raise ValueError(
                f"{where} has logprobs of tokens that the backend does not name; set "
                "vllm_generation.logprobs = 0."
            )
        rows = (dict(zip(among, row)) for among, row in zip(names, values, strict=True))
        found.add(ids, [_of(token, row, where) for token, row in zip(ids, rows, strict=True)])
    return found


def _field(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def _of(token: int, candidates: Mapping[int, Any], where: str) -> Any:
    if token not in candidates:
        raise ValueError(f"{where} has no logprob of token {token}, which it sampled.")
    return candidates[token]


def _check_asked(logprobs: object, where: str, option: str) -> None:
    if logprobs is None:
        raise ValueError(f"{where} has no logprobs; ask for them by {option}.")


def _check_length(ids: Sequence[int], logprobs: Sequence[Any], where: str) -> None:
    if len(ids) != len(logprobs):
        raise ValueError(f"{where} has {len(ids)} tokens and {len(logprobs)} logprobs.")
