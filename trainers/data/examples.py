"""Examples, of rows or generated (arithmetic), and the order they are visited in.

Reading drops nothing: a row that cannot be used is an error that names file and line. Which
examples a step sees is a function of (seed, step), so a resumed run needs only the step index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, count, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from rl_consistency.trainers.data.foreign_files import parse_json_object

OverlongPrompts = Literal["error", "drop", "truncate"]
LONGEST_LINE = 2**24
"""Bytes of a line of JSONL."""


class DataError(ValueError):
    """Data that cannot be trained on; the message names the place and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One problem, such as Example(id=0, prompt="3+5+2=", answer="10", target="8,10").

    Two lines of a file with the same text are two examples: identity is the id, not the text.
    """

    id: int
    """Place in its data set, from 0."""
    prompt: str
    """The text given to the model, template applied."""
    answer: str
    """What reward functions compare with."""
    target: str
    """The completion that the warm start imitates, without the end token."""
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further fields, handed to reward functions by name."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The conversation that `prompt` is the chat template's text of, if there is one."""
    number: int | float | None = None
    """The answer where the row has it as a number, which `answer` is the decimal text of."""
    source: str | None = None
    """Where it was read, such as "train.jsonl, line 3"."""

    @property
    def place(self) -> str:
        """Where it stands, for error messages."""
        return self.source or f"example {self.id}"


