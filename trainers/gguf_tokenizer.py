"""The tokenizer of a GGUF file, split as llama.cpp splits; texts with known pieces check it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from rl_consistency.trainers.data.foreign_files import explained, shown
from rl_consistency.trainers.data.tokenizer import load_tokenizer


class GGUFError(ValueError):
    """A GGUF file that cannot be imported; the message names what is wrong and the remedy."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_BY_DIGIT_FIRST = (r"\p{N}", _GPT2)
_LLAMA3 = (rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}",)
_QWEN2 = (rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_TAIL}",)
_TEKKEN = (rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",)

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "smollm": _BY_DIGIT_FIRST,
    "starcoder": _BY_DIGIT_FIRST,
    "refact": _BY_DIGIT_FIRST,
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""`tokenizer.ggml.pre` -> the expressions of llama.cpp, each cutting what the one before left whole
and between its matches."""
_WHOLE_WORDS_FIRST = (_LLAMA3, _TEKKEN)
"""A word that is a token is not merged from its parts; BOS begins a text unless denied."""

TEXTS = ("x\n\n2", "a  12", "Total:\n\n3 apples", "I'LL pay 1234.5")
PIECES: dict[tuple[str, ...], tuple[list[str], ...]] = {
    _BY_DIGIT_FIRST: (
        ["x", "\n\n", "2"],
        ["a", "  ", "1", "2"],
        ["Total", ":", "\n\n", "3", " apples"],
        ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", ".", "5"],
    ),
    (_GPT2,): (
        ["x", "\n", "\n", "2"],
        ["a", " ", " 12"],
        ["Total", ":", "\n", "\n", "3", " apples"],
        ["I", "'", "LL", " pay", " 1234", ".", "5"],
    ),
    _LLAMA3: (
        ["x", "\n\n", "2"],
        ["a", " ", " ", "12"],
        ["Total", ":\n\n", "3", " apples"],
        ["I", "'LL", " pay", " ", "123", "4", ".", "5"],
    ),
    **dict.fromkeys(
        (_QWEN2, _TEKKEN),
        (
            ["x", "\n\n", "2"],
            ["a", " ", " ", "1", "2"],
            ["Total", ":\n\n", "3", " apples"],
            ["I", "'LL", " pay", " ", "1", "2", "3", "4", ".", "5"],
        ),
    ),
}
"""What llama.cpp makes of `TEXTS`."""
_CONTROL, _USER_DEFINED = 3, 4
_UNSCORED = -1e9


def read_tokenizer(fields: dict[str, Any], given: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata of a GGUF file describes; GGUFError where it is none that is
    known to be split as llama.cpp splits."""
    tokens, kind = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.model")
    if not tokens:
        raise GGUFError(f"{given}: it holds no tokenizer (tokenizer.ggml.tokens)")
    if len(set(tokens)) < len(tokens):
        raise GGUFError(f"{given}: two of its tokens have one text")
    if kind not in ("gpt2", "llama"):
        known = "gpt2 (byte-level BPE) and llama (SentencePiece)"
        raise GGUFError(f"{given}: tokenizer.ggml.model {shown(kind)} is not covered; {known} are")
    with explained(GGUFError, f"{given}: its tokenizer is damaged"):
        made = _byte_level(fields, given) if kind == "gpt2" else _sentence_piece(fields)
        kinds = fields.get("tokenizer.ggml.token_type") or ()
        for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            made.add_tokens(
                [
                    AddedToken(token, normalized=False, special=special)
                    for token, found in zip(tokens, kinds, strict=False)
                    if found == wanted
                ]
            )
        named = {
            name: tokens[fields[key]]
            for name, key in (
                ("bos_token", "tokenizer.ggml.bos_token_id"),
                ("eos_token", "tokenizer.ggml.eos_token_id"),
                ("unk_token", "tokenizer.ggml.unknown_token_id"),
                ("pad_token", "tokenizer.ggml.padding_token_id"),
            )
            if fields.get(key) is not None
        }
        if "eos_token" not in named:
            raise GGUFError(f"{given}: it names no end token (tokenizer.ggml.eos_token_id)")
        named.setdefault("pad_token", named["eos_token"])
        _add_ends(made, fields, named)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made, clean_up_tokenization_spaces=False, **named
        )
        tokenizer.chat_template = fields.get("tokenizer.chat_template")
        if len(tokenizer) != len(tokens):
            raise GGUFError(f"{len(tokens)} tokens became {len(tokenizer)}")
    return tokenizer


