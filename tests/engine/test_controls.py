"""Words become token ids, and what the program has no room for is refused."""

from typing import Any

import pytest

import jaxspec_checkpoints
from jaxspec.engine.controls import make_controls
from jaxspec.errors import RequestError
from jaxspec.program.plan import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS,
    TokenControls,
)
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())
EOS = TOKENIZER.eos_token_id


def controls_of(**fields) -> TokenControls | None:
    return make_controls(SamplingParams(**fields), TOKENIZER, (EOS,))


def words_of(*words: str) -> set[tuple[int, ...]]:
    controls = controls_of(bad_words=list(words))
    assert controls is not None
    return set(controls.bad_words)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_nothing_asked_is_nothing_to_do():
    assert controls_of() is None
    assert controls_of(bad_words=[], logit_bias={}) is None
    assert controls_of(temperature=0.5, top_k=3, stop=["a"], min_tokens=2) is None


def test_every_field_arrives():
    given: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    assert controls_of(**given) == TokenControls(**given)
    bias = {7: -100, 5: 1.5}
    assert controls_of(logit_bias=bias) == TokenControls(bias=((5, 1.5), (7, -100.0)))
    allowed = TokenControls(allowed=(2, 5))
    assert controls_of(allowed_token_ids=[5, 2, 5]) == allowed


def test_a_word_is_forbidden_with_and_without_a_space():
    first, second = ids_of("the"), ids_of(" the")
    assert first != second
    assert words_of("the") == words_of(" the") == {first, second}


def test_a_spelling_that_ends_in_a_forbidden_one_is_left_out():
    # "\n the" would be one more spelling, which ends in the token of " the".
    assert words_of("the", "\n the") == words_of("the")
    # Longer is allowed where the shorter is only its start.
    longer = "the fox"
    assert any(word[: len(ids_of("the"))] == ids_of("the") for word in words_of(longer))


def test_spaces_alone_and_line_breaks_are_words():
    assert words_of("\n") >= {ids_of("\n")}
    assert words_of("  ") == {ids_of("  ")}


def test_special_pieces_in_a_word_are_text():
    assert (EOS,) not in words_of("<eos>")


def test_a_word_of_too_many_tokens():
    text = "\u2603" * MAX_BAD_WORD_LEN  # three bytes each
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORD_LEN} tokens"):
        controls_of(bad_words=[text])


def test_too_many_words_and_too_long_a_bias():
    words = [TOKENIZER.id_to_piece(token) for token in range(300, 700)]
    plain = [word for word in words if word.isalpha()]
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORDS} spellings"):
        controls_of(bad_words=plain)
    bias = dict.fromkeys(range(MAX_BIAS), 1.0)
    assert controls_of(logit_bias=bias) is not None
    with pytest.raises(
        RequestError, match=rf"at most {MAX_BIAS} .* got {MAX_BIAS + 1}"
    ):
        controls_of(logit_bias=bias | {MAX_BIAS: 1.0})


def test_some_token_must_be_left():
    (word,) = ids_of("the")
    assert controls_of(allowed_token_ids=[word, 5], bad_words=["the"])
    with pytest.raises(RequestError, match="bad_words leaves"):
        controls_of(allowed_token_ids=[word], bad_words=["the"])
    assert controls_of(allowed_token_ids=[EOS])
    with pytest.raises(RequestError, match="min_tokens"):
        controls_of(allowed_token_ids=[EOS], min_tokens=1)
