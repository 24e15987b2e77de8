"""The tokenizers a policy reads with: one token per byte, or the one saved with a model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rl_consistency.trainers.data.foreign_files import explained

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|pad|>", "<|bos|>", "<|eos|>"


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or used; the message names it and the remedy."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 259 ids: byte b is id b, then pad 256, bos 257, eos 258.

    `decode(encode(text)) == text` for every text that UTF-8 can hold. Nothing is added to a text,
    and a special token's name inside it is read as its bytes. `save_pretrained` keeps all of this.
    """
    # Byte-level BPE without merges. Its decoder replaces only the bytes that are no UTF-8, where
    # that of `byte_fallback` would replace every byte of the text.
    vocabulary = {character: byte for byte, character in sorted(bytes_to_unicode().items())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD_TOKEN, BOS_TOKEN, EOS_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a model directory.

    TokenizerError if there is none, it needs code from the model's author, or has no end token.
    """
    if not Path(source).is_dir():
        raise TokenizerError(f"no model directory {source}: policy.path must name one")
    needs = "it needs tokenizer.json and tokenizer_config.json, or set tokenizer.kind: byte"
    what = f"{source} holds no tokenizer that can be loaded: {needs}"
    with explained(TokenizerError, what):
        tokenizer = AutoTokenizer.from_pretrained(
            str(source), local_files_only=True, trust_remote_code=False
        )
    if tokenizer.eos_token_id is None:
        raise TokenizerError(f"the tokenizer of {source} has no eos_token: set it and save it")
    return tokenizer