def _splits(fields: dict[str, Any], given: Path) -> tuple[str, ...]:
    """The expressions of a byte-level tokenizer."""
    name = fields.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise GGUFError(
            f"{given}: the pre-tokenizer {shown(name)} (tokenizer.ggml.pre) is not known to be "
            f"converted rightly; known: {known}. Use the model's Hugging Face directory"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(fields: dict[str, Any], given: Path) -> Tokenizer:
    splits = _splits(fields, given)
    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    whole = splits in _WHOLE_WORDS_FIRST
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    if fields["tokenizer.ggml.pre"] == "qwen2":
        made.normalizer = normalizers.NFC()  # of Qwen's own tokenizer; llama.cpp leaves it out
    parts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, last])
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_piece(fields: dict[str, Any]) -> Tokenizer:
    """SentencePiece's BPE, whose merges follow from the scores: the best token is joined first."""
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token, index in vocabulary.items():
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        if scores[index] > _UNSCORED:
            known.sort(key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))
            ranked += [(-scores[index], index, cut) for cut in known]
    merges = [cut for *_, cut in sorted(ranked, key=lambda entry: entry[:2])]
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    bpe = models.BPE(
        vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    made = Tokenizer(bpe)
    prefixed = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    prepend = [normalizers.Prepend("▁")] if prefixed else []
    made.normalizer = normalizers.Sequence([*prepend, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    made.decoder = decoders.Sequence(parts)
    return made


def _add_ends(made: Tokenizer, fields: dict[str, Any], named: dict[str, str]) -> None:
    """BOS and EOS around a text, where the file or its kind asks for them."""
    begins = fields["tokenizer.ggml.model"] == "llama"
    begins |= PRE_TOKENIZERS.get(fields.get("tokenizer.ggml.pre", "")) in _WHOLE_WORDS_FIRST
    asked = {
        "bos_token": fields.get("tokenizer.ggml.add_bos_token", begins),
        "eos_token": fields.get("tokenizer.ggml.add_eos_token", False),
    }
    bos, eos = ([named[name]] if asked[name] and name in named else [] for name in asked)
    if bos or eos:
        made.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{t}:1" for t in bos), "$B:1", *(f"{t}:1" for t in eos)],
            special_tokens=[(token, made.token_to_id(token)) for token in dict.fromkeys(bos + eos)],
        )


def check_splits(directory: Path, fields: dict[str, Any], given: Path) -> None:
    """GGUFError where the tokenizer that was written, as transformers reads it, cuts `TEXTS` into
    other pieces than llama.cpp, or does not give a text back."""
    tokenizer: Any = load_tokenizer(directory)
    backend = tokenizer.backend_tokenizer
    pieces = PIECES[_splits(fields, given)] if fields["tokenizer.ggml.model"] == "gpt2" else None
    for index, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if (back := tokenizer.decode(ids)) != text:
            raise GGUFError(f"{given}: its tokenizer gives {text!r} back as {back!r}")
        if pieces is None:
            continue
        found = [text[i:j] for _, (i, j) in backend.pre_tokenizer.pre_tokenize_str(text)]
        if found != pieces[index]:
            problem = f"its tokenizer cuts {text!r} into {found}, llama.cpp into {pieces[index]}"
            raise GGUFError(f"{given}: {problem}")
