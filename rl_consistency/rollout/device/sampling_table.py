"""How the sequence in each slot is sampled, on the host and on the device, and the draw.

The engine and the sampler inside vLLM draw with this table, so equal numbers give equal tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.rollout.device.random_stream import KEY_WORDS, device_uniforms, stream_keys
from rl_consistency.rollout.sampling_params import SamplingParams, Truncation

LogprobsOf = Callable[[Tensor], Tensor]
"""Of one token id [n] int64 in each row: logprobs [n] fp32."""


class SamplingTable:
    """Sampling parameters and stream keys by slot. The device has what was last loaded."""

    def __init__(self, slots: int, device: torch.device) -> None:
        # On the host: words are the stream key, top_k and whether the logprob is that of the whole
        # softmax; shares are temperature, top_p and min_p.
        self._words = np.zeros((KEY_WORDS + 2, slots), dtype=np.int64)
        self._shares = np.zeros((3, slots), dtype=np.float32)
        self._shares[:2] = 1.0
        self._truncates = np.zeros(slots, dtype=np.int8)  # `Truncation`
        self._device_words = torch.from_numpy(self._words).to(device, copy=True)
        self._device_shares = torch.from_numpy(self._shares).to(device, copy=True)

    def write(self, slot: int, params: SamplingParams, prompt_id: int, sample_index: int) -> None:
        """Enter on the host how a slot's next sequence is sampled, by `params` with a seed."""
        assert params.seed is not None  # `Seeds` has drawn one
        self._words[:KEY_WORDS, slot] = stream_keys([params.seed], [prompt_id], [sample_index])[0]
        self._words[KEY_WORDS:, slot] = params.top_k, params.truncation is Truncation.DRAW
        self._shares[:, slot] = (params.temperature, params.top_p, params.min_p)
        self._truncates[slot] = params.truncation

    def withhold(self, slot: int) -> None:
        """Enter that a slot's next sequence gets token 0 and a NaN logprob each time."""
        self._words[:, slot] = 0
        self._shares[:, slot] = (np.nan, 1.0, 0.0)
        self._truncates[slot] = Truncation.NONE

    def truncates(self, slots: NDArray[Any]) -> Truncation:
        """The most that a row of the slots asks for."""
        return Truncation(self._truncates[slots].max(initial=0))

    def written(self, slots: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """What `load` needs of slots that were written."""
        return {"words": self._words[:, slots], "shares": self._shares[:, slots]}

    def load(self, slots: Tensor, new: Mapping[str, Tensor]) -> None:
        """Queue the copy of `written` slots [n] int64, once it lies on the device."""
        self._device_words.index_copy_(1, slots, new["words"])
        self._device_shares.index_copy_(1, slots, new["shares"])

    def rows(self, slots: Tensor, *, truncates: bool) -> tuple[SamplingRows, Tensor, Tensor]:
        """Sampling parameters of rows [n] by slot, their stream keys [n, 5] int64, and which rows
        [n] bool take their logprob from the whole softmax."""
        words = self._device_words.index_select(1, slots)
        temperature, top_p, min_p = self._device_shares.index_select(1, slots).unbind(0)
        top_k = words[KEY_WORDS]
        rows = SamplingRows(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        # Moves no bit, and one graph then serves all temperatures.
        rows = rows.knowing(truncates=truncates, unit_temperature=False)
        return rows, words[:KEY_WORDS].t(), words[KEY_WORDS + 1] > 0

    def draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, truncates: Truncation
    ) -> tuple[Tensor, LogprobsOf]:
        """Draw the token behind each row of logits [n, V] fp32, of sequences in slots [n] and at
        positions [n] int64. No row asks for more than `truncates`.

        Returns token ids [n] int64 and what gives logprobs; NaN in a row of NaN.
        """
        params, keys, whole = self.rows(slots, truncates=truncates > 0)
        behaviour = distribution(logits, params)
        token_ids = behaviour.draw(device_uniforms(keys, positions + 1))
        if truncates < Truncation.DRAW:
            return token_ids, behaviour.logprobs_of
        plain = SamplingRows.uniform(len(logits), device=logits.device)
        plain.knowing(unit_temperature=False)  # the kernels of other rollouts: no bit
        softmax = distribution(logits, plain)
        return token_ids, lambda ids: torch.where(
            whole, softmax.logprobs_of(ids), behaviour.logprobs_of(ids)
        )
