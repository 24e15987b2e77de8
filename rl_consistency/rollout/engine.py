"""The rollout engine: prompts in, completions with their behaviour logprobs out."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_consistency.kernels.sampling_support import SamplingRows
from rl_consistency.models.packing import from_host
from rl_consistency.models.patch import patched_session
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.model_runner import ModelRunner
from rl_consistency.rollout.random_stream import uniforms
from rl_consistency.rollout.sampler import sample, sampling_rows
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.scheduler import Scheduler
from rl_consistency.rollout.sequence import FinishReason, RolloutSequence

Progress = Callable[[int, int, int], None]
"""Called after each step with (tokens generated, samples finished, samples in all)."""


@dataclass(frozen=True, eq=False)
class Completion:
    """One sample.

    A prompt [7, 8] whose second sample was 3, 5 and then eos (2) gives

        Completion(prompt_index=0, sample_index=1, token_ids=[3, 5, 2],
                   token_logprobs=tensor([-1.2, -0.1, -0.7]), finish_reason="stop")
    """

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    """Generated tokens, the stop token included."""
    token_logprobs: Tensor
    """[len(token_ids)] fp32 on the CPU, under the distribution the tokens were drawn from."""
    finish_reason: FinishReason
    """"stop": an eos or stop token was drawn; "length": `max_tokens` was reached."""


class RolloutEngine:
    """Generates with a patched model whose weights it shares with the trainer, in place.

    A completion depends on the weights, its prompt, its sampling params, and (seed, prompt id,
    sample index); on nothing else: neither on the other prompts nor on any argument of this class.

    Args:
        model: a causal language model under a live `rl_consistency.patch`.
        eos_token_id: token or tokens that end a sample, or None.
        kv_block_size: tokens per KV cache block.
        num_kv_blocks: blocks in the cache; None is explained at `ModelRunner`.
        max_batch_tokens: most tokens computed in one step.
        max_num_seqs: most sequences running at a time.
        prefill_chunk_size: most prompt tokens of one sequence in one step; None is no own limit.
        enable_prefix_sharing: share the blocks of equal prefixes within a `generate`.
        tokens_per_sequence: longest sequence to expect, prompt and completion; sizes the default
            cache and limits nothing.

    Attributes:
        fingerprint: orders, versions and device of the rollout side, for training to compare.

    Raises:
        ValueError: a setting out of range, or a model that is not patched.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_id: int | Sequence[int] | None,
        kv_block_size: int = 16,
        num_kv_blocks: int | None = None,
        max_batch_tokens: int = 2048,
        max_num_seqs: int = 256,
        prefill_chunk_size: int | None = None,
        enable_prefix_sharing: bool = True,
        tokens_per_sequence: int | None = None,
    ) -> None:
        limits = {
            "kv_block_size": kv_block_size,
            "num_kv_blocks": num_kv_blocks,
            "max_batch_tokens": max_batch_tokens,
            "max_num_seqs": max_num_seqs,
            "prefill_chunk_size": prefill_chunk_size,
            "tokens_per_sequence": tokens_per_sequence,
        }
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, got {limit}")
        patched_session(model)
        self._model = model
        self.fingerprint = fingerprint(model.device)
        self._eos_token_ids = _eos_token_ids(eos_token_id, model.config.vocab_size)
        self._runner = ModelRunner(
            model,
            block_size=kv_block_size,
            num_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
            tokens_per_sequence=tokens_per_sequence,
        )
        self._blocks = BlockManager(
            self._runner.num_blocks, kv_block_size, share_prefixes=enable_prefix_sharing
        )
        self._new_scheduler = lambda: Scheduler(
            self._blocks,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            prefill_chunk_size=prefill_chunk_size,
        )
        self._scheduler = self._new_scheduler()
        self._num_steps = 0
        self._rows: tuple[list[SamplingParams], SamplingRows] | None = None

    @property
    def stats(self) -> dict[str, int]:
        """Counters of the last `generate`.

        `prefix_hit_tokens` were found in the cache instead of computed; `prefill_tokens` include
        those computed again after a preemption.
        """
        return {
            "steps": self._num_steps,
            "preemptions": self._scheduler.num_preemptions,
            "prefix_hit_tokens": self._scheduler.num_prefix_hit_tokens,
            "prefill_tokens": self._scheduler.num_prefill_tokens,
            "decode_tokens": self._scheduler.num_decode_tokens,
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        prompt_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Draw `n` completions of every prompt.

        Args:
            prompts: token ids.
            sampling: one for all prompts, or one for each.
            prompt_ids: stable ids, in [0, 2**64), that key the random stream; a prompt keeps its
                samples when it keeps its id. Default: the index in `prompts`.
            progress: called after each step.

        Returns the completions in order of (prompt index, sample index).

        Raises:
            ValueError: before any work, a prompt or setting that cannot be served.
            ConsistencyError: the model gave a logprob that is not a finite number.
        """
        patched_session(self._model)
        self._runner.check_model()
        sequences = self._sequences(prompts, sampling, prompt_ids)
        # The trainer may have changed the weights: nothing cached before may be reused.
        self._blocks.reset()
        self._scheduler = self._new_scheduler()
        self._num_steps = 0
        for sequence in sequences:
            self._scheduler.add(sequence)
        num_tokens = num_finished = 0
        while self._scheduler.has_unfinished:
            sampled = self.step()
            num_tokens += len(sampled)
            num_finished += sum(sequence.is_finished for sequence in sampled)
            if progress is not None:
                progress(num_tokens, num_finished, len(sequences))
        return [_completion(sequence) for sequence in sequences]

    def step(self) -> list[RolloutSequence]:
        """Schedule, run, sample, retire. Returns the sequences that got a token."""
        chunks = self._scheduler.schedule()
        logits = self._runner.logits(chunks)
        self._scheduler.mark_computed(chunks)
        sampled = [chunk.sequence for chunk in chunks if chunk.samples]
        for sequence, token_id, logprob in zip(sampled, *self._sample(sampled, logits)):
            sequence.append(token_id, logprob)
            if sequence.is_finished:
                self._scheduler.finish(sequence)
        self._num_steps += 1
        return sampled

    def _sample(
        self, sequences: Sequence[RolloutSequence], logits: Tensor
    ) -> tuple[list[int], list[float]]:
        """One token and its logprob for each sequence, from its row of logits [n, V]."""
        if not sequences:
            return [], []
        rows = self._sampling_rows([sequence.params for sequence in sequences], logits.device)
        sampled = sample(logits, rows, from_host(_uniforms(sequences), logits.device))
        # The step ends with a wait for the device: ids and fp32 logprobs are exact in fp64.
        drawn, logprobs = torch.stack([t.double() for t in sampled]).tolist()
        for sequence, logprob in zip(sequences, logprobs):
            if not math.isfinite(logprob):
                raise ConsistencyError(
                    f"prompt {sequence.prompt_index}, sample {sequence.sample_index}, position "
                    f"{sequence.num_tokens}: the model gave a logprob that is not finite; look for "
                    "NaN or infinity in its weights (a diverged update, or fp16 overflow)"
                )
        return [int(token_id) for token_id in drawn], logprobs

    def _sampling_rows(self, params: list[SamplingParams], device: torch.device) -> SamplingRows:
        """Those of the last step where the batch has not changed, so nothing is copied again."""
        if self._rows is None or self._rows[0] != params:
            self._rows = (params, sampling_rows(params, device))
        return self._rows[1]

    def _sequences(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        prompt_ids: Sequence[int] | None,
    ) -> list[RolloutSequence]:
        """Check everything, then make the sequences in order of (prompt index, sample index)."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        ids = range(len(prompts)) if prompt_ids is None else prompt_ids
        for name, values in (("sampling", params), ("prompt_ids", ids)):
            if len(values) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts but {len(values)} {name}; one for each")
        _check_streams(ids, params)
        sequences: list[RolloutSequence] = []
        for index, prompt in enumerate(prompts):
            tokens = self._checked_prompt(index, prompt, params[index])
            stop = frozenset(params[index].stop_token_ids)
            if not params[index].ignore_eos:
                stop |= self._eos_token_ids
            sequences += [
                RolloutSequence(
                    prompt_index=index,
                    sample_index=sample_index,
                    prompt_id=ids[index],
                    params=params[index],
                    stop_token_ids=stop,
                    token_ids=tokens,
                )
                for sample_index in range(params[index].n)
            ]
        return sequences

    def _checked_prompt(
        self, index: int, prompt: Sequence[int], params: SamplingParams
    ) -> list[int]:
        tokens = np.asarray(prompt)
        if tokens.size == 0:
            raise ValueError(f"prompt {index} is empty; give it at least one token, such as bos")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"prompt {index} must be a list of integer token ids")
        vocab_size = self._model.config.vocab_size
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {index} has token id {outside[0]}, outside the model's vocabulary of "
                f"{vocab_size}; is the tokenizer this model's?"
            )
        self._check_length(index, len(tokens), params.max_tokens)
        return tokens.tolist()

    def _check_length(self, index: int, num_prompt_tokens: int, max_tokens: int) -> None:
        asked = f"prompt {index}: {num_prompt_tokens} prompt tokens and max_tokens={max_tokens}"
        context = self._model.config.max_position_embeddings
        if num_prompt_tokens + max_tokens > context:
            raise ValueError(
                f"{asked} exceed the model's context of {context} tokens; shorten the prompt or "
                "lower max_tokens"
            )
        needed = self._blocks.blocks_for(num_prompt_tokens + max_tokens - 1)
        if needed > self._blocks.num_blocks:
            raise ValueError(
                f"{asked} need {needed} KV blocks of {self._blocks.block_size} tokens and the "
                f"cache has {self._blocks.num_blocks}; set num_kv_blocks to at least {needed}, or "
                "lower max_tokens"
            )


