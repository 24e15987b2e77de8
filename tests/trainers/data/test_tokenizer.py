import random
from types import SimpleNamespace

import pytest
from tokenizers import processors

from rl_consistency.trainers.config.data_sections import DataSection
from rl_consistency.trainers.data.examples import Example
from rl_consistency.trainers.data.prompts import leading_tokens, load_prompts
from rl_consistency.trainers.data.tokenizer import (
    BOS_TOKEN,
    EOS_TOKEN,
    byte_tokenizer,
    load_tokenizer,
)


def any_text(length, seed):
    draw = random.Random(seed)
    points = (draw.randrange(0x110000) for _ in range(length))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


TEXTS = [
    "",
    "3+5+2=8,10",
    "  two  spaces , n't . ",
    "\x00\r\n\t\x7f",
    "naïve 漢字 🎉 e\u0301 \u200d",
    "<|eos|> and <0x41> are text",
    any_text(2000, 0),
]


@pytest.fixture(scope="module", params=["built", "saved and loaded"])
def tokenizer(request, tmp_path_factory):
    if request.param == "built":
        return byte_tokenizer()
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(directory)
    return load_tokenizer(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_bytes_and_decode_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text


def test_only_the_invalid_byte_is_replaced(tokenizer):
    assert tokenizer.decode([49, 0xFF, 50]) == "1\ufffd2"


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([65, 260, 66]) == "AB"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_end_token_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(tmp_path)


def with_special_tokens(template):
    """The byte tokenizer, which now writes BOS and EOS where the template says so."""
    tokenizer = byte_tokenizer()
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS_TOKEN, EOS_TOKEN)]
    post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer._tokenizer.post_processor = post_processor
    return tokenizer


@pytest.mark.parametrize(
    ("template", "leads"),
    [(f"{BOS_TOKEN} $A", True), (f"{BOS_TOKEN} $A {EOS_TOKEN}", True), (f"$A {EOS_TOKEN}", False)],
)
def test_tokens_before_a_text_lead_it_and_those_behind_do_not(template, leads):
    tokenizer = with_special_tokens(template)
    assert len(tokenizer.encode("a")) > 1
    examples = [Example(id=0, prompt="1+1=", answer="2", target="2")]
    assert leading_tokens(tokenizer, examples) == ([tokenizer.bos_token_id] if leads else [])
    assert leading_tokens(byte_tokenizer(), examples) == []


class Numbers:
    """Knows digits alone; every other text is empty, or all unknown tokens, which are BOS too."""

    def __init__(self, unknown):
        self.unknown = unknown

    def encode(self, text, add_special_tokens):
        known = [int(c) + 1 if c.isdecimal() else 0 for c in text]
        tokens = [i for i in known if i or self.unknown]
        return [0, *tokens, 99] if add_special_tokens else tokens


@pytest.mark.parametrize("unknown", [False, True])
def test_what_leads_a_text_is_read_off_the_prompts(unknown):
    examples = [Example(id=i, prompt=p, answer="", target="") for i, p in enumerate(["ab", "12"])]
    assert leading_tokens(Numbers(unknown), examples) == [0]


def test_prompts_begin_as_the_tokenizer_s_texts_do_unless_the_recipe_says_otherwise(tmp_path):
    tokenizer = with_special_tokens(f"{BOS_TOKEN} $A")
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "1+1=", "answer": "2"}\n')

    def prompts(**data):
        data = {"path": str(file), "max_prompt_tokens": 32} | data
        config = SimpleNamespace(
            data=DataSection(**data),
            rollout=SimpleNamespace(sampling=SimpleNamespace(max_tokens=4), prompts_per_step=1),
        )
        (prompt,) = load_prompts(config, tokenizer, context_length=64, vocab_size=259)[0].prompts
        return prompt

    assert prompts() == tokenizer.encode("1+1=") == [tokenizer.bos_token_id, *b"1+1="]
    assert prompts(add_special_tokens=False) == list(b"1+1=")
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    assert prompts(chat_template=True) == list(f"{BOS_TOKEN}1+1=".encode())
