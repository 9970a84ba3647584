"""Owns the way from a request's parameters to `TokenControls`: words become token ids.

Limits are those of the step program, which holds every request's controls in arrays of
fixed sizes. Beyond them is an error here, before any device work.
"""

from jaxspec.errors import RequestError, wrong_argument
from jaxspec.program.plan import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS,
    TokenControls,
)
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer

Word = tuple[int, ...]


def make_controls(
    params: SamplingParams, tokenizer: Tokenizer, stop_ids: tuple[int, ...]
) -> TokenControls | None:
    """Return what the step program is to do to single tokens; None for nothing.

    Args:
        stop_ids: Not generated before `min_tokens`.

    Raises:
        RequestError: There is more than the program has room for, or no token is left
            that could be generated.
    """
    bias = tuple(sorted((params.logit_bias or {}).items()))
    if len(bias) > MAX_BIAS:
        raise _too_many("logit_bias", f"at most {MAX_BIAS} token ids", len(bias))
    words = _bad_words(params.bad_words or [], tokenizer)
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = tuple(sorted(set(params.allowed_token_ids)))
        _check_some_left(allowed, words, stop_ids if params.min_tokens else ())
    controls = TokenControls(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias=bias,
        allowed=allowed,
        bad_words=words,
    )
    return None if controls == TokenControls() else controls


def _bad_words(given: list[str], tokenizer: Tokenizer) -> tuple[Word, ...]:
    """Spell every word in token ids, as the start of a text and after a space."""
    words: list[Word] = []
    for text in given:
        bare = text.lstrip(" ")
        for form in (bare, f" {bare}") if bare else (text,):
            ids = tokenizer.encode(
                form, add_special_tokens=False, parse_special_tokens=False
            )
            if len(ids) > MAX_BAD_WORD_LEN:
                raise wrong_argument(
                    RequestError,
                    "bad_words",
                    f"words of at most {MAX_BAD_WORD_LEN} tokens",
                    text,
                    f"It has {len(ids)}.",
                )
            words.append(tuple(ids))
    unique = dict.fromkeys(words)
    # What ends in a word that is forbidden is forbidden with it.
    kept = tuple(
        word
        for word in unique
        if not any(word[start:] in unique for start in range(1, len(word)))
    )
    if len(kept) > MAX_BAD_WORDS:
        allowed = f"at most {MAX_BAD_WORDS} spellings in token ids"
        raise _too_many("bad_words", allowed, len(kept))
    return kept


def _check_some_left(
    allowed: tuple[int, ...], words: tuple[Word, ...], stop_ids: tuple[int, ...]
) -> None:
    forbidden = {word[0] for word in words if len(word) == 1}.union(stop_ids)
    if forbidden.issuperset(allowed):
        raise wrong_argument(
            RequestError,
            "allowed_token_ids",
            "some id that bad_words leaves, and that is no end of text where "
            "min_tokens is set",
            list(allowed),
        )


def _too_many(name: str, allowed: str, count: int) -> RequestError:
    return RequestError(
        f"{name} must hold {allowed}, got {count}.", parameter=name, value=count
    )
