"""Generation in a trainer of TRL: by the rollout engine, or by its own, which is only watched."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from rl_consistency.integrations.refusals import check_same_model
from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.integrations.sampled import Sampled, of_generate, of_trl_backend
from rl_consistency.models.scoring.token_logprobs import LabelLogprobs
from rl_consistency.models.sharding import is_sharded
from rl_consistency.rollout.completion import routing_of
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

MAX_NUM_SEQS = 256
"""Most sequences that run at a time, as by default in `RolloutEngine`."""
_STEP, _CALL, _EVALUATION = 1 << 40, 1 << 30, 1 << 63


@dataclass(eq=False)
class EngineGeneration(TrainerCallback):
    """What TRL keeps as `trainer.vllm_generation`: `generate` and `sync_weights`.

    A completion of training is keyed by the seed, the optimizer step and the place of its prompt in
    the global batch. So it depends neither on the number of processes nor on evaluations.
    """

    trainer: Any
    policy: Any
    sampling: SamplingParams
    drift: RolloutDrift
    options: dict[str, Any]
    _engine: RolloutEngine | None = None
    _room: tuple[int, int] = (0, 0)  # most sequences of a batch, and tokens of one
    _options: dict[str, Any] = field(default_factory=dict)  # of the engine
    _last_calls: dict[bool, tuple[int, int]] = field(default_factory=dict)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Forget the calls of a training that was broken off."""
        self._last_calls.clear()

    def sync_weights(self) -> None:
        """Nothing to do: the engine reads the trainer's weights in place."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """One completion of every prompt, which TRL has repeated `num_generations` times.

        Returns prompts, completions, a list of one logprob for each token, and None.
        """
        if images is not None:
            raise ValueError("images are not covered by rl_consistency.attach; leave them out.")
        check_same_model(self.trainer, self.policy)
        longest, limits = max(map(len, prompts)), self._limits(prompts)
        context, most = self.policy.config.max_position_embeddings, self.sampling.max_tokens
        if limits is self.sampling and longest + most > context:
            raise ValueError(
                f"a prompt of {longest} tokens and max_completion_length={most} exceed the model's "
                f"context of {context} tokens; shorten the prompts or lower max_completion_length"
            )
        engine, ids = self._engine_for(prompts), self._prompt_ids(len(prompts))
        completions = engine.generate(prompts, limits, prompt_ids=ids)
        tokens = [completion.token_ids for completion in completions]
        logprobs = [completion.token_logprobs for completion in completions]
        self.drift.sampled(prompts, Sampled(tokens, logprobs, routing_of(completions)))
        return prompts, tokens, [[[value] for value in row.tolist()] for row in logprobs], None

    def _engine_for(self, prompts: list[list[int]]) -> RolloutEngine:
        """The engine, with a cache for this batch: a larger one than all before gets a new engine.

        TRL knows no longest prompt, so the lengths of prompts are rounded up to powers of two."""
        longest = max(map(len, prompts))
        tokens = (1 << (longest - 1).bit_length()) + self.sampling.max_tokens
        wanted = [(len(prompts), min(tokens, self.policy.config.max_position_embeddings))]
        if is_sharded(self.policy):  # whose engines all processes build together
            wanted = gather_object(wanted)
        sequences, lengths = zip(self._room, *wanted)
        self._room = max(sequences), max(lengths)
        sizes: dict[str, Any] = {"max_num_seqs": min(self._room[0], MAX_NUM_SEQS)}
        if "num_kv_blocks" not in self.options:
            sizes["tokens_per_sequence"] = self._room[1]
        options = sizes | self.options
        if self._engine is None or options != self._options:  # first after what wraps the model
            self._engine, self._options = None, options  # no two caches at a time
            eos = getattr(self.trainer, "eos_token_ids", None)
            eos = self.trainer.processing_class.eos_token_id if eos is None else eos
            self._engine = RolloutEngine(
                self.policy,
                eos_token_id=eos,
                # With one it decodes all completions.
                tokenizer=self.trainer.processing_class if self.sampling.stop else None,
                **options,
            )
        return self._engine

    def _limits(self, prompts: list[list[int]]) -> SamplingParams | list[SamplingParams]:
        """A turn after a tool's answer ends with the context: its prompt has grown, and TRL leaves
        it to the backend, since it cuts the whole completion later."""
        if not getattr(self.trainer, "tools", None):
            return self.sampling
        context, most = self.policy.config.max_position_embeddings, self.sampling.max_tokens
        rooms = [min(most, context - len(prompt)) for prompt in prompts]
        return [replace(self.sampling, max_tokens=max(1, room)) for room in rooms]

    def _prompt_ids(self, count: int) -> list[int]:
        """Numbers of training's prompts, or of an evaluation's, which count their own calls."""
        trainer, args = self.trainer, self.trainer.args
        step, call, trains = trainer.state.global_step, 0, self.policy.training
        last_step, last_call = self._last_calls.get(trains, (-1, -1))
        if step == last_step:
            call = last_call + 1
        self._last_calls[trains] = (step, call)
        processes = trainer.accelerator.num_processes
        width, base = args.generation_batch_size // processes, 0
        if not trains:
            width, base = max(width, args.per_device_eval_batch_size), _EVALUATION
        first = base + step * _STEP + call * _CALL + trainer.accelerator.process_index * width
        return list(range(first, first + count))


def watched_generate(generate: Any, drift: RolloutDrift, eos_token_ids: list[int]) -> Any:
    """Hugging Face's `generate`, which also hands its logprobs to the drift.

    Scores of all tokens are kept until it returns: [tokens, vocabulary] fp32 for each sample.
    """

    @functools.wraps(generate)
    def watched(**arguments: Any) -> Tensor:
        found = generate(**arguments, return_dict_in_generate=True, output_scores=True)
        ids, mask = arguments["input_ids"], arguments["attention_mask"].bool()
        prompts = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        drift.sampled(prompts, of_generate(found, eos_token_ids))
        return found.sequences

    return watched


def watched_backend(generate: Any, drift: RolloutDrift) -> Any:
    """TRL's `VLLMGeneration.generate`, which also hands its logprobs to the drift."""

    @functools.wraps(generate)
    def watched(prompts: list[list[int]], *args: Any, **arguments: Any) -> Any:
        found = generate(prompts, *args, **arguments)
        drift.sampled(prompts, of_trl_backend(*found[1:]))
        return found

    return watched


def watched_forward(forward: Any, drift: RolloutDrift) -> Any:
    """TRL's forward with a fused LM head, which also hands what it scored to the drift."""

    @functools.wraps(forward)
    def watched(*args: Any, **arguments: Any) -> Any:
        output = forward(*args, **arguments)
        if arguments.get("fused_lm_head") and torch.is_grad_enabled():
            logprobs = output.log_probs.float()
            scores = LabelLogprobs(logprobs, output.entropy, output.label_mask, most_likely=None)
            drift.observe(arguments["input_ids"], arguments["attention_mask"].bool(), scores)
        return output

    return watched
