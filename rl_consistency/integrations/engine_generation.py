"""The rollout engine in the place of TRL's generation backend."""

from __future__ import annotations

from typing import Any

from torch import nn

from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

_STEP, _CALL, _EVALUATION = 1 << 40, 1 << 30, 1 << 63


class EngineGeneration:
    """What TRL keeps as `trainer.vllm_generation`: `generate` and `sync_weights`.

    A completion is keyed by the seed, the optimizer step and the place of its prompt in the global
    batch, so that it does not depend on the number of processes.
    """

    def __init__(
        self,
        trainer: Any,
        policy: nn.Module,
        sampling: SamplingParams,
        drift: RolloutDrift,
        options: dict[str, Any],
    ) -> None:
        self._trainer, self._policy, self._sampling = trainer, policy, sampling
        self._drift, self._options = drift, options
        self._engine: RolloutEngine | None = None
        self._last_call = (-1, -1)

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
        if self._trainer.model is not self._policy:
            raise ValueError(
                "trainer.model is another model than at attach(); do not swap it in a callback, "
                "or detach() first and attach() again."
            )
        if self._engine is None:  # after what the trainer wraps around the model
            eos = getattr(self._trainer, "eos_token_ids", None)
            eos = self._trainer.processing_class.eos_token_id if eos is None else eos
            self._engine = RolloutEngine(self._policy, eos_token_id=eos, **self._options)
        completions = self._engine.generate(
            prompts, self._sampling, prompt_ids=self._prompt_ids(len(prompts))
        )
        self._drift.sampled(prompts, completions)
        tokens = [completion.token_ids for completion in completions]
        logprobs = [[[value] for value in c.token_logprobs.tolist()] for c in completions]
        return prompts, tokens, logprobs, None

    def _prompt_ids(self, count: int) -> list[int]:
        trainer, args = self._trainer, self._trainer.args
        step, call = trainer.state.global_step, 0
        if step == self._last_call[0]:
            call = self._last_call[1] + 1
        self._last_call = (step, call)
        processes = trainer.accelerator.num_processes
        width, base = args.generation_batch_size // processes, 0
        if not self._policy.training:
            width, base = max(width, args.per_device_eval_batch_size), _EVALUATION
        first = base + step * _STEP + call * _CALL + trainer.accelerator.process_index * width
        return list(range(first, first + count))
