"""Owns what `LLM.chat` takes: one conversation or several, and how they are written."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxspec.errors import RequestError, refuse, wrong_argument
from jaxspec.inputs import TokensPrompt
from jaxspec.text.chat_template import given_template
from jaxspec.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


class ChatOptions(TypedDict, total=False):
    """How conversations are written.

    Attributes:
        add_generation_prompt: Open the model's turn; on unless set.
        continue_final_message: Let the model go on with the last message.
        chat_template: Used in place of the model's: a Jinja template, or the path of a
            file with one.
        chat_template_kwargs: More variables for the template. One that it does not read
            changes nothing.
        chat_template_content_format: "auto" or "string": contents are texts.
        parse_special_tokens: Let special pieces spelled in messages count. Without it
            "<end_of_turn>" in a message is text and cannot end its turn.
        strict_roles: Refuse what the template refuses. Without it the user's turn says
            what a system or a developer does where there is no turn for them, and user
            messages in a row are one turn.
        tools: Functions that the model may call, as in OpenAI's API. Answers are texts
            as ever: calls in them are in the form that the model was told, a JSON list
            of `{"name": ..., "parameters": {...}}` unless a template says otherwise.
        tokenization_kwargs: Not supported; `mm_processor_kwargs` neither.
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
    """Write one conversation, or each of a list of them, as prompts.

    Raises:
        RequestError: The roles do not take turns, or an option cannot be used.
        ConfigError: `chat_template` cannot be used.
        UnsupportedError: An option asks for what there is not.
    """
    own: dict[str, Any] = dict(options)
    unknown = own.keys() - ChatOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"chat() got an unexpected keyword argument {min(unknown)!r}")
    for name in ("tokenization_kwargs", "mm_processor_kwargs"):
        refuse(name, own.pop(name, None))
    content_format = own.pop("chat_template_content_format", "auto")
    if content_format not in ("auto", "string"):
        allowed = "'auto' or 'string': contents are given to the template as texts"
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
        # The ids decide: in the text a message may spell a turn marker.
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts
