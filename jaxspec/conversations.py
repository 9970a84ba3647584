"""Owns the input of `LLM.chat`: conversations, and options of rendering them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxspec.errors import RequestError, refuse, wrong_argument
from jaxspec.inputs import TokensPrompt
from jaxspec.text.chat_template import given_template
from jaxspec.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


class ChatOptions(TypedDict, total=False):
    """Options of rendering conversations.

    Attributes:
        add_generation_prompt: Open the model's turn; on unless set.
        continue_final_message: Let the model continue the last message.
        chat_template: Used in place of the model's: a Jinja template, or the path of a
            file with one.
        chat_template_kwargs: Further variables for the template. A variable that the
            template does not use has no effect.
        chat_template_content_format: "auto" or "string": with both, the template gets
            the messages' contents as strings.
        parse_special_tokens: Encode special pieces in messages as special tokens.
            Without it "<end_of_turn>" in a message is text and cannot end its turn.
        strict_roles: Raise an error for conversations that the template rejects.
            Without it, texts of a system or developer are merged into the user's turn
            if the template has no place for them, and consecutive user messages are
            merged.
        tools: Functions that the model may call, as in OpenAI's API. The output is
            plain text, in which a call has the format that the prompt describes: a JSON
            list of `{"name": ..., "parameters": {...}}` unless a template has another.
        tokenization_kwargs, mm_processor_kwargs: Not supported.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    chat_template_content_format: str
    parse_special_tokens: bool
    strict_roles: bool
    tools: Sequence[Mapping[str, Any]] | None
    tokenization_kwargs: Any
    mm_processor_kwargs: Any


def write_conversations(
    tokenizer: Tokenizer, messages: object, options: ChatOptions
) -> list[TokensPrompt]:
    """Render one conversation, or each of a list of them, as prompts.

    Raises:
        RequestError: The roles do not alternate, or an option cannot be used.
        ConfigError: `chat_template` cannot be used.
        UnsupportedError: An option is not supported.
    """
    own: dict[str, Any] = dict(options)
    unknown = own.keys() - ChatOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"chat() got an unexpected keyword argument {min(unknown)!r}")
    for name in ("tokenization_kwargs", "mm_processor_kwargs"):
        refuse(name, own.pop(name, None))
    content_format = own.pop("chat_template_content_format", "auto")
    if content_format not in ("auto", "string"):
        allowed = (
            "'auto' or 'string' (message contents are given to the template as strings)"
        )
        name = "chat_template_content_format"
        raise wrong_argument(RequestError, name, allowed, content_format)
    if own.get("chat_template") is not None:
        own["chat_template"] = given_template(own["chat_template"])
    if not isinstance(messages, (list, tuple)):
        allowed = "a conversation (a list of messages) or a list of them"
        raise wrong_argument(RequestError, "messages", allowed, messages)
    conversations: list[Any] = list(messages)
    if conversations and isinstance(conversations[0], Mapping):
        conversations = [conversations]
    prompts: list[TokensPrompt] = []
    for position, conversation in enumerate(conversations):
        try:
            text, token_ids = tokenizer.write_chat(conversation, **own)
        except RequestError as error:
            if len(conversations) == 1:
                raise
            raise RequestError(
                f"Conversation {position} of {len(conversations)}: {error}",
                parameter=error.parameter,
                value=error.value,
            ) from error
        # The engine uses the ids, because the text may contain a message's turn marker.
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts
