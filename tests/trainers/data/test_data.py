import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest

from rl_consistency.trainers.data import examples
from rl_consistency.trainers.data.examples import (
    DataError,
    DataOrder,
    Example,
    encode_prompt,
    epoch_order,
    keyed_integer,
)
from tests.trainers.conftest import read_jsonl

EXAMPLE = Example(id=7, prompt="abcdefgh", answer="x", target="x")


def write(tmp_path, *lines, end="\n"):
    file = tmp_path / "data.jsonl"
    file.write_bytes(
        "\n".join(
            line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
            for line in lines
        ).encode()
        + end.encode()
    )
    return file


def line_with(value):
    """A good line with one more field, in JSON as it is given."""
    return f'{{"question": "a", "answer": "b", "x": {value}}}'


def encode(text):
    return list(text.encode())


@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
def test_lines_become_examples_in_order(tmp_path, end):
    file = write(tmp_path, {"q": "a\u2028b", "a": "1", "level": 3}, {"q": "c", "a": 22}, end=end)
    first, second = read_jsonl(
        file, prompt_field="q", answer_field="a", prompt_template="<{prompt}>"
    )
    assert (first.id, first.prompt, first.answer, first.target) == (0, "<a\u2028b>", "1", "1")
    assert dict(first.extra) == {"level": 3}
    assert (second.id, second.prompt, second.answer) == (1, "<c>", "22")


def test_a_template_may_hold_braces_and_a_prompt_the_placeholder(tmp_path):
    file = write(tmp_path, {"question": "{prompt} {x}", "answer": "1"})
    (example,) = read_jsonl(file, prompt_template="{y} {prompt}")
    assert example.prompt == "{y} {prompt} {x}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("", "blank"),
        ("[1]", "a JSON object is needed, got list"),
        ({"question": "a"}, "no field 'answer'; the line has 'question'"),
        ({"answer": "a"}, "no field 'question'"),
        ({"question": " ", "answer": "a"}, "'question' is blank"),
        ({"question": "a", "answer": ""}, "'answer' is blank"),
        ({"question": "a", "answer": None}, "'answer' must be text, got NoneType"),
        ({"question": "a", "answer": True}, "'answer' must be text, got bool"),
        ('{"question": "a", "answer": "b", "answer": "c"}', "answer stands more than once"),
        (line_with(r'"\ud800"'), "half a surrogate pair"),
        (line_with("9" * 5_000), "a number of 5000 digits"),
        (line_with("[" * 100_000 + "]" * 100_000), "nested too deep"),
        (line_with("NaN"), "NaN is no number of JSON"),
        (line_with("-Infinity"), "-Infinity is no number of JSON"),
        (line_with("1e999"), "the number 1e999 is out of range"),
        (line_with('{"a": 1, "a": 2}'), "a stands more than once"),
        ("\ufeff" + line_with("1"), "Unexpected UTF-8 BOM"),
        (line_with("1") + "\0", "not JSON"),
    ],
)
def test_an_unusable_line_is_named_and_nothing_is_dropped(tmp_path, line, message):
    good = {"question": "a", "answer": "b"}
    with pytest.raises(DataError) as caught:
        read_jsonl(write(tmp_path, good, line, good))
    assert "data.jsonl, line 2: " in str(caught.value) and message in str(caught.value)


