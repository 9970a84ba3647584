"""Tokenizers without a file, for engines with a fake device."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.text.tokenizer import PlainTexts, Tokenizer

FIRST_CHARACTER = ord("!")


class StubTokenizer(Tokenizer):
    """Decodes token i to the printable character `!` + i, so that stop strings work."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.pad_token_id, self.eos_token_id, self.bos_token_id = 0, 1, 2
        self.unk_token_id = 3
        self.has_turns = False
        self.all_special_ids = []
        # The first four tokens are special, but this tokenizer decodes them to text as
        # well.
        self.plain_texts = PlainTexts(self)
        self.plain_texts.update((i, self.decode([i])) for i in range(4))

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return [ord(character) - FIRST_CHARACTER for character in text]

    def token_bytes(self, token_id: int) -> bytes:
        is_text = token_id < self.vocab_size and token_id not in (0, 1, 2, 3)
        return self.decode([token_id]).encode() if is_text else b""

    def is_byte(self, token_id: int) -> bool:
        return False

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(FIRST_CHARACTER + token) for token in ids)


class TurnsTokenizer(StubTokenizer):
    """Renders a conversation as only the text of its last message."""

    def write_chat(
        self, messages: Sequence[Mapping[str, Any]], **_: Any
    ) -> tuple[str, list[int]]:
        text = messages[-1]["content"]
        return text, self.encode(text)
