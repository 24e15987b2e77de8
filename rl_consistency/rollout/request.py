"""Requests: every check on the way in, and which of them are unfinished."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypedDict, Unpack

import numpy as np

from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.drafter import Drafter, Speculator
from rl_consistency.rollout.sampling_params import SamplingParams, check_integer
from rl_consistency.rollout.seeds import Seeds
from rl_consistency.rollout.sequence import RolloutSequence
from rl_consistency.rollout.stop_strings import Detokenizer, StopStrings
from rl_consistency.rollout.tokenizer import encode_text

Prompts = str | Sequence[str | Sequence[int]]
"""Token ids of each prompt, or its text, which needs a tokenizer; a string alone is one prompt."""


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


class Requests:
    """The requests of an engine: makes their sequences, and keeps the unfinished ones and the
    completions that are not handed out yet."""

    def __init__(
        self,
        config: Any,
        eos_token_id: int | Sequence[int] | None,
        blocks: BlockManager,
        drafter: Drafter,
        tokenizer: Detokenizer | None,
        seed: int,
    ) -> None:
        for name, given, method in (
            ("drafter", drafter, "start"),
            ("tokenizer", tokenizer, "decode"),
        ):
            if given is not None and not callable(getattr(given, method, None)):
                raise TypeError(f"{name} is {given!r}, which has no {method}()")
        self._vocab_size, self._context = config.vocab_size, config.max_position_embeddings
        eos = [] if eos_token_id is None else np.atleast_1d(eos_token_id).tolist()
        last = self._vocab_size - 1
        self._eos = frozenset(check_integer("each eos_token_id", token, 0, last) for token in eos)
        self._blocks, self._drafter, self._tokenizer = blocks, drafter, tokenizer
        self.seeds = Seeds(seed)
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
        self._ended.append(Completion.of(sequence, self._tokenizer))
        self.num_finished += 1

    def take_completions(self) -> list[Completion]:
        """Hand out what has ended."""
        ended, self._ended = self._ended, []
        return ended

    def sequences(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams],
        **options: Unpack[RequestOptions],
    ) -> list[RolloutSequence]:
        """New sequences by (prompt index, sample index); ValueError for what cannot be served."""
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sized) or isinstance(prompts, Mapping):
            kind = type(prompts).__name__
            raise ValueError(f"prompts must be a list of texts or of token ids; got a {kind}")
        if unknown := options.keys() - RequestOptions.__annotations__.keys():
            allowed = ", ".join(RequestOptions.__annotations__)
            raise TypeError(f"requests have no {', '.join(sorted(unknown))}; they have {allowed}")
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        if not isinstance(params, Sequence):
            wanted = "a SamplingParams or a sequence of them, one for each prompt"
            raise ValueError(f"sampling must be {wanted}; got {sampling!r}")
        if (names := options.get("request_ids")) is None:
            taken, made_up = self.unfinished(), map("request-{}".format, self._numbers)
            free = (name for name in made_up if name not in taken)
            names = list(itertools.islice(free, len(prompts)))
        elif isinstance(names, str):
            raise ValueError(f"request_ids must be a list of strings, got {names!r}")
        if (ids := options.get("prompt_ids")) is None:
            ids = range(len(prompts))
        elif not isinstance(ids, Iterable):
            raise ValueError(f"prompt_ids must be a list of integers, got {ids!r}")
        ids = [check_integer(f"prompt_ids[{i}]", each, 0, 2**64 - 1) for i, each in enumerate(ids)]
        given = {"sampling": params, "prompt_ids": ids, "request_ids": names}
        for name, values in given.items():
            if len(values) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts but {len(values)} {name}; one for each")
        for index, asked in enumerate(params):
            if not isinstance(asked, SamplingParams):
                raise ValueError(f"sampling[{index}] must be a SamplingParams, got {asked!r}")
        kept = self.seeds.resolved(params)  # copies, whatever becomes of the caller's
        self._check_names(names, kept, ids)
        requests = zip(itertools.count(), prompts, kept, ids, names, strict=False)
        return [sequence for request in requests for sequence in self._samples(*request)]

    def _check_names(
        self, names: Sequence[str], params: Sequence[SamplingParams], ids: Sequence[int]
    ) -> None:
        """ValueError for an id that is taken or no string, and for random numbers in use."""
        seen = self.unfinished()
        samples = (live[0] for live in self.live.values() if live[0].params.temperature > 0)
        used = {(s.params.seed, s.prompt_id): "a request that is not finished" for s in samples}
        for index, (name, asked, prompt_id) in enumerate(zip(names, params, ids, strict=True)):
            if not isinstance(name, str):
                raise ValueError(f"request ids must be strings, got {name!r}")
            if name in seen:
                raise ValueError(
                    f"request id {name!r} is given twice, or belongs to a request that is not "
                    "finished; give each its own"
                )
            seen.add(name)
            if asked.temperature == 0:
                continue  # it uses no random number
            if other := used.get((asked.seed, prompt_id)):
                raise ValueError(
                    f"prompt {index} has the prompt id {prompt_id} and seed {asked.seed} of "
                    f"{other}, so both would use the same random numbers; give each its own prompt "
                    "id or seed, or ask for n samples of one prompt"
                )
            used[asked.seed, prompt_id] = f"prompt {index}"

    def _samples(
        self,
        index: int,
        prompt: str | Sequence[int],
        params: SamplingParams,
        prompt_id: int,
        name: str,
    ) -> Iterator[RolloutSequence]:
        if isinstance(prompt, str):
            prompt = encode_text(self._tokenizer, prompt)
        tokens = self._checked_prompt(index, prompt, params.max_tokens)
        if (highest := max(params.stop_token_ids, default=0)) >= self._vocab_size:
            raise ValueError(
                f"prompt {index} has the stop token id {highest}, outside the model's vocabulary "
                f"of {self._vocab_size}"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError(
                f"prompt {index} has stop strings {params.stop}, which need the text of the "
                "tokens: give the RolloutEngine a tokenizer, or use stop_token_ids"
            )
        eos = frozenset() if params.ignore_eos else self._eos
        for sample_index in range(params.n):
            stop_strings = speculator = None
            if params.stop and self._tokenizer is not None:
                stop_strings = StopStrings(self._tokenizer, params.stop, tokens[-1:])
            if params.speculation:
                speculator = Speculator(self._drafter, params.speculation, self._vocab_size)
            yield RolloutSequence(
                prompt_index=index,
                sample_index=sample_index,
                prompt_id=prompt_id,
                params=params,
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                token_ids=tokens,
                request_id=name,
                stop_strings=stop_strings,
                speculator=speculator,
            )

    def _checked_prompt(self, index: int, prompt: Sequence[int], max_tokens: int) -> list[int]:
        kind = type(prompt).__name__
        no_list = f"prompt {index} must be a text or a list of integer token ids; got a {kind}"
        try:
            tokens = np.asarray(prompt)
        except ValueError as error:  # lists of differing lengths within it
            raise ValueError(no_list) from error
        if tokens.size == 0:
            raise ValueError(f"prompt {index} is empty; give it at least one token, such as bos")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(no_list)
        outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {index} has token id {outside[0]}, outside the model's vocabulary of "
                f"{self._vocab_size}; is the tokenizer this model's?"
            )
        asked = f"prompt {index}: {len(tokens)} prompt tokens and max_tokens={max_tokens}"
        if len(tokens) + max_tokens > self._context:
            raise ValueError(
                f"{asked} exceed the model's context of {self._context} tokens; shorten the "
                "prompt or lower max_tokens"
            )
        blocks = self._blocks
        if (needed := blocks.blocks_for(len(tokens) + max_tokens - 1)) > blocks.num_blocks:
            raise ValueError(
                f"{asked} need {needed} KV blocks of {blocks.block_size} tokens and the cache has "
                f"{blocks.num_blocks}; set num_kv_blocks to at least {needed}, or lower max_tokens"
            )
        return tokens.tolist()
