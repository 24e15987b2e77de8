"""A reward model: a sequence classifier that scores a prompt with its completion."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from rl_consistency.numerics.files import file_digest
from rl_consistency.trainers.data.tokenizer import load_tokenizer
from rl_consistency.trainers.hub import PATTERNS, model_directory
from rl_consistency.trainers.policy import read_config, read_model
from rl_consistency.trainers.policy_files import PolicyError

Text = str | Sequence[dict[str, Any]]
"""A text or a list of messages."""


class RewardModel:
    """Called as TRL calls a reward function; one score a completion.

    Each completion is a forward pass of its own, without padding, in the dtype of the files, by
    transformers' stock ops, in evaluation mode. So its score is the same alone, in any batch and on
    any number of processes of one machine. It is no promise of bits across devices and versions.
    """

    def __init__(self, source: Path | str, device: str) -> None:
        self._directory, _ = model_directory(source)
        directory = self._directory
        self.tokenizer: Any = load_tokenizer(directory)
        dtype = getattr(read_config(directory), "dtype", None) or torch.float32
        self.model: Any = read_model(directory, dtype, AutoModelForSequenceClassification)
        if (labels := self.model.config.num_labels) != 1:
            raise PolicyError(f"{source} has {labels} labels: a reward model has num_labels 1")
        self.model.requires_grad_(False).eval()
        self._device, self._source = torch.device(device), source

    @property
    def digest(self) -> str:
        """SHA-256 of its files, by name and content."""
        files = {file for pattern in PATTERNS for file in self._directory.glob(pattern)}
        contents = [[file.name, file_digest(file)] for file in sorted(files)]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **_: Any
    ) -> list[float]:
        """The scores; ValueError where a text is too long for the model."""
        self.model.to(self._device)  # here: rewards are computed by one process alone
        return [self._score(*pair) for pair in zip(prompts, completions, strict=True)]

    def _score(self, prompt: Text, completion: Text) -> float:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(f"{prompt}{completion}")
        else:
            ids = self._of_chat([*prompt, *completion])
        longest = getattr(self.model.config, "max_position_embeddings", None) or len(ids)
        if len(ids) > longest:
            problem = f"prompt and completion have {len(ids)} tokens, more than the {longest}"
            raise ValueError(f"{problem} that the reward model {self._source} reads")
        inputs = torch.tensor([ids], device=self._device)
        return self.model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits.item()

    def _of_chat(self, messages: Sequence[Any]) -> list[int]:
        if self.tokenizer.chat_template is None:
            remedy = "set data.chat_template to false, or save one with its tokenizer"
            raise ValueError(f"the reward model {self._source} has no chat template: {remedy}")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)
