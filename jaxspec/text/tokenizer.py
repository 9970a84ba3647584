"""Owns the tokenizer: text and conversations to token ids, and ids to text.

Independent of requests; `jaxspec.engine.detokenizer` decodes text token by token.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, no_type_check

from jaxspec.errors import ConfigError, RequestError, check_flag
from jaxspec.models.families import DEFAULT_TURNS, Turns
from jaxspec.text.chat_template import (
    ChatTemplate,
    can_hold_template,
    folder_template,
    given_template,
)
from jaxspec.text.chat_turns import Marks, fold_turns, read_messages, read_variables
from jaxspec.text.pieces import Pieces, read_pieces
from jaxspec.text.tools import read_calls, read_tools, write_tools


class Tokenizer:
    """Gemma's tokenizer.

    Attributes:
        pieces: The vocabulary.
        vocab_size: Number of pieces; a network may have more rows than that.
        all_special_ids: Ids of special tokens: bos, eos, pad, unk, turn markers.
        has_turns: Whether the model was trained on turns, and the vocabulary has their
            markers.
        chat_template: Renders conversations; None for the family's turns.
        plain_texts: Text of every token whose text does not depend on its neighbors.
    """

    _turns: Turns | None = None

    def __init__(
        self,
        pieces: Pieces,
        chat_template: ChatTemplate | None = None,
        turns: Turns | None = DEFAULT_TURNS,
    ):
        self.pieces = pieces
        self.chat_template = chat_template
        self.vocab_size = pieces.size
        self.bos_token_id = pieces.named["bos"]
        self.eos_token_id = pieces.named["eos"]
        self.pad_token_id = pieces.named["pad"]
        self.unk_token_id = pieces.named["unk"]
        self._turns = turns
        self.has_turns = turns is not None and (
            set(turns.markers) <= pieces.special.keys()
        )
        self.all_special_ids = sorted(pieces.special.values())
        self._marks = Marks(pieces.special)
        self.plain_texts = PlainTexts(self)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        chat_template: str | None = None,
        turns: Turns | None = DEFAULT_TURNS,
    ) -> "Tokenizer":
        """Read `tokenizer.model`, or else `tokenizer.json`, and the chat template.

        Args:
            chat_template: Used in place of the folder's: a template, or a file's path.
            turns: Turns of the model's family, used if the files cannot contain a
                template. If they could and do not, the tokenizer has no turns.

        Raises:
            ConfigError: There is no tokenizer, or a file cannot be read.
        """
        folder = Path(folder)
        pieces = read_pieces(folder, () if turns is None else turns.markers)
        if chat_template is not None:
            return cls(pieces, given_template(chat_template), turns)
        template = folder_template(folder)
        if template is None and can_hold_template(folder):
            turns = None
        return cls(pieces, template, turns)

    @property
    def digest(self) -> bytes | None:
        """Digest of the tokenizer's file; None without one."""
        return self.pieces.digest

    @property
    def bos_token(self) -> str:
        """Piece of the token that begins a text."""
        return self.id_to_piece(self.bos_token_id)

    @property
    def eos_token(self) -> str:
        """Piece of the token that ends a text."""
        return self.id_to_piece(self.eos_token_id)

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer, in addition to those in the model's files.

        <end_of_turn> if the model has a chat template, which means that it was trained
        on turns; else none.
        """
        if not self.has_turns or self.chat_template is None or self._turns is None:
            return ()
        return (self.pieces.special[self._turns.markers[1]],)

    @property
    def can_chat(self) -> bool:
        """Whether conversations can be rendered: there are turns or a template."""
        return self.has_turns or self.chat_template is not None

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of bos, eos, pad and the turn markers, by piece."""
        ids = [self.bos_token_id, self.eos_token_id, self.pad_token_id]
        if self.has_turns and self._turns is not None:
            ids += [self.pieces.special[piece] for piece in self._turns.markers]
        return {self.id_to_piece(token): token for token in ids if token >= 0}

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        parse_special_tokens: bool = True,
    ) -> list[int]:
        """Return the ids of `text`.

        Args:
            add_special_tokens: Start with the bos token, unless the text already does.
            parse_special_tokens: Encode special pieces in the text as special tokens.
                False encodes them as ordinary text.
        """
        if parse_special_tokens:
            token_ids = self._parse(text)
        else:
            token_ids = self.pieces.encode(text)
        if add_special_tokens and token_ids[:1] != [self.bos_token_id]:
            token_ids.insert(0, self.bos_token_id)
        return token_ids

    @no_type_check
    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True
    ) -> "Encoding":
        """Encode a text, or several, with the interface of HuggingFace's tokenizers."""
        if isinstance(text, str):
            token_ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=token_ids, attention_mask=[1] * len(token_ids))
        rows = [self.encode(one, add_special_tokens) for one in text]
        masks = [[1] * len(row) for row in rows]
        return Encoding(input_ids=rows, attention_mask=masks)

    def __len__(self) -> int:
        return self.vocab_size

    def __bool__(self) -> bool:
        return True  # also if `__len__` is 0

    def get_vocab(self) -> dict[str, int]:
        """Return the ids by piece."""
        return {self.id_to_piece(token): token for token in range(self.vocab_size)}

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int]:
        """Return the id of a piece, or the ids of several; unk's id if unknown."""
        if isinstance(tokens, str):
            return self._ids.get(tokens, self.unk_token_id)
        return [self._ids.get(piece, self.unk_token_id) for piece in tokens]

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return self.get_vocab()

    def _parse(self, text: str, read: Callable[[str], str] = str) -> list[int]:
        """Encode a text with special pieces; `read` converts the parts between them."""
        token_ids: list[int] = []
        for part in self._marks.split(text):
            if part in self.pieces.special:
                token_ids.append(self.pieces.special[part])
            elif part:
                token_ids += self.pieces.encode(read(part))
        return token_ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids of padding rows have none.

        Bytes that are not UTF-8, such as an incomplete character, become U+FFFD.
        """
        text, ordinary = "", []
        for token in map(int, ids):
            if not 0 <= token < self.vocab_size:
                continue
            if not self.is_special(token):
                ordinary.append(token)
            elif not skip_special_tokens:
                text += self.pieces.decode(ordinary) + self.id_to_piece(token)
                ordinary = []
        return text + self.pieces.decode(ordinary)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the pieces of ids, in which U+2581 stands for a space."""
        return [self.id_to_piece(token) for token in ids]

    def id_to_piece(self, token_id: int) -> str:
        """Return the piece of an id; "" for a padding row of the network."""
        is_piece = 0 <= token_id < self.vocab_size
        return self.pieces.id_to_piece(int(token_id)) if is_piece else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's text; empty for special and padding ids."""
        if self.is_special(token_id):
            return b""
        piece = self.id_to_piece(token_id)
        if self.is_byte(token_id):
            return bytes.fromhex(piece[3:5])  # <0x41>
        return piece.replace("\u2581", " ").encode()

    def is_byte(self, token_id: int) -> bool:
        """Return whether the piece is one byte, used for characters without a piece."""
        return 0 <= token_id < self.vocab_size and self.pieces.is_byte(int(token_id))

    def is_special(self, token_id: int) -> bool:
        """Return whether an id is one of `all_special_ids`."""
        return token_id in self.all_special_ids

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        *,
        continue_final_message: bool = False,
        chat_template: str | ChatTemplate | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_special_tokens: bool = False,
        strict_roles: bool = False,
    ) -> list[int] | str:
        """Render a conversation; the other arguments are those of `write_chat`.

        Args:
            conversation: The messages, under HuggingFace's name.
            tokenize: Return ids. With False, the text does not distinguish turn markers
                from those in a message: encoding it lets messages end their turn.
        """
        text, token_ids = self.write_chat(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            parse_special_tokens=parse_special_tokens,
            strict_roles=strict_roles,
        )
        return token_ids if tokenize else text

    @no_type_check  # it has its own checks, with better errors
    def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | ChatTemplate | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_special_tokens: bool = False,
        strict_roles: bool = False,
    ) -> tuple[str, list[int]]:
        """Render a conversation; return its text and its ids.

        Args:
            messages: Each with `role` (user and assistant or model, alternating; system
                or developer; tool) and `content`, a string or a list of text parts. An
                assistant's may have `tool_calls`; a tool's has their result.
            add_generation_prompt: End with the opening of the model's turn.
            continue_final_message: Leave the last turn open, to be continued.
            chat_template: Used in place of the model's: a template, or a file's path.
            chat_template_kwargs: Further variables for the template. One that it does
                not read has no effect.
            tools: Functions that the model may call, as in OpenAI's API. A template
                that reads `tools` gets them and the messages unchanged; for any other
                they are written as text, see `jaxspec.text.tools`.
            parse_special_tokens: Encode special pieces in messages as special tokens.
                Without it a message cannot end its turn.
            strict_roles: Refuse what the template refuses. Without it, texts of a
                system or developer, tools and their results are merged into the user's
                turn if the template has no place for them, and consecutive user
                messages are merged.

        Raises:
            RequestError: The roles are not allowed or do not alternate, or the template
                refuses the messages.
            ConfigError: The template cannot be used.
        """
        for name, flag in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
            ("parse_special_tokens", parse_special_tokens),
            ("strict_roles", strict_roles),
        ):
            check_flag(RequestError, name, flag)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message=True needs add_generation_prompt=False: the "
                "last turn cannot be both continued and closed.",
                parameter="continue_final_message",
                value=True,
            )
        template = self.chat_template
        if chat_template is not None:
            template = given_template(chat_template)
        turns = self._turns or DEFAULT_TURNS
        if template is None and not self.has_turns:
            raise ConfigError(
                "The model has no chat template: it was not trained on conversations. "
                "Send plain prompts (completions), or give a chat_template.",
                parameter="chat_template",
                value=None,
            )
        given = read_calls(read_messages(messages, turns.roles))
        listed = read_tools(tools)
        has_place = template is not None and template.reads_tools
        if listed and strict_roles and not has_place:
            raise RequestError(
                "With strict_roles (a server's --strict-roles), tools need a "
                "chat_template that reads them. Without it the user's turn lists them.",
                parameter="tools",
                value=tools,
            )
        ids = self.pieces.named.items()
        write = functools.partial(
            (template or self._turns).write,
            pieces={f"{name}_token": self.id_to_piece(token) for name, token in ids},
            variables=read_variables(chat_template_kwargs),
        )
        if listed and has_place:
            write = functools.partial(write, tools=list(tools))

        def is_refused(turns: list[dict[str, Any]]) -> bool:
            try:
                write(
                    turns,
                    marks=None,
                    add_generation_prompt=False,
                    continue_final_message=False,
                )
            except RequestError:
                return True
            return False

        def fold() -> list[dict[str, Any]]:
            written = given if has_place else write_tools(given, listed)
            return fold_turns(written, is_refused)

        try:
            marked = write(
                given if strict_roles else fold(),
                marks=None if parse_special_tokens else self._marks,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except RequestError as error:
            if not strict_roles or fold() == given:
                raise
            raise RequestError(
                f"{error} Without strict_roles (a server's --strict-roles), system and "
                "developer messages, and consecutive user messages, are merged into "
                "one user turn.",
                parameter=error.parameter,
                value=error.value,
            ) from error
        return self._marks.off(marked), self._parse(marked, self._marks.off)


class Encoding(dict[str, Any]):
    """Result of calling a tokenizer, with fields as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class NoTokenizer(Tokenizer):
    """Replaces the tokenizer of an engine that has none and takes only token ids.

    Decoding returns no text; encoding a text or a conversation raises an error with the
    reason.
    """

    def __init__(self, reason: str):
        self.chat_template = None
        self.vocab_size = 0
        self.bos_token_id = self.eos_token_id = -1
        self.pad_token_id = self.unk_token_id = -1
        self.has_turns = False
        self.all_special_ids = []
        self.plain_texts = PlainTexts(self)
        self._reason = reason

    def missing(self, name: str, value: object) -> RequestError:
        """Make the error for an operation that needs a tokenizer."""
        return RequestError(
            f"{name} needs a tokenizer, but none is loaded: {self._reason}. Give "
            "token ids as prompts, or set tokenizer.",
            parameter=name,
            value=value,
        )

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        parse_special_tokens: bool = True,
    ) -> list[int]:
        raise self.missing("A text", text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return ""

    @property
    def digest(self) -> bytes | None:
        return None

    def is_byte(self, token_id: int) -> bool:
        return False

    @no_type_check
    def write_chat(
        self, messages: Sequence[Mapping[str, Any]], **_: object
    ) -> tuple[str, list[int]]:
        raise self.missing("A conversation", messages)


def check_same_tokenizer(
    target: Tokenizer,
    draft: Tokenizer,
    hint: str = "",
    names: tuple[str, str] = ("the target", "the draft"),
) -> None:
    """Check that every id has the same piece in both tokenizers.

    Args:
        hint: Part of the error message that names drafts which fit the target.
        names: Names of target and draft in the error.

    Raises:
        ConfigError: Names the first piece that differs.
    """
    token = first_difference(target, draft)
    if token is None:
        return
    ours, theirs = target.id_to_piece(token), draft.id_to_piece(token)
    raise ConfigError(
        "Target and draft must share one tokenizer, because a draft proposes "
        f"token ids: id {token} is {_shown(ours)} for {names[0]} and "
        f"{_shown(theirs)} for {names[1]}. {hint}".rstrip(),
        parameter="speculative_model",
        value=theirs,
    )


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """Return the first id whose pieces differ; None if all are equal."""
    if one is other or (one.digest is not None and one.digest == other.digest):
        return None
    for token in range(max(one.vocab_size, other.vocab_size)):
        if one.id_to_piece(token) != other.id_to_piece(token):
            return token
    return None


def _shown(piece: str) -> str:
    return repr(piece) if piece else "no piece"


class PlainTexts(dict[int, str | None]):
    """Text of every token id; None for special tokens and for single bytes.

    The text of a byte depends on its neighbors, as several bytes form a character.
    Computed on first use.
    """

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        is_plain = not (
            self._tokenizer.is_special(token_id) or self._tokenizer.is_byte(token_id)
        )
        text = self._tokenizer.token_bytes(token_id).decode() if is_plain else None
        self[token_id] = text
        return text
