"""The stock path of scoring: torch's log_softmax over logits in the model dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.kernels.token_logprobs.op import IGNORED, lm_head_logits


def stock_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: SamplingRows
) -> tuple[Tensor, Tensor]:
    """Logits in the model dtype and torch's log_softmax: what an unpatched trainer computes."""
    logits = F.linear(hidden, weight).float()
    if rows.truncates:
        support = distribution(lm_head_logits(hidden, weight).detach(), rows).scaled
        logits = logits.masked_fill(support == -torch.inf, -torch.inf)
    temperature = rows.temperature.masked_fill(rows.temperature == 0, 1.0).unsqueeze(1)
    logprobs = (logits / temperature).log_softmax(dim=1)
    safe = targets.masked_fill(targets == IGNORED, 0)
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(dim=1)
    return logprobs.gather(1, safe.unsqueeze(1)).squeeze(1), entropy
