"""Owns the schemas of request bodies: OpenAI's fields and vLLM's.

Only types are checked here; `SamplingParams` and the engine check the values. Unknown
fields are ignored, as in vLLM, and reported (`unknown_fields`).
"""

import logging
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Maximum number of sequences that one request may generate. Each is a separate request
# to the engine.
MAX_TEXTS = 1024
MAX_N = 128
# Maximum nesting of a body's lists and objects: deeper nesting could exceed Python's
# recursion limit in later code.
MAX_DEPTH = 100
# Maximum number of fields of one object, and of entries of one list, both validated one
# by one while all streams wait. Integers in a list do not count, because token ids are
# validated quickly.
MAX_FIELDS = 1024
MAX_ENTRIES = 8192
# Maximum number of stop strings: the text is compared with all of them after each
# token.
MAX_STOPS = 64
MAX_BAD_WORDS = 1024
# Maximum characters of a bad word, far above the engine's own limit: encoding a long
# word takes time.
MAX_BAD_WORD_CHARACTERS = 1024


class FieldError(ValueError):
    """An error of one field, raised by a validator of the whole body.

    Attributes:
        field: The field's name; empty for the body itself.
    """

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class FirstFault(FailFast):
    """Reports only the first invalid entry of a list, which may have a million."""

    # Python requires a hash for types in a union with `|`.
    def __hash__(self) -> int:
        return id(self)


Entries = Annotated[list[T], FirstFault()]


class Part(BaseModel):
    """An object in a request. Keeps unknown fields, in order to report them.

    Attributes:
        entry_fields: Known fields of the objects in a list, by the list's name, for
            lists of plain dicts.
    """

    model_config = ConfigDict(extra="allow")

    entry_fields: ClassVar[dict[str, frozenset[str]]] = {}


class UnknownField(NamedTuple):
    """An unknown field, and the names of the known ones.

    Attributes:
        place: Prefix of its path, such as "stream_options." or "messages[2].".
    """

    place: str
    name: str
    known: frozenset[str]


def unknown_fields(part: Part, place: str = "") -> Iterator[UnknownField]:
    """Find the unknown fields of a request and of the objects in it."""
    fields = type(part).model_fields
    if part.model_extra:
        known = frozenset(field.alias or name for name, field in fields.items())
        for name in sorted(part.model_extra):
            yield UnknownField(place, name, known)
    for name, value in part.__dict__.items():
        if isinstance(value, Part):
            yield from unknown_fields(value, f"{place}{fields[name].alias or name}.")
        elif isinstance(value, list):
            known = part.entry_fields.get(name)
            for at, entry in enumerate(value):
                where = f"{place}{name}[{at}]."
                if isinstance(entry, Part):
                    yield from unknown_fields(entry, where)
                elif known is None or not isinstance(entry, dict):
                    break  # all entries have one type, such as token ids
                else:
                    for one in sorted(entry.keys() - known):
                        yield UnknownField(where, one, known)


class Body(Part):
    """Fields of every request."""

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_values(cls, body: Any) -> Any:
        """Refuse bodies that are slow to process, and lone surrogates."""
        if not isinstance(body, dict):
            return body
        _check_size("", body)
        for name, value in body.items():
            _check_field(name, value)
        return body


def _check_field(name: str, content: Any) -> None:
    """Check the name of a field and its content."""
    if not _is_utf8(name):
        raise FieldError(
            "",
            "the name of a field has an unpaired surrogate, which is not valid Unicode",
        )
    level, depth = [content], 1
    while level:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                if value and depth == MAX_DEPTH:
                    allowed = f"be nested at most {MAX_DEPTH} levels deep"
                    raise FieldError(name, f"the field must {allowed}")
                inner += _check_size(name, value)
            elif isinstance(value, str) and not _is_utf8(value):
                raise FieldError(
                    name, "a text has an unpaired surrogate, which is not valid Unicode"
                )
        level, depth = inner, depth + 1


