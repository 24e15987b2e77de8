"""A stop string is found at the token that completes it, however text is cut into tokens."""

import random

import pytest

from rl_consistency.rollout.stop_strings import LONGEST_READ, StopStrings
from rl_consistency.trainers.data.tokenizer import byte_tokenizer


class Bytes:
    """One token per byte; bytes that are no text come out as replacement characters."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return bytes(token_ids).decode(errors="replace")


class LeadingSpace:
    """Words behind spaces, the first of a text without one, as in a sentencepiece model."""

    WORDS = ("stop", "here", "now", "s", "top")

    def decode(self, token_ids, *, skip_special_tokens=False):
        return " ".join(self.WORDS[token_id] for token_id in token_ids)


class Metaspace:
    """Pieces with the space written before them; that of the first is dropped, as by T5's."""

    PIECES = (" END", "a", " b", " ")

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(self.PIECES[token_id] for token_id in token_ids).removeprefix(" ")


def end_of(tokenizer, strings, token_ids, context=()):
    """Tokens read when a string was found."""
    finder = StopStrings(tokenizer, strings, context)
    for count, token_id in enumerate(token_ids, start=1):
        if finder.append(token_id):
            return count
    return None


def test_a_space_that_belongs_between_two_tokens_is_seen():
    assert end_of(LeadingSpace(), ["stop here"], [2, 0, 1]) == 3
    assert end_of(LeadingSpace(), ["stop"], [3, 4]) is None  # "s top"
    assert end_of(LeadingSpace(), [" now"], [2, 2]) == 2


@pytest.mark.parametrize("last", range(len(Metaspace.PIECES)))
def test_the_space_before_the_first_token_is_seen_behind_the_prompt(last):
    assert end_of(Metaspace(), [" END"], [0], [last]) == 1
    assert end_of(Metaspace(), [" END"], [1, 0], [last]) == 2
    assert end_of(Metaspace(), [" b"], [1, 2], [last]) == 2
    assert end_of(Metaspace(), ["a", "b "], [2, 0], [last]) == 2


def test_the_text_of_the_prompt_is_not_searched():
    assert end_of(Bytes(), ["ab", "b"], list(b"bxab"), list(b"a")) == 1
    assert end_of(Bytes(), ["ab"], list(b"bxab"), list(b"a")) == 4


def test_a_string_before_an_unfinished_character_is_found_at_once():
    class Chunks:
        def decode(self, token_ids, *, skip_special_tokens=False):
            pieces = (b"EN", b"D\xf0\x9f", b"\x99\x82")
            return b"".join(pieces[t] for t in token_ids).decode(errors="replace")

    assert end_of(Chunks(), ["END"], [0, 1, 2]) == 2


def test_special_tokens_are_text_too():
    tokenizer = byte_tokenizer()
    assert end_of(tokenizer, ["<|eos|>"], [72, 105, tokenizer.eos_token_id]) == 3


@pytest.mark.parametrize("alphabet", ["ab", "ä🙂x"])
def test_strings_are_found_where_the_whole_text_first_holds_one(alphabet):
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        text = "".join(rng.choice(alphabet) for _ in range(30))
        strings = ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 6))) for _ in "12"]
        tokens = list(text.encode())
        holds = (
            count
            for count in range(1, len(tokens) + 1)
            if any(s in Bytes().decode(tokens[:count]) for s in strings)
        )
        first = next(holds, None)
        assert end_of(Bytes(), strings, tokens) == first
        found += first is not None
    assert found > 100


def test_no_more_is_kept_than_a_string_can_begin_in():
    finder = StopStrings(Bytes(), ["abcd", "xy"])
    for token_id in b"abc" * 50:
        finder.append(token_id)
    assert len(finder._tail) == 3 and len(finder._token_ids) <= 2 * LONGEST_READ


class Counting(Bytes):
    """Counts what it decodes."""

    calls = tokens = 0

    def decode(self, token_ids, *, skip_special_tokens=False):
        self.calls += 1
        self.tokens += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("pattern", [b"abc", b"\xff", "🙂".encode(), b"\xf0\x9f"])
def test_a_token_is_decoded_about_once(pattern):
    tokenizer, text = Counting(), (pattern * 1000)[:1000]
    assert end_of(tokenizer, ["zz"], list(text)) is None
    assert tokenizer.calls < 1.2 * len(text) and tokenizer.tokens < 20 * len(text)


def test_bytes_that_are_no_text_hide_nothing():
    rng = random.Random(2)
    found = 0
    for _ in range(2000):
        pool = list("a€🙂é".encode() + b"\xff\x80aab")
        text = "".join(rng.choice("aé€🙂b") for _ in range(8)).encode()
        tokens = [rng.choice(pool) for _ in range(30)] + list(text)
        strings = [rng.choice(["é", "€a", "🙂🙂", "ab", "bé", "aaa"])]
        holds = (n for n in range(1, 1 + len(tokens)) if strings[0] in Bytes().decode(tokens[:n]))
        first = next(holds, None)
        assert end_of(Bytes(), strings, tokens) == first
        found += first is not None
    assert found > 500
