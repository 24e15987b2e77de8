"""Requests: every check on the way in, and which of them are unfinished."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.drafter import Drafter, Speculator
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.sequence import Detokenizer, RolloutSequence, StopStrings


class RequestOptions(TypedDict, total=False):
    """What `generate`, `stream` and `submit` take beside prompts and sampling params."""

    prompt_ids: Sequence[int] | None
    """Stable ids, in [0, 2**64), that key the random stream; a prompt keeps its samples when it
    keeps its id. Default: the index in `prompts`."""
    request_ids: Sequence[str] | None
    """Names for `cancel` and for error messages, different from those of unfinished requests.
    Default: made up."""
    weights_digest: str | None
    """`model_digest` of the weights as the trainer left them, to compare."""


@dataclass(frozen=True, kw_only=True)
class RequestFactory:
    """Makes the sequences of requests: what these have to fit, and what samples need."""

    vocab_size: int
    context_length: int  # most tokens of a sequence, prompt and completion
    eos_token_ids: frozenset[int]
    blocks: BlockManager
    drafter: Drafter
    tokenizer: Detokenizer | None

    def __post_init__(self) -> None:
        for name, method in (("drafter", "start"), ("tokenizer", "decode")):
            given = getattr(self, name)
            if given is not None and not callable(getattr(given, method, None)):
                raise TypeError(f"{name} is {given!r}, which has no {method}()")

    def sequences(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        prompt_ids: Sequence[int] | None,
        request_ids: Sequence[str],
    ) -> list[RolloutSequence]:
        """The sequences by (prompt index, sample index); ValueError for what cannot be served."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        if not isinstance(params, Sequence):
            wanted = "a SamplingParams or a sequence of them, one for each prompt"
            raise ValueError(f"sampling must be {wanted}; got {sampling!r}")
        if isinstance(request_ids, str):
            raise ValueError(f"request_ids must be a list of strings, got {request_ids!r}")
        if prompt_ids is not None and not isinstance(prompt_ids, Iterable):
            raise ValueError(f"prompt_ids must be a list of integers, got {prompt_ids!r}")
        ids = (
            range(len(prompts))
            if prompt_ids is None
            else list(map(_prompt_id, itertools.count(), prompt_ids))
        )
        given = {"sampling": params, "prompt_ids": ids, "request_ids": request_ids}
        for name, values in given.items():
            if len(values) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts but {len(values)} {name}; one for each")
        for index, asked in enumerate(params):
            if not isinstance(asked, SamplingParams):
                raise ValueError(f"sampling[{index}] must be a SamplingParams, got {asked!r}")
        requests = zip(itertools.count(), prompts, params, ids, request_ids, strict=False)
        return [sequence for request in requests for sequence in self._samples(*request)]

    def _samples(
        self, index: int, prompt: Sequence[int], params: SamplingParams, prompt_id: int, name: str
    ) -> Iterator[RolloutSequence]:
        tokens = self._checked_prompt(index, prompt, params.max_tokens)
        if (highest := max(params.stop_token_ids, default=0)) >= self.vocab_size:
            raise ValueError(
                f"prompt {index} has the stop token id {highest}, outside the model's vocabulary "
                f"of {self.vocab_size}"
            )
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        for sample_index in range(params.n):
            yield RolloutSequence(
                prompt_index=index,
                sample_index=sample_index,
                prompt_id=prompt_id,
                params=params,
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                token_ids=tokens,
                request_id=name,
                stop_strings=self._stop_strings(index, params.stop, tokens[-1:]),
                speculator=self._speculator(params.speculation),
            )

    def _speculator(self, most: int) -> Speculator | None:
        return Speculator(self.drafter, most, self.vocab_size) if most else None

    def _stop_strings(
        self, index: int, stop: tuple[str, ...], context: Sequence[int]
    ) -> StopStrings | None:
        if not stop:
            return None
        if self.tokenizer is None:
            raise ValueError(
                f"prompt {index} has stop strings {stop}, which need the text of the tokens: give "
                "the RolloutEngine a tokenizer, or use stop_token_ids"
            )
        return StopStrings(self.tokenizer, stop, context)

    def _checked_prompt(self, index: int, prompt: Sequence[int], max_tokens: int) -> list[int]:
        no_list = f"prompt {index} must be a list of integer token ids"
        try:
            tokens = np.asarray(prompt)
        except ValueError as error:  # lists of differing lengths within it
            raise ValueError(no_list) from error
        if tokens.size == 0:
            raise ValueError(f"prompt {index} is empty; give it at least one token, such as bos")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(no_list)
        outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {index} has token id {outside[0]}, outside the model's vocabulary of "
                f"{self.vocab_size}; is the tokenizer this model's?"
            )
        asked = f"prompt {index}: {len(tokens)} prompt tokens and max_tokens={max_tokens}"
        if len(tokens) + max_tokens > self.context_length:
            raise ValueError(
                f"{asked} exceed the model's context of {self.context_length} tokens; shorten the "
                "prompt or lower max_tokens"
            )
        needed = self.blocks.blocks_for(len(tokens) + max_tokens - 1)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"{asked} need {needed} KV blocks of {self.blocks.block_size} tokens and the "
                f"cache has {self.blocks.num_blocks}; set num_kv_blocks to at least {needed}, or "
                "lower max_tokens"
            )
        return tokens.tolist()