def _check_size(name: str, value: dict[str, Any] | list[Any]) -> list[Any]:
    """Check the number of entries; return the entries that need checks themselves."""
    if isinstance(value, dict):
        if len(value) > MAX_FIELDS:
            allowed = f"at most {MAX_FIELDS} fields"
            raise FieldError(name, f"an object may have {allowed}, got {len(value)}")
        return [*value.keys(), *value.values()]
    found = [one for one in value if type(one) is not int]
    if len(found) > MAX_ENTRIES:
        allowed = f"at most {MAX_ENTRIES} entries other than integers"
        raise FieldError(name, f"a list may have {allowed}, got {len(found)}")
    return found


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StreamOptions(Part):
    """Options for token counts in a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Part):
    """OpenAI's wrapping of a JSON schema."""

    # An alias, because pydantic's BaseModel has a method `schema`.
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Part):
    """OpenAI's `response_format`, and vLLM's structural tags.

    Attributes:
        structures, triggers, format: Of a structural tag.
    """

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: Entries[dict[str, Any]] | None = None
    triggers: Entries[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: the fields of `StructuredOutputsParams`."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    # An alias, because pydantic's BaseModel has a method `json`.
    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Entries[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerationBody(Body):
    """Fields of all endpoints that generate.

    Attributes:
        include_metrics: Return this request's acceptance and times.
        num_speculative_tokens: Maximum number of draft tokens per step.
        return_token_origins: Return the origin of each token: see `TokenOrigin`.
    """

    # OpenAI's.
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Annotated[Entries[str], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    # vLLM's, for sampling.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    stop_token_ids: Entries[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Entries[int] | None = None
    bad_words: (
        Annotated[
            Entries[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]],
            Field(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Entries[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    logprob_token_ids: Entries[int] | None = None
    stream_interval: int | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    vllm_xargs: dict[str, Any] | None = None
    num_speculative_tokens: int | None = None

    # vLLM's, for everything else.
    echo: bool | None = False
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = Field(default=None, max_length=256)
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    include_metrics: bool | None = False
    return_token_origins: bool | None = False


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: str | Entries[str] | Entries[int] | Entries[Entries[int]] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True


class FunctionDefinition(Part):
    """A function that the model may call, its parameters as a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Part):
    """OpenAI's wrapping of a function."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


def is_function(tool: object) -> bool:
    """Return False, and log a warning, for a tool of another type than "function".

    Clients also send tools that the provider's server runs, such as a web search. The
    prompt lists functions only. An invalid tool returns True: it is refused later.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return True
    _log.warning("a tool of type %r is ignored: models call functions only", kind)
    return False


# OpenAI's, current and deprecated, and vLLM's: clients send back messages as received.
_MESSAGE_FIELDS = """
    role content name refusal audio annotations function_call tool_calls tool_call_id
    reasoning reasoning_content tools
"""
_ITEM_FIELDS = """
    type id status role content phase name arguments call_id output summary
    encrypted_content
"""


class ConversationBody(Body):
    """Fields of a conversation; see `jaxspec.conversations`."""

    entry_fields = {"messages": frozenset(_MESSAGE_FIELDS.split())}

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Entries[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    tools: Entries[ChatTool] | None = None

    @model_validator(mode="before")
    @classmethod
    def drop_other_tools(cls, body: Any) -> Any:
        """Remove tools that are not functions."""
        tools = body.get("tools") if isinstance(body, dict) else None
        if not isinstance(tools, list) or not tools:
            return body
        functions = [tool for tool in tools if is_function(tool)]
        body = body | {"tools": functions or None}
        if not functions and body.get("tool_choice") == "auto":
            body["tool_choice"] = None
        return body


class ChatBody(GenerationBody, ConversationBody):
    """Body of POST /v1/chat/completions."""

    messages: Entries[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=-1)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = False


class BatchChatBody(ChatBody):
    """Body of POST /v1/chat/completions/batch: several conversations."""

    messages: Entries[Annotated[Entries[dict[str, Any]], Field(min_length=1)]] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        min_length=1
    )

    def conversations(self) -> list[ChatBody]:
        """Return a request for each conversation."""
        return [self.model_copy(update={"messages": one}) for one in self.messages]


class TextFormat(Part):
    """Format of a response's text: OpenAI's `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Part):
    """OpenAI's `text`."""

    format: TextFormat | None = None


# OpenAI's values of `include`. Most have no effect here, and are accepted for clients
# that always send them.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponseBody(GenerationBody):
    """Body of POST /v1/responses; see `jaxspec.serve.requests.response_input`."""

    entry_fields = {
        "input": frozenset(_ITEM_FIELDS.split()),
        "tools": frozenset({"type", *FunctionDefinition.model_fields}),
    }

    input: str | Entries[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: Entries[Includable] | None = None
    top_logprobs: int | None = Field(default=None, ge=-1)
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    tools: Entries[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    enable_response_messages: bool | None = None
    conversation: Any = None
    prompt: Any = None


class TokenizeBody(ConversationBody):
    """Body of POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Entries[dict[str, Any]] | None = Field(default=None, min_length=1)
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    tokens: Entries[int]
