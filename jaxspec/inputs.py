"""Owns the types of prompts, and their checks.

Every error of a prompt is raised here, on the host, before a request exists.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

from jaxspec.errors import (
    RequestError,
    UnsupportedError,
    check_token_id,
    check_utf8,
    plain_values,
    wrong_argument,
)

_FORMS = "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
_UNSUPPORTED_KEYS = {
    "multi_modal_data": "only text is supported",
    "mm_processor_kwargs": "only text is supported",
    "prompt_embeds": "prompts are given as text or token ids",
    "encoder_prompt": "Gemma has no encoder",
    "decoder_prompt": "Gemma has no encoder",
}


class TextPrompt(TypedDict):
    """A prompt as text.

    Attributes:
        prompt: The text; the bos token is added.
        cache_salt: Only prompts with equal salts share cached pages. May be left out.
    """

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids.

    Attributes:
        prompt_token_ids: The ids, with the bos token: it is not added.
        prompt: A text that is only copied to the output. May be left out.
        cache_salt: Only prompts with equal salts share cached pages. May be left out.
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@runtime_checkable
class Encoder(Protocol):
    """Encodes text as token ids."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class ParsedPrompt:
    """A checked prompt; `text` is None when only token ids were given.

    Attributes:
        cache_salt: Only prompts with equal salts share cached pages.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def split_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts, given one prompt or a list of them.

    Arrays are read as lists: an array of strings or rows is a list of prompts, an array
    of numbers is one prompt.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = plain_values(prompts)
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        allowed = f"{_FORMS}; or a list of these"
        raise wrong_argument(RequestError, "prompts", allowed, prompts)
    listed = [plain_values(item) for item in listed]
    # A list with any number is one prompt; `parse_prompt` reports other entries.
    return (
        [listed] if any(isinstance(item, (int, float)) for item in listed) else listed
    )


def join_token_ids(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """Combine the deprecated pair (prompts, prompt_token_ids) into a list of prompts.

    Raises:
        RequestError: Neither is given, or both with different lengths.
    """
    if prompt_token_ids is None:
        if prompts is None:
            allowed = "a prompt or a list of prompts"
            raise wrong_argument(RequestError, "prompts", allowed, prompts)
        return split_prompts(prompts)
    warnings.warn(
        "prompt_token_ids= is deprecated: pass the ids, or "
        "{'prompt_token_ids': ids}, as prompts.",
        DeprecationWarning,
        stacklevel=3,
    )
    all_ids = split_prompts(prompt_token_ids)
    texts = [None] * len(all_ids) if prompts is None else split_prompts(prompts)
    if len(texts) != len(all_ids):
        raise RequestError(
            "prompts and prompt_token_ids must have equal lengths, got "
            f"{len(texts)} and {len(all_ids)}.",
            parameter="prompt_token_ids",
            value=len(all_ids),
        )
    return [
        {"prompt": text, "prompt_token_ids": token_ids}
        for text, token_ids in zip(texts, all_ids, strict=True)
    ]


def parse_prompt(
    prompt: object, tokenizer: Encoder, vocab_size: int, max_model_len: int
) -> ParsedPrompt:
    """Check one prompt and encode it.

    An empty string is a valid prompt: its only token is bos.

    Args:
        prompt: The caller's prompt, of any type.
        tokenizer: Encodes text; adds the bos token.
        vocab_size: Token ids must be below this.
        max_model_len: Maximum sequence length; a prompt must leave room for one token.

    Raises:
        RequestError: The prompt is invalid or too long.
        NotImplementedError: The prompt contains something other than text.
    """
    text, given_ids = _text_and_ids(prompt)
    if given_ids is None:
        assert text is not None
        token_ids = _encode(text, tokenizer)
    else:
        token_ids = _check_ids(given_ids, vocab_size)
    if len(token_ids) >= max_model_len:
        raise RequestError(
            # Clients look for the beginning of this text.
            f"This model's maximum context length is {max_model_len} tokens, at least "
            f"one of them generated: the prompt has {len(token_ids)} tokens, but must "
            f"have 1 to {max_model_len - 1}. Shorten it or raise max_model_len.",
            parameter="prompt",
            value=len(token_ids),
        )
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not (isinstance(salt, str) and salt):
        name, allowed = "cache_salt", "a non-empty string"
        raise wrong_argument(RequestError, name, allowed, salt)
    if salt is not None:
        check_utf8(RequestError, "cache_salt", salt)
    return ParsedPrompt(text=text, token_ids=token_ids, cache_salt=salt)


def _text_and_ids(prompt: object) -> tuple[str | None, Any]:
    """Return a prompt's text, its token ids, or both."""
    prompt = plain_values(prompt)
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, (list, tuple)):
        return None, prompt
    if not isinstance(prompt, Mapping):
        raise wrong_argument(RequestError, "prompt", _FORMS, prompt)
    for key, value in prompt.items():
        if key in _UNSUPPORTED_KEYS and value is not None:
            raise UnsupportedError(
                f"prompt[{key!r}]={value!r} is not supported: "
                f"{_UNSUPPORTED_KEYS[key]}.",
                parameter=key,
                value=value,
            )
        if key not in {"prompt", "prompt_token_ids", "cache_salt", *_UNSUPPORTED_KEYS}:
            raise wrong_argument(RequestError, "prompt", _FORMS, prompt)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is None and text is None:
        raise wrong_argument(RequestError, "prompt", _FORMS, prompt)
    if text is not None and not isinstance(text, str):
        raise wrong_argument(RequestError, "prompt['prompt']", "a string", text)
    return text, token_ids


def _encode(text: str, tokenizer: Encoder) -> list[int]:
    check_utf8(RequestError, "prompt", text)
    token_ids = tokenizer.encode(text)
    if not token_ids:
        raise wrong_argument(RequestError, "prompt", "at least one token", text)
    return token_ids


def _check_ids(given: Any, vocab_size: int) -> list[int]:
    given = plain_values(given)
    if not isinstance(given, (list, tuple)) or not given:
        allowed = "a list of at least one token id"
        raise wrong_argument(RequestError, "prompt_token_ids", allowed, given)
    name = "prompt_token_ids"
    return [
        check_token_id(
            RequestError,
            name,
            plain_values(token),
            vocab_size,
            described_as=f"{name}[{at}]",
        )
        for at, token in enumerate(given)
    ]