def test_python_s_own_reader_drops_an_answer_and_takes_nan(tmp_path, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(examples, "parse_json_object", json.loads)
    line = '{"question": "a", "answer": "b", "answer": "c", "x": NaN}'
    (example,) = read_jsonl(write(tmp_path, line))
    assert example.answer == "c" and math.isnan(example.extra["x"])


def test_a_line_that_is_not_utf_8_is_named(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"question": "a", "answer": "b"}\n{"question": "\xff", "answer": "b"}\n')
    with pytest.raises(DataError, match="line 2: not JSON in UTF-8"):
        read_jsonl(file)


@pytest.mark.parametrize(
    ("content", "message"), [("", "is empty"), ("\n", "line 1: blank"), (" \n\n", "line 1: blank")]
)
def test_an_empty_file_is_refused(tmp_path, content, message):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_jsonl(file)


def test_a_file_is_not_read_beyond_its_limit(tmp_path):
    file = write(tmp_path, {"question": "a", "answer": "b"}, "{")
    assert len(read_jsonl(file, limit=1)) == 1


def test_an_enormous_line_is_refused_in_little_memory(tmp_path):
    file = write(tmp_path, {"question": "a", "answer": "b"})
    with file.open("r+b") as stream:
        stream.seek(2**33)  # 8 GiB without a line end; a hole, which takes no disk
        stream.write(b"x")
    with pytest.raises(DataError, match="line 2: longer than 16 MiB"):
        read_jsonl(file)


@pytest.mark.parametrize("kind", ["directory", "fifo", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = {"device": Path("/dev/zero")}.get(kind, tmp_path / kind)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(DataError, match="cannot read the data file .*: it is no regular file"):
        read_jsonl(path)


LENGTHS = ("max_prompt_tokens", "max_tokens", "context_length")


def encoded(text, lengths, overlong="error", leading=()):
    limits = dict(zip(LENGTHS, lengths, strict=True))
    example = dataclasses.replace(EXAMPLE, prompt=text)
    return encode_prompt(example, encode, **limits, overlong=overlong, leading=leading)


@pytest.mark.parametrize(
    ("text", "lengths", "overlong", "leading", "prompt", "flag"),
    [
        ("abcdefgh", (8, 4, 12), "error", b"", b"abcdefgh", False),
        ("abcdef", (6, 4, 12), "drop", b"", b"abcdef", False),
        ("abcdefgh", (6, 4, 12), "drop", b"", None, True),
        ("abcdefgh", (6, 4, 12), "truncate", b"", b"cdefgh", True),
        ("abcdefgh", (8, 9, 12), "truncate", b"", b"fgh", True),  # the model's context limits too
        *(
            (text, (longest, 1, 64), overlong, b"^", prompt, flag)
            for text in ("abcdefgh", "^abcdefgh")  # one that has them itself gets no second ones
            for overlong, longest, prompt, flag in (
                ("error", 9, b"^abcdefgh", False),
                ("truncate", 4, b"^fgh", True),
                ("drop", 4, None, True),
            )
        ),
    ],
)
def test_a_prompt_fits_or_is_dropped_or_keeps_its_leading_tokens_and_its_end(
    text, lengths, overlong, leading, prompt, flag
):
    assert encoded(text, lengths, overlong, leading) == (prompt and list(prompt), flag)


@pytest.mark.parametrize(
    ("text", "lengths", "overlong", "leading", "message"),
    [
        ("abcdefgh", (7, 4, 64), "error", b"", "example 7: its prompt has 8 tokens, data.max_pro"),
        ("abcdefgh", (64, 4, 11), "error", b"", "with 4 of the completion 12; the model's context"),
        ("abcdefgh", (8, 9, 12), "error", b"", "set data.overlong_prompts to drop or truncate"),
        ("abcdefgh", (8, 12, 12), "drop", b"", "context is 12"),  # no token of it would fit
        ("", (8, 4, 64), "error", b"", "example 7: its prompt has no token"),
        ("", (9, 1, 64), "error", b"^", "its prompt has no token"),
        ("abcdefgh", (1, 1, 64), "drop", b"^", "prompt has 9 tokens, data.max_prompt_tokens is 1"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named_with_its_lengths(
    text, lengths, overlong, leading, message
):
    with pytest.raises(DataError, match=message):
        encoded(text, lengths, overlong, leading)


def test_keyed_integers_are_pinned():
    # A change here changes the data order of every run and the problems of every generated task.
    assert keyed_integer(0, "order", 1, 2) == 7487992184390575085
    assert keyed_integer(1, 23) != keyed_integer(12, 3)
    assert keyed_integer(1, "2") != keyed_integer(1, 2)


def test_an_epoch_is_a_permutation_that_depends_on_seed_and_epoch():
    orders = [epoch_order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(0, 0, 50) == orders[0]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_visits_every_example_once(shuffle):
    order = DataOrder(size=10, batch_size=4, seed=3, shuffle=shuffle)
    visited = [index for step in range(5) for index in order.batch(step)]
    assert Counter(visited[:10]) == Counter(visited[10:]) == Counter(range(10))
    assert (visited[:10] == list(range(10))) is not shuffle


def test_a_batch_depends_on_its_step_alone():
    order = DataOrder(size=10, batch_size=4, seed=3)
    forward = [order.batch(step) for step in range(40)]
    assert [DataOrder(10, 4, 3).batch(step) for step in reversed(range(40))] == forward[::-1]
    assert epoch_order.cache_info().currsize <= 4