def eos_token_ids(eos_token_id: int | Sequence[int] | None, vocab_size: int) -> frozenset[int]:
    """The ids that end a sample; ValueError for one outside the vocabulary, or no integer."""
    values = [] if eos_token_id is None else eos_token_id
    try:
        token_ids = frozenset(map(_integer, np.atleast_1d(values)))
    except TypeError as error:
        raise ValueError(
            f"eos_token_id must be a token id, a sequence of them or None, got {eos_token_id!r}"
        ) from error
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise ValueError(f"eos_token_id {outside[0]} is outside the vocabulary of {vocab_size}")
    return token_ids


def _integer(value: object) -> int:
    """An integer of any kind but bool as int; TypeError otherwise."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a bool is not an integer here")
    return operator.index(value)  # type: ignore[arg-type]


def _prompt_id(index: int, value: object) -> int:
    with suppress(TypeError):
        if 0 <= (prompt_id := _integer(value)) < 2**64:
            return prompt_id
    raise ValueError(f"prompt_ids[{index}] must be an integer in [0, 2**64), got {value!r}")


class OpenRequests:
    """The unfinished requests, and the completions that are not handed out yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count()  # of the ids made up
        self.restart()

    def restart(self) -> None:
        """Forget all requests and completions, and count samples from 0."""
        self.live: dict[str, list[RolloutSequence]] = {}
        """The unfinished samples of each request."""
        self._ended: list[Completion] = []
        self.num_samples = self.num_finished = 0

    @property
    def has_completions(self) -> bool:
        return bool(self._ended)

    def unfinished(self) -> set[str]:
        """Ids of requests with samples that are not handed out."""
        return {*self.live, *(completion.request_id for completion in self._ended)}

    def made_up_ids(self, count: int) -> list[str]:
        """Ids that no unfinished request has."""
        taken = self.unfinished()
        names = (f"request-{number}" for number in self._numbers)
        return list(itertools.islice((name for name in names if name not in taken), count))

    def check(self, request_ids: Sequence[str], sequences: Sequence[RolloutSequence]) -> None:
        """ValueError for an id that is taken or no string, and for random numbers in use."""
        seen = self.unfinished()
        for request_id in request_ids:
            if not isinstance(request_id, str):
                raise ValueError(f"request ids must be strings, got {request_id!r}")
            if request_id in seen:
                raise ValueError(
                    f"request id {request_id!r} is given twice, or belongs to a request that is "
                    "not finished; give each its own"
                )
            seen.add(request_id)
        samples = (live[0] for live in self.live.values())
        used = {(s.params.seed, s.prompt_id): "a request that is not finished" for s in samples}
        for sequence in sequences:
            seed, prompt_id = sequence.params.seed, sequence.prompt_id
            name = f"prompt {sequence.prompt_index}"
            if (other := used.setdefault((seed, prompt_id), name)) != name:
                raise ValueError(
                    f"{name} has the prompt id {prompt_id} and seed {seed} of {other}, so both "
                    "would use the same random numbers; give each its own prompt id or seed, or "
                    "ask for n samples of one prompt"
                )

    def add(self, sequence: RolloutSequence) -> None:
        """Count a sample in."""
        self.live.setdefault(sequence.request_id, []).append(sequence)
        self.num_samples += 1

    def end(self, sequence: RolloutSequence) -> None:
        """Make the completion of a sample that ended."""
        live = self.live[sequence.request_id]
        live.remove(sequence)
        if not live:
            del self.live[sequence.request_id]
        self._ended.append(Completion.of(sequence))
        self.num_finished += 1

    def take_completions(self) -> list[Completion]:
        """Hand out what has ended."""
        ended, self._ended = self._ended, []
        return ended
