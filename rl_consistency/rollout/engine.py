"""The rollout engine: prompts in, completions with their behaviour logprobs out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, Unpack

import torch

from rl_consistency.models.patch import patched_session
from rl_consistency.models.sharding import has_shards, unwrapped
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.rollout.block_manager import BlockManager
from rl_consistency.rollout.completion import Completion
from rl_consistency.rollout.device.model_runner import ModelRunner, PendingStep
from rl_consistency.rollout.device.rollout_kernels import RolloutKernels
from rl_consistency.rollout.drafter import Drafter, PromptLookupDrafter
from rl_consistency.rollout.failures import FailedRequestsError
from rl_consistency.rollout.progress import RolloutProgress
from rl_consistency.rollout.request import Prompts, RequestOptions, Requests
from rl_consistency.rollout.sampling_params import SamplingParams, check_integer
from rl_consistency.rollout.scheduler import RolloutStatistics, Scheduler
from rl_consistency.rollout.sequence import RolloutSequence
from rl_consistency.rollout.stop_strings import Detokenizer
from rl_consistency.rollout.tokenizer import Message, encode_chats, ending_ids
from rl_consistency.rollout.weights import WeightsWatch


class StepLoop:
    """Serves the sequences of one rollout, step by step."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        blocks: BlockManager,
        look: Callable[[Callable[[], bool] | None], None] = lambda is_busy: None,
    ) -> None:
        self._runner, self._scheduler, self._blocks = runner, scheduler, blocks
        self._look = look  # at the model, while the device is busy
        self._in_flight: PendingStep | None = None
        self._has_begun = self._is_abandoned = False
        self._started = perf_counter()
        self.statistics, self.add = scheduler.statistics, scheduler.add

    @property
    def has_unfinished(self) -> bool:
        """Whether a step is left to launch or to take in."""
        left = self._scheduler.has_unfinished or self._in_flight is not None
        return left and not self._is_abandoned

    def cancel(self, sequence: RolloutSequence) -> None:
        """End an unfinished sequence; its blocks are free at once."""
        sequence.finish("cancelled")
        self._scheduler.finish(sequence)

    def step(self) -> list[RolloutSequence]:
        """Launch the next step, then take in the one before; returns the sequences that ended."""
        self._has_begun, began = True, perf_counter()
        ended = self._take_in() if self._scheduler.prefers_report else []
        launched = self._launch()
        try:
            awaited = self._in_flight or launched
            self._look(None if awaited is None else awaited.is_busy)
            ended += self._take_in()
        finally:
            self._in_flight = launched
        if not self._scheduler.has_unfinished:  # the step in flight ran once too often
            ended += self._take_in()
        now = perf_counter()
        self.statistics.seconds = now - self._started
        self.statistics.host_seconds += now - began
        return ended

    def _launch(self) -> PendingStep | None:
        chunks = self._scheduler.schedule()
        if not chunks:
            assert self._in_flight is not None or not self._scheduler.has_unfinished
            return None
        for sequence in self._scheduler.admitted:
            self._runner.admit(sequence)
        launched = self._runner.launch(chunks)
        # Not before the launch succeeded: no block may be shared that no step writes.
        self._scheduler.mark_launched(chunks)
        self.statistics.replayed_prefills += launched.replayed_prefill
        return launched

    def _take_in(self) -> list[RolloutSequence]:
        """Wait for the step in flight, if any; returns the sequences that it ended."""
        if self._in_flight is None:
            return []
        in_flight, self._in_flight = self._in_flight, None
        before = perf_counter()
        sampled, now = in_flight.wait(), perf_counter()
        self.statistics.host_seconds -= now - before
        return self._scheduler.take_in(in_flight.chunks, sampled)

    def forget(self) -> None:
        """Drop all cached keys, unless no step began; no sequence may hold any."""
        if self._has_begun:
            self._blocks.reset()

    def abandon(self) -> None:
        """Take all blocks back and wait for the step in flight, in any state of the loop."""
        self._is_abandoned = True
        self.forget()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.wait()


