"""Owns the way between text and token ids: Gemma's SentencePiece model and turn format.

Knows nothing about requests; text that arrives piece by piece is put together in
`jaxspec.engine.output`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from jaxspec.errors import ConfigError, RequestError, wrong_argument

START_OF_TURN = "<start_of_turn>"
END_OF_TURN = "<end_of_turn>"
_ROLES = {"user": "user", "assistant": "model", "model": "model"}


class Tokenizer:
    """Gemma's tokenizer, read from a `tokenizer.model`.

    Attributes:
        vocab_size: Pieces of the model; a network may have more rows than that.
        all_special_ids: Ids that are no text: begin, end, pad, unknown, turn markers.
    """

    def __init__(self, model: bytes):
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(model)
        self._processor = processor
        self.vocab_size: int = processor.vocab_size()
        self.bos_token_id: int = processor.bos_id()
        self.eos_token_id: int = processor.eos_id()
        self.pad_token_id: int = processor.pad_id()
        self.unk_token_id: int = processor.unk_id()
        basic = [
            self.pad_token_id,
            self.eos_token_id,
            self.bos_token_id,
            self.unk_token_id,
        ]
        turns = [processor.piece_to_id(piece) for piece in (START_OF_TURN, END_OF_TURN)]
        self.has_turns = self.unk_token_id not in turns
        if self.has_turns:
            basic += turns
        self.all_special_ids: list[int] = sorted(i for i in basic if i >= 0)
        self._special_pieces = {self.id_to_piece(i): i for i in self.all_special_ids}
        pieces = "|".join(map(re.escape, self._special_pieces))
        self._split_special = re.compile(f"({pieces})").split

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read `tokenizer.model` in `folder`.

        Raises:
            ConfigError: There is none, or it is no SentencePiece model.
        """
        path = Path(folder) / "tokenizer.model"
        if not path.is_file():
            hint = "There is no such file."
            if path.with_suffix(".json").is_file():
                hint = "A tokenizer.json alone cannot be read yet."
            allowed = "a folder with a tokenizer.model"
            raise wrong_argument(ConfigError, "tokenizer", allowed, str(folder), hint)
        try:
            return cls(path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"{path} must be a SentencePiece model: {error}.",
                parameter="tokenizer",
                value=str(folder),
            ) from error

    @property
    def bos_token(self) -> str:
        return self.id_to_piece(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        return self.id_to_piece(self.eos_token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        Special pieces spelled in the text become their ids. With `add_special_tokens`
        the ids start with the beginning token; a text that spells it gets no second.
        """
        token_ids: list[int] = []
        for part in self._split_special(text):
            if part in self._special_pieces:
                token_ids.append(self._special_pieces[part])
            elif part:
                token_ids += self._processor.encode(part)
        if add_special_tokens and token_ids[:1] != [self.bos_token_id]:
            token_ids.insert(0, self.bos_token_id)
        return token_ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`.

        Bytes that are not UTF-8, such as an unfinished character, read as U+FFFD.
        """
        text, ordinary = "", []
        for token in ids:
            if not self.is_special(token):
                ordinary.append(int(token))
            elif not skip_special_tokens:
                text += self._processor.decode(ordinary) + self.id_to_piece(token)
                ordinary = []
        return text + self._processor.decode(ordinary)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the pieces of the model, where U+2581 stands for a space."""
        return [self.id_to_piece(token) for token in ids]

    def id_to_piece(self, token_id: int) -> str:
        return self._processor.id_to_piece(int(token_id))

    def is_byte(self, token_id: int) -> bool:
        """Return whether the piece is one byte of a character without a piece."""
        return self._processor.is_byte(int(token_id))

    def is_special(self, token_id: int) -> bool:
        return token_id in self.all_special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        *,
        continue_final_message: bool = False,
    ) -> list[int] | str:
        """Write a conversation in Gemma's turn format.

        Args:
            messages: Each with `role` (user, then assistant or model, in turn) and
                `content`, a string or a list of text parts.
            add_generation_prompt: End with the opening of the model's turn.
            tokenize: Return ids instead of the text.
            continue_final_message: Leave the last turn open, to be continued.

        Raises:
            RequestError: The roles are not allowed or do not take turns.
        """
        if not self.has_turns:
            raise ConfigError(
                f"A chat needs a tokenizer with {START_OF_TURN} and {END_OF_TURN}; "
                "this one lacks them."
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message=True needs add_generation_prompt=False: the "
                "last turn cannot both go on and be over.",
                parameter="continue_final_message",
                value=True,
            )
        text = self.bos_token
        turns = _turns(messages)
        for position, (role, content) in enumerate(turns):
            text += f"{START_OF_TURN}{role}\n{content}"
            if not (continue_final_message and position == len(turns) - 1):
                text += f"{END_OF_TURN}\n"
        if add_generation_prompt:
            text += f"{START_OF_TURN}model\n"
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _turns(messages: object) -> list[tuple[str, str]]:
    """Check a conversation; return Gemma's role name and the text of each turn."""
    if not isinstance(messages, (list, tuple)) or not messages:
        allowed = "a list of at least one {'role': ..., 'content': ...}"
        raise wrong_argument(RequestError, "messages", allowed, messages)
    turns = []
    for position, message in enumerate(messages):
        name = f"messages[{position}]"
        if not isinstance(message, Mapping):
            allowed = "a dict with 'role' and 'content'"
            raise wrong_argument(RequestError, name, allowed, message)
        role = message.get("role")
        if role == "system":
            hint = "Gemma 2 was trained without one: say it in the first user message."
            allowed = "of another role than 'system'"
            raise wrong_argument(RequestError, name, allowed, message, hint)
        if not isinstance(role, str) or role not in _ROLES:
            allowed = "one of 'user', 'assistant', 'model'"
            raise wrong_argument(RequestError, f"{name}['role']", allowed, role)
        turn = ("user", "model")[position % 2]
        if _ROLES[role] != turn:
            hint = "Roles take turns, user first."
            allowed = "'user'" if turn == "user" else "'assistant'"
            raise wrong_argument(RequestError, f"{name}['role']", allowed, role, hint)
        turns.append((turn, _content(name, message.get("content")).strip()))
    return turns


def _content(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        texts = [
            part.get("text")
            for part in content
            if isinstance(part, Mapping) and part.get("type", "text") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    allowed = "a string or a list of {'type': 'text', 'text': ...}"
    raise wrong_argument(RequestError, f"{name}['content']", allowed, content)