def keyed_integer(*key: int | str) -> int:
    """A uniform 64-bit integer that is a fixed function of `key`, on every machine and version."""
    text = "\x1f".join(map(repr, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""The rows of a data set, each with its place."""


def examples_of(
    rows: Rows,
    *,
    prompt_field: str = "question",
    answer_field: str | None = "answer",
    prompt_template: str = "{prompt}",
    conversations: bool = False,
    first_id: int = 0,
) -> list[Example]:
    """The examples of some rows, in their order.

    With `conversations` a prompt may be a list of messages, each with a role and a content. Such an
    example has no text yet. Without `answer_field` answer and target are "".

    Fields other than the two become `extra`. Raises DataError on a row that lacks a usable prompt
    or answer: text that is not blank, or a number, whose decimal text is taken.
    """
    examples = []
    for index, (place, record) in enumerate(rows, start=first_id):
        messages = None
        if isinstance(given := _field(record, prompt_field), list):
            messages = _messages(given, f"{place}: {prompt_field!r}")
            if not conversations or prompt_template != "{prompt}":
                remedy = "set data.chat_template to true, and leave out data.prompt_template"
                raise DataError(f"{place}: {prompt_field!r} is a list of messages: {remedy}")
        text = "" if messages else _text(record, prompt_field, place)
        answer = _text(record, answer_field, place) if answer_field else ""
        prompt = prompt_template.replace("{prompt}", text)
        rest = {k: v for k, v in record.items() if k not in (prompt_field, answer_field)}
        texts = {"prompt": prompt, "answer": answer, "target": answer, "messages": messages}
        value = _field(record, answer_field) if answer_field else ""
        number = None if isinstance(value, str) else value
        extra = MappingProxyType(rest)
        examples.append(Example(id=index, **texts, extra=extra, number=number, source=place))
    return examples


def jsonl_rows(path: Path, limit: int | None = None) -> Rows:
    """The objects of the first `limit` lines of a file of JSON lines.

    Raises DataError on what is no file or an empty one, and on a line that is blank, longer than 16
    MiB, or no JSON object (see `parse_json`).
    """
    place = ""
    for index, line in enumerate(islice(_lines(path), limit)):
        place = f"{path}, line {index + 1}"
        if not line.strip():
            raise DataError(f"{place}: blank; remove the line")
        try:
            yield place, parse_json_object(line)
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
    if not place:
        raise DataError(f"{path} is empty: it needs one JSON object per line")


def _lines(path: Path) -> Iterator[bytes]:
    with regular_file(path) as stream:
        for number in count(1):
            if not (line := stream.readline(LONGEST_LINE + 1)):
                return
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path}, line {number}: longer than {LONGEST_LINE >> 20} MiB")
            yield line.rstrip(b"\r\n")


@contextmanager
def regular_file(path: Path) -> Iterator[BinaryIO]:
    """A data file, open; DataError where it cannot be read, in the block too."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"cannot read the data file {path}: it is no regular file")
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(f"cannot read the data file {path}: {error.strerror or error}") from error


_ABSENT = object()


def _field(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of one in an object by its dotted name; `_ABSENT` if it has none."""
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    inner = record.get(first)
    return _field(inner, rest) if dot and isinstance(inner, Mapping) else _ABSENT


def _text(record: Mapping[str, Any], name: str, place: str) -> str:
    value = _field(record, name)
    if value is _ABSENT:
        given = ", ".join(map(repr, record)) or "none"
        remedy = "name the fields with data.prompt_field and data.answer_field"
        remedy += " (null: there are no answers)"
        raise DataError(f"{place}: no field {name!r}; the line has {given}: {remedy}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{place}: {name!r} must be text, got {type(value).__name__}")
    if not value.strip():
        raise DataError(f"{place}: {name!r} is blank")
    return value


def _messages(given: Sequence[Any], place: str) -> Sequence[Mapping[str, Any]]:
    """The messages of a conversation; DataError on what is none that a model can answer."""
    for number, message in enumerate(given):
        found = message if isinstance(message, dict) else {}
        if not all(isinstance(found.get(key), str) for key in ("role", "content")):
            needed = "must be an object with a role and a content that are text"
            raise DataError(f"{place}: message {number} {needed} (images are not covered)")
    if not given or given[-1]["role"] == "assistant":
        raise DataError(f"{place} must end with a message to answer: of the user, say")
    return tuple(given)


def encode_prompt(
    example: Example,
    encode: Callable[[str], Sequence[int]],
    *,
    max_prompt_tokens: int,
    max_tokens: int,
    context_length: int,
    overlong: OverlongPrompts = "error",
    leading: Sequence[int] = (),
) -> tuple[list[int] | None, bool]:
    """The token ids of the prompt of `example`, and whether it is longer than the limits allow.

    It begins with the tokens `leading`, whether its text does or not. It may have
    `max_prompt_tokens` and has to leave `max_tokens` of the model's `context_length`. A longer one
    keeps `leading` and its last tokens with `overlong` truncate, and is None with drop.

    DataError, naming the example and the lengths, if the prompt has no token or, with error, too
    many.
    """
    leading, token_ids = list(leading), list(encode(example.prompt))
    if not token_ids:
        raise DataError(f"{example.place}: its prompt has no token")
    if token_ids[: len(leading)] == leading:
        del token_ids[: len(leading)]
    length = len(leading) + len(token_ids)
    remedy = "take the example out of the data, or set data.overlong_prompts to drop or truncate"
    longest = min(max_prompt_tokens, context_length - max_tokens)
    if overlong != "error" and len(leading) < longest < length:
        kept = [*leading, *token_ids[len(leading) - longest :]]
        return (kept if overlong == "truncate" else None), True
    found = f"{example.place}: its prompt has {length} tokens"
    if length > max_prompt_tokens:
        limit = f"data.max_prompt_tokens is {max_prompt_tokens}: raise it"
        raise DataError(f"{found}, {limit}, {remedy}")
    if length + max_tokens > context_length:
        found += f", with {max_tokens} of the completion {length + max_tokens}"
        limit = f"the model's context is {context_length}: lower rollout.sampling.max_tokens"
        raise DataError(f"{found}; {limit}, {remedy}")
    return [*leading, *token_ids], False


Split = Literal["train", "eval"]
EVAL_SHARE = 8
"""One sum in this many belongs to evaluation."""


def problem(
    seed: int,
    split: Split,
    index: int,
    *,
    num_terms: int,
    max_value: int,
    incomplete_targets: float = 0.0,
    spaces: bool = False,
) -> Example:
    """Problem `index` of `split`: `num_terms` (at least 2) terms from 1 to `max_value`, such as
    prompt "3+5+2+8=", target "8,10,18", answer "18"; with `spaces` prompt "3 + 5 + 2 + 8 =". A pure
    function of (seed, split, index).

    With probability `incomplete_targets` the target stops before its last running total. A policy
    that imitates such targets does so too; reinforcement learning, which rewards the final sum,
    corrects that. Training and evaluation never share a sum: see `split_of`.
    """
    for attempt in count():
        terms = [
            1 + keyed_integer(seed, "arithmetic", split, index, attempt, place) % max_value
            for place in range(num_terms)
        ]
        prompt = "+".join(map(str, terms)) + "="
        if split_of(prompt) == split:
            break
    totals = list(accumulate(terms))[1:]
    drawn = keyed_integer(seed, "arithmetic target", split, index)
    incomplete = (drawn >> 11) < incomplete_targets * 2.0**53
    shown = totals[: 1 + drawn % (len(totals) - 1)] if incomplete and len(totals) > 1 else totals
    target = ",".join(map(str, shown))
    if spaces:
        prompt = " + ".join(map(str, terms)) + " ="
    return Example(id=index, prompt=prompt, answer=str(totals[-1]), target=target)


def problems(seed: int, split: Split, size: int, **sizes: Any) -> list[Example]:
    """The first `size` problems of `split`; see `problem`."""
    return [problem(seed, split, index, **sizes) for index in range(size)]


def split_of(prompt: str) -> Split:
    """The split that the sum with this text belongs to, whatever the seed."""
    return "eval" if keyed_integer("arithmetic split", prompt) % EVAL_SHARE == 0 else "train"


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> Sequence[int]:
    """A permutation of range(size), a pure function of its arguments; not to be changed."""
    return sorted(range(size), key=lambda i: (keyed_integer(seed, "order", epoch, i), i))


Parts = tuple[tuple[int, float], ...]
"""Number of examples and weight of each source of a mix, in the order of their examples."""


def mix_counts(parts: Parts) -> list[int]:
    """Draws of each source in an epoch, which has as many as there are examples: shares by weight,
    rounded by largest remainder."""
    size, whole = sum(count for count, _ in parts), sum(Fraction(w) for _, w in parts)
    shares = [size * Fraction(weight) / whole for _, weight in parts]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(parts)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_rest[: size - sum(counts)]:
        counts[i] += 1
    return counts


@lru_cache(maxsize=4)
def mixed_order(seed: int, epoch: int, parts: Parts, shuffle: bool) -> Sequence[int]:
    """The examples of an epoch of a mix, a pure function of its arguments; not to be changed.

    A source goes on where its last epoch ended: it visits all of its examples, in an order of its
    own, before one a second time. Without `shuffle` its examples keep their order and are spread
    evenly.
    """
    counts = mix_counts(parts)
    slots = sorted(
        (keyed_integer(seed, "mix", epoch, part, i) if shuffle else (i + 0.5) / draws, part)
        for part, draws in enumerate(counts)
        for i in range(draws)
    )
    visits = [epoch * draws for draws in counts]
    orders: dict[tuple[int, int], Sequence[int]] = {}
    firsts = [0, *accumulate(size for size, _ in parts)]
    chosen = []
    for _, part in slots:
        lap, place = divmod(visits[part], parts[part][0])
        visits[part] += 1
        if shuffle:
            if (part, lap) not in orders:
                own = keyed_integer(seed, "source", part)
                orders[part, lap] = epoch_order(own, lap, parts[part][0])
            place = orders[part, lap][place]
        chosen.append(firsts[part] + place)
    return chosen


@dataclass(frozen=True)
class DataOrder:
    """Which examples a step sees: draw number n is entry n mod size of epoch n // size.

    Step s takes batch_size draws from s * batch_size on. Every epoch visits every example once, of
    a mix as often as weights say, and a batch may span two epochs. A draw number never repeats, so
    it identifies a prompt in a random stream that must differ from epoch to epoch; the example's id
    would not.
    """

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    """False visits every epoch in the order of the data."""
    parts: Parts = ()
    """The sources of a mix, `size` examples together; () for examples without weights."""

    def draws(self, step: int) -> range:
        """The draw numbers of `step`, counted from 0."""
        return range(step * self.batch_size, (step + 1) * self.batch_size)

    def batch(self, step: int) -> list[int]:
        """The indices of the examples of `step`, in the order of its draws."""
        return [self._order(n // self.size)[n % self.size] for n in self.draws(step)]

    def _order(self, epoch: int) -> Sequence[int]:
        if self.parts:
            return mixed_order(self.seed, epoch, self.parts, self.shuffle)
        return epoch_order(self.seed, epoch, self.size) if self.shuffle else range(self.size)
