"""The critic: a copy of the policy's decoder with one output, the value of the text so far.

The value of a token is read at the row that predicts it, so it knows the tokens before it only.
The decoder is a patched copy of the policy's, and the head is the canonical `linear` with one row:
values and gradients have the same bytes under every grouping, packing and padding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.distributed.world import World
from rl_consistency.kernels.gradient_fold.gradient_buffer import GradientBuffer
from rl_consistency.kernels.reduction.weights_digest import weights_digest
from rl_consistency.models.decoder import guarded_backward
from rl_consistency.models.modules import CanonicalLinear
from rl_consistency.models.packing import Layout, lay_out
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.scored_rows import packed, scored_hidden_states, scored_tokens
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.run_directory.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_weights,
)
from rl_consistency.trainers.strategies.build import build_strategy
from rl_consistency.trainers.strategies.strategy import Strategy, trained_parameters

HEAD_SCALE = 0.1
"""Standard deviation of the first values, where hidden states have unit size."""


class ValueHead(CanonicalLinear, nn.Linear):
    """One output in fp32, through the canonical `linear`."""

    weight: nn.Parameter

    def __init__(self, size: int, *, seed: int):
        super().__init__(size, 1, bias=False)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.weight, std=HEAD_SCALE / math.sqrt(size), generator=generator)
        self._gradient_buffers = {"weight": GradientBuffer(self.weight)}


class CriticModel(nn.Module):
    """A copy of a policy that is not patched yet, with a value head instead of its LM head."""

    def __init__(self, policy: Any, *, seed: int):
        super().__init__()
        self.policy = copy.deepcopy(policy)
        self.policy.config.tie_word_embeddings = False
        # `patch` wants the LM head of the config: one row of zeros stands for all.
        rows = torch.zeros_like(policy.lm_head.weight[:1]).expand_as(policy.lm_head.weight)
        self.policy.lm_head.weight = nn.Parameter(rows, requires_grad=False)
        self.head = ValueHead(policy.config.hidden_size, seed=seed).to(policy.device)

    def values(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        layout: Layout = "packed",
    ) -> list[Tensor]:
        """Values of the completion tokens of each sequence, fp32, differentiable.

        ValueError if the copy is not patched, or a length does not fit.
        """
        inputs, mask = lay_out(sequences, layout, self.policy.device)
        batch, lens = packed(self.policy, inputs, mask)
        scored = scored_tokens(inputs, lens, prompt_lengths, None, mask)
        # The head's gradient is a fold over all rows, which can be cut between any two sequences.
        hidden, rows = scored_hidden_states(self.policy, batch, scored)
        values = guarded_backward(self.head(hidden.float())[:, 0])
        return list(values[rows.kept].split([int(tokens.sum()) for tokens in scored]))


class Critic:
    """The critic of a run, with its optimizer and its part of a checkpoint."""

    ranks: Strategy
    optimizer: PolicyOptimizer

    def __init__(self, config: RunConfig, policy: Any, stack: ExitStack):
        """Make a critic from a policy that is not patched; `stack` undoes the critic's patch."""
        self._config, self._stack = config, stack
        self.model = CriticModel(policy, seed=config.run.seed)
        stack.enter_context(patch(self.model.policy, **config.training.patch))

    @property
    def digest(self) -> str:
        """SHA-256 of the critic's weights, computed where they lie."""
        return weights_digest(trained_parameters(self.model).items())

    def load(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint's critic's weights; CheckpointError, and none taken, on a misfit."""
        if checkpoint.critic is None or checkpoint.critic_optimizer is None:
            raise CheckpointError(f"{checkpoint.path} holds no critic: it is not of a run of ppo.")
        load_weights(trained_parameters(self.model), checkpoint.critic)

    def assemble(self, policy: Any, world: World, checkpoint: Checkpoint | None) -> None:
        """Make strategy and optimizer, as in a checkpoint whose weights are loaded by now; without
        one, the decoder is first the policy's."""
        config = self._config
        if checkpoint is None:
            own = dict(self.model.policy.model.named_parameters())
            with torch.no_grad():
                for name, parameter in policy.model.named_parameters():
                    own[name].copy_(parameter)
        ppo, section = config.algorithm.of_ppo, config.optimizer
        rate = (ppo and ppo.critic_learning_rate) or section.learning_rate
        ends = {"min_lr": None, "min_lr_ratio": section.ends_at}
        section = section.model_copy(update={"learning_rate": rate, **ends})
        self.ranks = build_strategy(config, world, self.model)
        self._stack.callback(self.ranks.close)
        steps = config.optimizer_steps
        self.optimizer = PolicyOptimizer(self.ranks, section, total_steps=steps)
        if checkpoint is not None and checkpoint.critic_optimizer is not None:
            self.optimizer.load(checkpoint.critic_optimizer, checkpoint.extra["critic_schedule"])

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of a checkpoint, as `save_checkpoint` takes them."""
        return {
            "critic": dict(trained_parameters(self.model)),
            "critic_optimizer": self.optimizer.tensors(),
        }
