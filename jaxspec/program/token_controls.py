"""What a request may ask of single tokens, and how that travels with its admission.

Penalties, logit bias, allowed ids and bad words: `controls.py` computes with them.
Plain numpy: the engine imports this without importing jax.
"""

from dataclasses import dataclass

import numpy as np

NO_TOKEN = -1  # pads lists of ids; never a legal token

# Admissions with controls in one launch.
MAX_CONTROLLED = 4
MAX_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 8


@dataclass(frozen=True, kw_only=True)
class TokenControls:
    """One request's controls; the defaults change nothing.

    Attributes:
        presence_penalty: Taken from the logit of every token of the output so far.
        frequency_penalty: The same, once per occurrence.
        repetition_penalty: Divides the positive logits, and multiplies the negative
            ones, of every token of prompt and output so far.
        bias: (token, value added to its logit), at most `MAX_BIAS`.
        allowed: The tokens that may come; None for all.
        bad_words: At most `MAX_BAD_WORDS` sequences of at most `MAX_BAD_WORD_LEN`
            tokens that the output may not contain.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


def num_words(vocab_size: int) -> int:
    """Words of 32 bits that hold one bit per token."""
    return -(-vocab_size // 32)


def control_fields(count: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the plan's fields for `count` admissions with controls, in order."""
    return {
        "control_row": (count,),
        "control_penalties": (count, 3),  # the bits of float32, as the bias values
        "control_bias_ids": (count, MAX_BIAS),
        "control_bias_values": (count, MAX_BIAS),
        "control_allowed": (count, num_words(vocab_size)),
        "control_bad_words": (count, MAX_BAD_WORDS, MAX_BAD_WORD_LEN),
    }


def pack_controls(controls: TokenControls, vocab_size: int) -> dict[str, np.ndarray]:
    """One request's entry of every field but the row, as int32."""
    penalties = (
        controls.presence_penalty,
        controls.frequency_penalty,
        controls.repetition_penalty,
    )
    assert len(controls.bias) <= MAX_BIAS, f"{len(controls.bias)} biased tokens"
    bias_ids = np.full(MAX_BIAS, NO_TOKEN, np.int32)
    bias_values = np.zeros(MAX_BIAS, np.float32)
    for index, (token, value) in enumerate(controls.bias):
        bias_ids[index], bias_values[index] = token, value
    assert len(controls.bad_words) <= MAX_BAD_WORDS, "too many bad words"
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), NO_TOKEN, np.int32)
    for index, word in enumerate(controls.bad_words):
        assert 0 < len(word) <= MAX_BAD_WORD_LEN, f"a bad word of {len(word)} tokens"
        # Right-aligned: the last column is what a match forbids.
        bad_words[index, MAX_BAD_WORD_LEN - len(word) :] = word
    return {
        "control_penalties": np.array(penalties, np.float32).view(np.int32),
        "control_bias_ids": bias_ids,
        "control_bias_values": bias_values.view(np.int32),
        "control_allowed": _bits(controls.allowed, vocab_size).view(np.int32),
        "control_bad_words": bad_words,
    }


def _bits(tokens: tuple[int, ...] | None, vocab_size: int) -> np.ndarray:
    """Token t is bit t % 32 of word t // 32, from the lowest bit on."""
    flags = np.zeros(num_words(vocab_size) * 32, bool)
    flags[slice(None) if tokens is None else list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
