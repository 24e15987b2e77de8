"""Conversations as prompts: the text that a tokenizer's chat template makes of messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rl_consistency.trainers.data.examples import DataError, Example
from rl_consistency.trainers.data.foreign_files import explained


def require_template(tokenizer: Any) -> None:
    """DataError where the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise DataError(
            "data.chat_template is true and the policy's tokenizer has no chat template: set it to "
            "false and write the turns into data.prompt_template, or save the tokenizer with a "
            "chat_template"
        )


def templated(example: Example, tokenizer: Any) -> Example:
    """The example with the text that the model reads: its messages, and the start of an answer.

    A prompt that is text is one message of the user.
    """
    messages = example.messages or ({"role": "user", "content": example.prompt},)
    what = f"{example.place}: the tokenizer's chat template does not take the messages"
    with explained(DataError, what):
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    return replace(example, prompt=text, messages=messages)
