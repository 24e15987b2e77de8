"""On-policy consistency for RL on language models: rollout and training compute the same bits."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "UnsupportedModelError": "rl_consistency.models.families",
    "CollectiveError": "rl_consistency.distributed.world",
    "ConfigError": "rl_consistency.trainers.config.recipe",
    "PolicyError": "rl_consistency.trainers.policy_files",
    "TokenizerError": "rl_consistency.trainers.data.tokenizer",
    "DataError": "rl_consistency.trainers.data.examples",
    "RewardError": "rl_consistency.trainers.reward_functions",
    "GradientNormError": "rl_consistency.trainers.optimizer",
    "CheckpointError": "rl_consistency.trainers.run_directory.checkpoint",
    "RunDirectoryError": "rl_consistency.trainers.run_directory.manifest",
    "ConsistencyError": "rl_consistency.numerics.errors",
    "fingerprint": "rl_consistency.numerics.fingerprint",
    "strict": "rl_consistency.numerics.strict",
    "patch": "rl_consistency.models.patch",
    "token_logprobs": "rl_consistency.models.scoring.token_logprobs",
    "whole_weights": "rl_consistency.models.whole_weights",
    "Completion": "rl_consistency.rollout.completion",
    "FailedRequestsError": "rl_consistency.rollout.failures",
    "RolloutEngine": "rl_consistency.rollout.engine",
    "RolloutStatistics": "rl_consistency.rollout.scheduler",
    "model_digest": "rl_consistency.rollout.weights",
    "progress_bar": "rl_consistency.rollout.progress",
    "SamplingParams": "rl_consistency.rollout.sampling_params",
    "compare_logprobs": "rl_consistency.parity.drift",
    "schedule_audit": "rl_consistency.kernels.matmul.audit",
    "check_gradients": "rl_consistency.parity.gradients",
    "attach": "rl_consistency.integrations.attach",
    "localize": "rl_consistency.parity.localize",
    "train": "rl_consistency.trainers.training_run",
    "tune": "rl_consistency.tuning.tune",
}

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "Completion",
    "ConfigError",
    "ConsistencyError",
    "DataError",
    "FailedRequestsError",
    "GradientNormError",
    "PolicyError",
    "RewardError",
    "RolloutEngine",
    "RolloutStatistics",
    "RunDirectoryError",
    "SamplingParams",
    "TokenizerError",
    "UnsupportedModelError",
    "__version__",
    "attach",
    "check_gradients",
    "compare_logprobs",
    "fingerprint",
    "localize",
    "model_digest",
    "patch",
    "progress_bar",
    "schedule_audit",
    "strict",
    "token_logprobs",
    "train",
    "tune",
    "whole_weights",
]

if TYPE_CHECKING:
    from rl_consistency.distributed.world import CollectiveError
    from rl_consistency.integrations.attach import attach
    from rl_consistency.kernels.matmul.audit import schedule_audit
    from rl_consistency.models.families import UnsupportedModelError
    from rl_consistency.models.patch import patch
    from rl_consistency.models.scoring.token_logprobs import token_logprobs
    from rl_consistency.models.whole_weights import whole_weights
    from rl_consistency.numerics.errors import ConsistencyError
    from rl_consistency.numerics.fingerprint import fingerprint
    from rl_consistency.numerics.strict import strict
    from rl_consistency.parity.drift import compare_logprobs
    from rl_consistency.parity.gradients import check_gradients
    from rl_consistency.parity.localize import localize
    from rl_consistency.rollout.completion import Completion
    from rl_consistency.rollout.engine import RolloutEngine
    from rl_consistency.rollout.failures import FailedRequestsError
    from rl_consistency.rollout.progress import progress_bar
    from rl_consistency.rollout.sampling_params import SamplingParams
    from rl_consistency.rollout.scheduler import RolloutStatistics
    from rl_consistency.rollout.weights import model_digest
    from rl_consistency.trainers.config.recipe import ConfigError
    from rl_consistency.trainers.data.examples import DataError
    from rl_consistency.trainers.data.tokenizer import TokenizerError
    from rl_consistency.trainers.optimizer import GradientNormError
    from rl_consistency.trainers.policy_files import PolicyError
    from rl_consistency.trainers.reward_functions import RewardError
    from rl_consistency.trainers.run_directory.checkpoint import CheckpointError
    from rl_consistency.trainers.run_directory.manifest import RunDirectoryError
    from rl_consistency.trainers.training_run import train
    from rl_consistency.tuning.tune import tune


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rl_consistency' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
