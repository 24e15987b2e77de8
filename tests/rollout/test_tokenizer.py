"""Text in and out of the engine: prompts, conversations, completions, and the end of a sample."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_consistency.models.patch import patch
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from tests.rollout.engine.engines import content, engine_of

SAMPLING = SamplingParams(n=2, max_tokens=5, seed=3)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}?{% endif %}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
OTHER = [{"role": "system", "content": "é"}, *HELLO]


@pytest.fixture(scope="module")
def tokenizer():
    found = byte_tokenizer()
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    with patch(built := tiny_qwen3(vocab_size=264)):
        yield built


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    return RolloutEngine(model, tokenizer=tokenizer, num_kv_blocks=32)


def test_a_text_is_the_prompt_of_its_tokens(engine, tokenizer):
    texts = ["1+1=", "é"]
    expected = engine.generate([tokenizer.encode(text) for text in texts], SAMPLING)
    found = engine.generate(texts, SAMPLING)
    assert content(found) == content(expected)
    assert [c.prompt_token_ids for c in found[::2]] == [list(text.encode()) for text in texts]
    assert content(engine.generate("1+1=", SAMPLING)) == content(expected[:2])
    mixed = engine.generate(["1+1=", tokenizer.encode("é")], SAMPLING)
    assert content(mixed) == content(expected)


def test_a_text_gets_the_special_tokens_of_its_tokenizer(model):
    class Leading:
        def encode(self, text):
            return [257, *text.encode()]

        def decode(self, token_ids, **_):
            return str(token_ids)

    engine = engine_of(model, num_kv_blocks=8, tokenizer=Leading())
    found = engine.generate(["a"], SAMPLING)[1]
    assert (found.prompt_token_ids, found.text) == ([257, 97], str(found.token_ids))


def test_a_completion_has_its_text_without_special_tokens(engine, tokenizer):
    found = engine.generate("abc", replace(SAMPLING, max_tokens=40, n=8))
    assert [c.text for c in found] == [
        tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in found
    ]
    with_special = [tokenizer.decode(c.token_ids) for c in found]
    assert [c.text for c in found] != with_special  # 3 of 264 tokens are special


def test_a_chat_is_the_prompt_that_the_template_makes(engine, tokenizer):
    one = engine.chat(HELLO, SAMPLING)
    assert bytes(one[0].prompt_token_ids) == b"<user>hello<assistant>"
    assert content(one) == content(engine.generate("<user>hello<assistant>", SAMPLING))
    both = engine.chat([HELLO, OTHER], [SAMPLING, SAMPLING], prompt_ids=[0, 8])
    assert content(both[:2]) == content(one)
    assert bytes(both[2].prompt_token_ids) == "<system>é<user>hello<assistant>".encode()
    options = {"chat_template_kwargs": {"thinking": True}}
    assert bytes(engine.chat(HELLO, SAMPLING, **options)[0].prompt_token_ids)[-1:] == b"?"
    bare = engine.chat(HELLO, SAMPLING, add_generation_prompt=False)
    assert bytes(bare[0].prompt_token_ids) == b"<user>hello"
    assert engine.chat([], SAMPLING) == []


@pytest.mark.parametrize("messages", ["hello", HELLO[0], ["hello"], [["hello"]], [HELLO, "x"], 3])
def test_other_messages_are_named(engine, messages):
    with pytest.raises(ValueError, match="messages must be|conversation . must be a list"):
        engine.chat(messages, SAMPLING)


def test_text_needs_a_tokenizer_that_can(model):
    engine = engine_of(model, num_kv_blocks=8)
    assert engine.generate([[1]], SAMPLING)[0].text is None
    for call in (lambda: engine.generate(["a"], SAMPLING), lambda: engine.chat(HELLO, SAMPLING)):
        with pytest.raises(ValueError, match=r"need a tokenizer: RolloutEngine\(model, tokenizer="):
            call()
    engine = engine_of(model, num_kv_blocks=8, tokenizer=SimpleNamespace(decode=str))
    with pytest.raises(ValueError, match=r"a tokenizer with encode\(\); got SimpleNamespace"):
        engine.generate(["a"], SAMPLING)


# Which tokens end a sample.


@pytest.mark.parametrize(
    ("configured", "own", "expected"),
    [(None, 258, {258}), (7, 258, {7, 258}), ([7, 258], 258, {7, 258}), (7, None, {7})],
)
def test_a_sample_ends_at_the_eos_of_tokenizer_and_generation_config(
    model, tokenizer, monkeypatch, configured, own, expected
):
    monkeypatch.setattr(model.generation_config, "eos_token_id", configured)
    monkeypatch.setitem(tokenizer._special_tokens_map, "eos_token", own and "<|eos|>")
    engine = RolloutEngine(model, tokenizer=tokenizer, num_kv_blocks=8)
    assert engine._requests._eos == expected
    none = RolloutEngine(model, tokenizer=tokenizer, eos_token_id=None, num_kv_blocks=8)
    assert none._requests._eos == set()


def test_an_eos_that_nothing_names_is_asked_for(model, tokenizer, monkeypatch):
    with pytest.raises(ValueError, match=r"give eos_token_id \(None: no token ends"):
        RolloutEngine(model)
    monkeypatch.setitem(tokenizer._special_tokens_map, "eos_token", None)
    with pytest.raises(ValueError, match="neither the tokenizer nor .* has an eos token"):
        RolloutEngine(model, tokenizer=tokenizer)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_qwen3, tokenizer):
    with (
        patch(model := tiny_qwen3()),
        pytest.raises(ValueError, match="tokenizer has 259 tokens, the model's vocabulary .*60"),
    ):
        RolloutEngine(model, tokenizer=tokenizer, eos_token_id=1)
