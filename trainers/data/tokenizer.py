"""The tokenizers a policy reads with: one token per byte, or the one saved with a model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<|pad|>", "<|bos|>", "<|eos|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 259 ids: byte b is id b, then pad 256, bos 257, eos 258.

    `decode(encode(text)) == text` for every text that UTF-8 can hold. Nothing is added to a text,
    and a special token's name inside a text is read as its bytes. `save_pretrained` and
    `from_pretrained` keep all of this.
    """
    # Byte-level BPE without merges. Its decoder replaces only the bytes that are no UTF-8, where
    # that of `byte_fallback` would replace every byte of the text.
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
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


def _byte_vocabulary() -> dict[str, int]:
    """Byte values by the character that stands for them in the byte-level alphabet.

    A visible Latin-1 character stands for itself, the other bytes in ascending order for the
    characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    stand_ins = {byte: 0x100 + place for place, byte in enumerate(others)}
    return {chr(stand_ins.get(byte, byte)): byte for byte in range(256)}


def load_tokenizer(source: str | Path, *, local: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a model directory or, with `local=False`, of a hub model.

    Raises ValueError if there is none, if it needs code from the model's author, or if it names no
    end token.
    """
    if local and not Path(source).is_dir():
        raise ValueError(f"no model directory {source}: policy.path must name one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source), local_files_only=local, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source} holds no tokenizer that can be loaded: it needs tokenizer.json and "
            f"tokenizer_config.json, or set tokenizer.kind: byte ({error})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {source} has no eos_token: set it and save it again")
    return tokenizer
