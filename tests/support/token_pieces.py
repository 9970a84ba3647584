"""Token ids and the texts that they decode to."""

from hypothesis import settings
from hypothesis import strategies as st

import jaxspec_checkpoints
from jaxspec.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())


BYTES = {
    int(TOKENIZER.id_to_piece(token)[3:5], 16): token
    for token in range(TOKENIZER.vocab_size)
    if TOKENIZER.is_byte(token)
}


EXAMPLES = settings(max_examples=150)


def byte_tokens(data: bytes) -> list[int]:
    return [BYTES[value] for value in data]


CHARACTER = st.characters(exclude_categories=["Cs"]).map(
    lambda character: byte_tokens(character.encode())
)


SPECIAL = st.sampled_from(TOKENIZER.all_special_ids).map(lambda token: [token])


PIECE = st.integers(0, TOKENIZER.vocab_size - 1).map(lambda token: [token])


STRAY_BYTE = st.integers(0, 255).map(lambda value: [BYTES[value]])


# Encoded at import: SentencePiece calls `random`, which a hypothesis strategy may not.
TEXT = st.sampled_from(
    [
        TOKENIZER.encode(text, add_special_tokens=False)
        for text in ("the quick", " the", "\n\nthat  ", "q  q", "th")
    ]
)


IDS = st.lists(st.one_of(CHARACTER, SPECIAL, PIECE, STRAY_BYTE, TEXT), max_size=14).map(
    lambda parts: [token for part in parts for token in part]
)


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Split a list into rounds of the given sizes; the rest is the last round."""
    rounds = []
    for size in sizes:
        rounds.append(ids[:size])
        ids = ids[size:]
    return [*rounds, ids]
