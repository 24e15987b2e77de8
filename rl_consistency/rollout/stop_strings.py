"""At which token the text of a sample first holds a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

LONGEST_READ = 16  # about the most tokens decoded again with a new one

_INCOMPLETE, _LONGEST_INCOMPLETE = "\N{REPLACEMENT CHARACTER}", 3
"""A decoder writes it for each byte, three at most, of a character whose last bytes are to come."""


class Detokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = ...) -> str: ...


class StopStrings:
    """Tells at which token the text of a sample first holds one of the strings.

    The text is that of the generated tokens, special tokens included. Each new token is decoded
    behind a few read before, because a decoder may write a token in another way at the beginning of
    a text. The text of `context`, tokens before the first, is not searched.
    """

    def __init__(
        self, tokenizer: Detokenizer, strings: Sequence[str], context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(map(len, strings)) - 1
        self._tail = ""  # end of the text read: a string may begin in it
        self._token_ids = list(context)
        self._num_read = len(self._text()) if context else 0  # characters of their text
        self._num_closed = len(context)  # of these tokens, those whose text is complete

    def append(self, token_id: int) -> bool:
        """Take in the next token; True if it completes a string."""
        self._token_ids.append(token_id)
        text = self._text()
        num_open = min(len(text) - len(text.rstrip(_INCOMPLETE)), _LONGEST_INCOMPLETE)
        num_known = len(text) - num_open
        window = self._tail + text[self._num_read : num_known]
        if any(string in window for string in self._strings):
            return True
        self._tail = window[len(window) - min(self._overlap, len(window)) :]
        self._num_read = max(self._num_read, num_known)
        # Bytes that more than three tokens have not completed will never be a character.
        if num_open == 0 or len(self._token_ids) - self._num_closed > _LONGEST_INCOMPLETE:
            self._close(num_open)
        return False

    def _close(self, num_open: int) -> None:
        """Forget the tokens before those read last, once there are many."""
        if len(self._token_ids) >= LONGEST_READ:
            self._token_ids = self._token_ids[self._num_closed :]
            self._num_read = max(len(self._text()) - num_open, 0)
        self._num_closed = len(self._token_ids)

    def _text(self) -> str:
        # A copy, which the tokenizer may change.
        text = self._tokenizer.decode(list(self._token_ids), skip_special_tokens=False)
        if not isinstance(text, str):
            name = type(self._tokenizer).__name__
            raise TypeError(f"{name}.decode() gave {text!r}; stop strings need a tokenizer of text")
        return text
