"""Strings that end a sample, found in its text while the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for the first bytes of a character whose others are still to come."""


class Detokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = ...) -> str: ...


class StopStrings:
    """Tells at which token the text of a sample first holds one of the strings.

    The text is that of the generated tokens, special tokens included. It is decoded a few tokens at
    a time: those last read stand before the new ones, because a decoder may write a token in
    another way at the beginning of a text.

    Args:
        tokenizer: decodes token ids.
        strings: at least one, none empty.
    """

    def __init__(self, tokenizer: Detokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(map(len, strings)) - 1
        self._token_ids: list[int] = []  # those last read, then those whose text is open
        self._num_read = 0
        self._tail = ""  # end of the text read: a string may begin in it

    def append(self, token_id: int) -> bool:
        """Take in the next token; True if it completes a string."""
        self._token_ids.append(token_id)
        before = len(self._text(self._token_ids[: self._num_read]))
        text = self._text(self._token_ids)
        is_open = text.endswith(_INCOMPLETE)
        window = self._tail + text[before:].rstrip(_INCOMPLETE)
        if any(string in window for string in self._strings):
            return True
        if not is_open:
            self._token_ids = self._token_ids[self._num_read :]
            self._num_read = len(self._token_ids)
            self._tail = window[len(window) - min(self._overlap, len(window)) :]
        return False

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
