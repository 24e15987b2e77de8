"""What is asked of a Hugging Face tokenizer: token ids of prompts, and the end of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
"""`{"role": "user", "content": "..."}`"""


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt, with special tokens as the tokenizer adds them: as in TRL and vLLM."""
    return list(_able(tokenizer, "encode", "prompts as text")(text))


def encode_chats(
    tokenizer: Any, messages: Sequence[Message] | Sequence[Sequence[Message]], **template: Any
) -> list[list[int]]:
    """Token ids of a conversation, or of each of several, through the tokenizer's chat template.

    `template` goes to `apply_chat_template`.
    """
    apply = _able(tokenizer, "apply_chat_template", "messages")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            'messages must be a conversation, a list of {"role": ..., "content": ...}, or a list '
            f"of conversations; got {messages!r:.200}"
        )
    single = bool(messages) and isinstance(messages[0], Mapping)
    chats: Any = [messages] if single else messages
    for index, chat in enumerate(chats):
        if isinstance(chat, str) or not all(isinstance(message, Mapping) for message in chat):
            raise ValueError(
                f"conversation {index} must be a list of messages, each a mapping with a role and "
                f"a content; got {chat!r:.200}"
            )
    plain = [[dict(message) for message in chat] for chat in chats]  # the template may change them
    return [list(apply(chat, tokenize=True, return_dict=False, **template)) for chat in plain]


def eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: the tokenizer's and those of the generation config, sorted.

    ValueError where one is no token of the model.
    """
    generation = getattr(model, "generation_config", None)
    configured = generation.eos_token_id if generation is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    own = getattr(tokenizer, "eos_token_id", None)
    ids = [i for i in [*listed, own] if i is not None]
    rows = _vocabulary(model)
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < rows]:
        problem = f"eos_token_id {wrong[0]!r} is no token of the model's vocabulary of {rows}"
        raise ValueError(f"{problem}: mend generation_config.json or the tokenizer")
    return tuple(sorted(set(ids)))


def ending_ids(model: Any, given: Any, tokenizer: Any) -> Any:
    """The ids that end a sample: those given or, for "tokenizer", `eos_token_ids`.

    ValueError for a tokenizer that does not fit the model, and where there is none to ask."""
    if tokenizer is not None:
        require_fit(model, tokenizer)
    if not isinstance(given, str) or given != "tokenizer":
        return given
    if tokenizer is None:
        raise ValueError("give eos_token_id (None: no token ends a sample), or a tokenizer")
    if not (found := eos_token_ids(model, tokenizer)):
        raise ValueError(
            "neither the tokenizer nor the model's generation config has an eos token; give "
            "eos_token_id, or eos_token_id=None if no token ends a sample"
        )
    return found


def require_fit(model: Any, tokenizer: Any) -> None:
    """ValueError where a tokenizer has tokens that the model has no embedding of."""
    if hasattr(tokenizer, "__len__") and len(tokenizer) > (rows := _vocabulary(model)):
        problem = f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary only {rows}"
        raise ValueError(f"{problem}: take the model's own tokenizer")


def _vocabulary(model: Any) -> int:
    return model.get_input_embeddings().num_embeddings  # ZeRO-3 empties the weight


def _able(tokenizer: Any, method: str, what: str) -> Any:
    """A method of the tokenizer; ValueError where it lacks it, or there is none."""
    if tokenizer is None:
        raise ValueError(f"{what} need a tokenizer: RolloutEngine(model, tokenizer=tokenizer)")
    if not callable(found := getattr(tokenizer, method, None)):
        raise ValueError(f"{what} need a tokenizer with {method}(); got {type(tokenizer).__name__}")
    return found