def _uniforms(sequences: Sequence[RolloutSequence]) -> NDArray[np.float64]:
    """[n]: the random number of each sequence's next position."""
    return uniforms(
        [sequence.params.seed for sequence in sequences],
        [sequence.prompt_id for sequence in sequences],
        [sequence.sample_index for sequence in sequences],
        [sequence.num_tokens for sequence in sequences],
    )


def _check_streams(prompt_ids: Sequence[int], params: Sequence[SamplingParams]) -> None:
    """Each prompt needs a random stream of its own."""
    seen: dict[tuple[int, int], int] = {}
    for index, (prompt_id, asked) in enumerate(zip(prompt_ids, params)):
        if not isinstance(asked, SamplingParams):
            raise ValueError(f"sampling[{index}] must be a SamplingParams, got {asked!r}")
        if (
            isinstance(prompt_id, bool)
            or not isinstance(prompt_id, int)
            or not (0 <= prompt_id < 2**64)
        ):
            raise ValueError(
                f"prompt_ids[{index}] must be an integer in [0, 2**64), got {prompt_id!r}"
            )
        first = seen.setdefault((asked.seed, prompt_id), index)
        if first != index:
            raise ValueError(
                f"prompts {first} and {index} share prompt id {prompt_id} and seed {asked.seed}, "
                "so their samples would use the same random numbers; give each its own id or seed, "
                "or ask for n samples of one prompt"
            )


def _eos_token_ids(eos_token_id: int | Sequence[int] | None, vocab_size: int) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    values = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    token_ids = frozenset(operator.index(value) for value in values)
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"eos_token_id {token_id} is outside the model's vocabulary of {vocab_size}"
            )
    return token_ids


def _completion(sequence: RolloutSequence) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(
        prompt_index=sequence.prompt_index,
        sample_index=sequence.sample_index,
        token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
        token_logprobs=torch.tensor(sequence.token_logprobs, dtype=torch.float32),
        finish_reason=sequence.finish_reason,
    )