class RolloutEngine:
    """Generates with a patched model whose weights it shares with the trainer, in place.

    A completion depends on the weights, its prompt, its sampling params, and (seed, prompt id,
    sample index), and on nothing else: not on other prompts, not on any argument of this class.
    Keys and values of finished samples stay in the cache while the weights stay. `fingerprint`
    holds the orders, versions and device of the rollout side, for training to compare.

    Threads may share an engine: `generate` waits for the `generate` of another, and each other call
    for a step under way. A `stream` or prompts of `submit` that are not finished are refused.

    Args:
        model: a causal language model under a live `rl_consistency.patch`, or a wrapper around it.
            Where ranks keep shards of the parameters, all of them build the engine and generate
            together; the other calls need `whole_weights(model)` around all of a rollout.
        eos_token_id: token or tokens that end a sample, or None; "tokenizer" takes the tokenizer's
            and those of the model's generation config, as TRL and vLLM do.
        kv_block_size: tokens per KV cache block.
        num_kv_blocks: blocks in the cache; None: see `KVCache.allocate`.
        max_batch_tokens: most tokens computed in one step. In small steps a GPU waits for the host;
            large ones take more memory, and running sequences wait longer for their next token.
        max_num_seqs: most sequences running at a time; more wait.
        prefill_chunk_size: most prompt tokens of one sequence in one step; None: no such limit.
        enable_prefix_sharing: share the blocks of equal prefixes.
        tokens_per_sequence: longest sequence to expect; sizes the default cache, limits nothing.
        cuda_graphs: decode and prefill through CUDA graphs on a GPU.
        drafter: proposes tokens to samples with `speculation`; None looks them up in the sample.
        tokenizer: the model's, for prompts as text, `chat`, `Completion.text` and stop strings.
        seed: of the seeds that calls draw whose `SamplingParams` have none, see `Seeds`.
        quiet: show nothing on standard error while kernels compile for more than a moment.

    A setting out of range, and a model that is not patched, are ValueErrors.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_id: int | Sequence[int] | Literal["tokenizer"] | None = "tokenizer",
        kv_block_size: int = 16,
        num_kv_blocks: int | None = None,
        max_batch_tokens: int = 16384,
        max_num_seqs: int = 256,
        prefill_chunk_size: int | None = None,
        enable_prefix_sharing: bool = True,
        tokens_per_sequence: int | None = None,
        cuda_graphs: bool = True,
        drafter: Drafter | None = None,
        tokenizer: Detokenizer | None = None,
        seed: int = 0,
        quiet: bool = False,
    ) -> None:
        self._limits = {
            "max_batch_tokens": max_batch_tokens,
            "max_num_seqs": max_num_seqs,
            "prefill_chunk_size": prefill_chunk_size,
        }
        sizes = {
            "kv_block_size": kv_block_size,
            "num_kv_blocks": num_kv_blocks,
            "tokens_per_sequence": tokens_per_sequence,
        }
        for name, limit in (self._limits | sizes).items():
            if limit is not None:
                check_integer(name, limit, 1)
        patched_session(model)
        if torch.is_inference_mode_enabled():
            raise ValueError("build the RolloutEngine outside torch.inference_mode")
        self._model = model = unwrapped(model)
        eos = ending_ids(model, eos_token_id, tokenizer)
        self.fingerprint = fingerprint(model.device)
        with whole_weights(model):
            self._runner = ModelRunner(
                model,
                block_size=kv_block_size,
                num_blocks=num_kv_blocks,
                max_num_seqs=max_num_seqs,
                tokens_per_sequence=tokens_per_sequence,
                cuda_graphs=cuda_graphs,
            )
        self._blocks = BlockManager(
            self._runner.num_blocks, kv_block_size, share_prefixes=enable_prefix_sharing
        )
        drafter = drafter or PromptLookupDrafter()
        self._requests = Requests(model.config, eos, self._blocks, drafter, tokenizer, seed)
        self._weights = WeightsWatch(model)
        self._kernels = RolloutKernels(
            self._runner,
            model,
            max_batch_tokens,
            max_num_seqs,
            shares=enable_prefix_sharing,
            quiet=quiet,
        )
        self._loop = self._new_loop()
        # Reentrant: a progress callback may submit and cancel.
        self._turn = threading.RLock()  # of one `generate`
        self._lock = threading.RLock()  # of one change of state
        self._tokenizer = tokenizer
        self._is_stepping = False

    @property
    def stats(self) -> RolloutStatistics:
        """Since the engine last began to work: of one `generate` or `stream`."""
        return replace(self._loop.statistics)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to hand out."""
        return self._requests.has_completions or self._loop.has_unfinished

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: RolloutProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Draw `n` completions of every prompt.

        Args:
            prompts: token ids, or texts where the engine has a tokenizer.
            sampling: one for all prompts, or one for each.
            progress: called after each step, or a block that gives such a function, as
                `progress_bar()` does.
            options: `prompt_ids`, `request_ids` and `weights_digest`, see `RequestOptions`.

        Returns the completions in order of (prompt index, sample index). Warns if sampled library
        products were withdrawn since the last rollout: what was drawn may have other bits.

        Raises:
            ValueError: a prompt or setting that cannot be served, or unfinished requests of another
                call; nothing was computed.
            FailedRequestsError: a logprob is not a finite number; it holds all completions.
            ConsistencyError: the weights have another digest than given; or the weights, the ops
                on their stock path or the forward hooks were changed meanwhile.
        """
        with self._turn, whole_weights(self._model):
            stream = self.stream(prompts, sampling, progress=progress, **options)
            wanted = self._requests.num_samples  # a callback may change the caller's lists
            completions = sorted(
                stream, key=lambda completion: (completion.prompt_index, completion.sample_index)
            )
        if len(completions) < wanted:
            raise ValueError(
                f"{wanted - len(completions)} of {wanted} completions went to another caller of "
                "step(), in a callback or thread; leave the steps to generate()."
            )
        if any(completion.error is not None for completion in completions):
            raise FailedRequestsError(completions)
        return completions

    def stream(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: RolloutProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[Completion]:
        """Yield each completion as it ends, failed ones with `finish_reason` "error"; arguments and
        errors are those of `generate`. Prompts submitted meanwhile are finished and yielded too.
        Closing the iterator cancels what is unfinished and drops the prefix cache."""
        if not (progress is None or callable(progress) or hasattr(progress, "__enter__")):
            raise TypeError(
                f"progress must be callable, or a block that gives a call: {progress!r}"
            )
        with self._lock:
            self._require_idle("generate or stream")
            self.submit(prompts, sampling, **options)
            completions = self._run(progress)
            next(completions)  # enters its `try`, so that closing it cancels
        return completions

    def submit(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams],
        **options: Unpack[RequestOptions],
    ) -> list[str]:
        """Queue prompts, to be served by `step`; returns their request ids.

        Arguments and errors are those of `generate`. Indices and default `prompt_ids` count within
        this call: give ids, or another seed, to prompts that join unfinished ones. The weights, the
        `strict` choice, forward hooks and CUDA stream must stay until `has_unfinished` is False.
        """
        with self._lock:
            self._require_between_steps("submit")
            sequences = self._requests.sequences(prompts, sampling, **options)
            digest = options.get("weights_digest")
            if self.has_unfinished:
                self._weights.compare(digest)
            else:
                self._begin(digest, sequences)
            self._requests.seeds.take(sequences, self._weights.digest)
            for sequence in sequences:
                self._requests.add(sequence)
                self._loop.add(sequence)
            return list(dict.fromkeys(sequence.request_id for sequence in sequences))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: RolloutProgress | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """`generate` behind a conversation, or each of several, through the tokenizer's template.

        `chat_template_kwargs` (`tools`, `chat_template`, `enable_thinking`, ...) are passed to
        `apply_chat_template`. `Completion.prompt_token_ids` has what the model read.
        """
        template = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts = encode_chats(self._tokenizer, messages, **template)
        return self.generate(prompts, sampling, progress=progress, **options)

    def state_dict(self) -> dict[str, int]:
        """How far the stream of drawn seeds is; the seeds that follow are a function of it."""
        return self._requests.seeds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the seeds that an engine with this state would; ValueError for another state."""
        self._requests.seeds.load_state_dict(state)

    def cancel(self, request_id: str) -> bool:
        """Cancel what is unfinished of a request; returns whether there was anything.

        Its KV blocks are free at once, and the next `step` returns its completions so far. If no
        request is left the prefix cache is dropped.
        """
        with self._lock:
            self._require_between_steps("cancel")
            sequences = list(self._requests.live.get(request_id, ()))
            for sequence in sequences:
                self._loop.cancel(sequence)
                self._requests.end(sequence)
            if sequences and not self._requests.live:
                self._loop.forget()
            return bool(sequences)

    def step(self) -> list[Completion]:
        """Launch one step and take in the one before; returns what ended.

        After an exception of any kind all requests and the prefix cache are gone, and the engine is
        ready for others. Errors are those of `generate`; another CUDA stream than at the first
        request is a ValueError.
        """
        with self._lock:
            if not self.has_unfinished:
                return []
            self._require_between_steps("step")
            self._is_stepping = True
            try:
                for sequence in self._loop.step():
                    self._requests.end(sequence)
                completions = self._requests.take_completions()
                if self._loop.has_unfinished:
                    self._weights.after_step()
                else:
                    self._weights.after_rollout()
                    self._weights.withdrawals()
                return completions
            except BaseException:
                self._abandon()
                raise
            finally:
                self._is_stepping = False

    def warm_up(
        self,
        sampling: SamplingParams,
        *,
        batch_sizes: Sequence[int] | None = None,
        longest: int | None = None,
    ) -> None:
        """Compile all kernels that rollouts with `sampling` launch, many at a time, and capture the
        CUDA graphs that its decoding replays, if graphs are used.

        Else the first rollout compiles what its own sizes need, and the first step that needs a
        graph captures it, while all samples wait. Compiled kernels stay in Triton's cache on disk.
        A new hook or patch, or a parameter that changes place, drops the graphs.

        Args:
            sampling: whether it restricts the support, its speculation, and whether it draws
                several samples of a prompt, which share keys, decide which graphs.
            batch_sizes: numbers of samples decoding together; None is all up to `max_num_seqs`.
            longest: tokens of the longest sample, for stock attention; None is the most possible.
        """
        with self._lock:
            self._require_idle("warm_up")
            self._runner.begin(self._weights.withdrawals())
            bounds = self._kernels.bounds(sampling, batch_sizes, longest)
            self._kernels.compile(bounds)
            self._kernels.capture(replace(bounds, shares=sampling.n > 1 and bounds.shares))

    def _run(self, progress: RolloutProgress | None) -> Generator[Any]:
        """First None, then the completions of all that is unfinished in this rollout."""
        loop, requests = self._loop, self._requests  # each rollout has its own loop
        block = progress if isinstance(progress, AbstractContextManager) else nullcontext(progress)
        try:
            yield None
            with block as report:
                while self._loop is loop and self.has_unfinished:
                    completions = self.step()
                    if report is not None:
                        tokens = loop.statistics.decode_tokens
                        report(tokens, requests.num_finished, requests.num_samples)
                    yield from completions
                    if completions:
                        self._weights.look_at_all()
        finally:
            with self._lock:
                if self._loop is loop and self.has_unfinished:
                    self._abandon()

    def _begin(self, weights_digest: str | None, sequences: Sequence[RolloutSequence]) -> None:
        """Start work: new counters, and no cached key of other weights."""
        if has_shards(self._model):
            raise ValueError(
                "the model's parameters are shards: enter whole_weights(model) on every rank, "
                "around all of the rollout, or use generate."
            )
        withdrawals, path = self._weights.withdrawals(), self._weights.look()
        self._runner.begin(withdrawals, path)
        self._kernels.compile_for(sequences)
        if self._weights.take_over(weights_digest, withdrawals, path):
            self._blocks.reset()
        self._loop = self._new_loop()
        self._requests.restart()

    def _new_loop(self) -> StepLoop:
        scheduler = Scheduler(self._blocks, **self._limits)
        return StepLoop(self._runner, scheduler, self._blocks, self._weights.in_step)

    def _abandon(self) -> None:
        """Drop all that is unfinished, in whatever state it is; nothing of it is handed out."""
        self._weights.end()
        self._requests.restart()
        self._loop.abandon()

    def _require_between_steps(self, call: str) -> None:
        if self._is_stepping:
            raise ValueError(
                f"{call} was called within a step: by a drafter, a tokenizer, a hook or a signal; "
                "call it between steps, as a progress callback does"
            )

    def _require_idle(self, purpose: str) -> None:
        if self.has_unfinished:
            count = len(self._requests.unfinished())
            raise ValueError(
                f"the engine has {count} unfinished requests; take in their stream or close it, or "
                f"cancel them and step, before the next {purpose}"
            )
