"""Owns `ServerSettings`: the settings of the server that are not the engine's."""

from dataclasses import dataclass, field
from typing import no_type_check

from jaxspec.errors import (
    ConfigError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_strings,
    wrong_argument,
)
from jaxspec.serve.requests.tool_parsers import GEMMA, parser_class
from jaxspec.serve.response_store import connect

SPEC_METRICS = ("none", "summary")
# A prompt of 8192 tokens is 40 kB of English text; requests with a list of prompts need
# more.
DEFAULT_MAX_BODY_BYTES = 4 * 2**20
# Seconds for headers, and for the body. The largest body arrives within 60 s at 70
# kB/s.
DEFAULT_READ_HEADERS_S, DEFAULT_READ_BODY_S = 30.0, 60.0
# About 20,000 responses with a prompt and a text of 1,000 characters each.
DEFAULT_RESPONSE_STORE_BYTES = 64 * 2**20
_FLAGS = (
    "trust_request_chat_template",
    "strict_roles",
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "enable_request_id_headers",
    "enable_prompt_tokens_details",
    "enable_force_include_usage",
    "enable_per_request_metrics",
    "enable_tokenizer_info_endpoint",
    "enable_server_load_tracking",
    "return_tokens_as_token_ids",
    "reject_unknown_fields",
    "allow_credentials",
    "disable_fastapi_docs",
    "server_dev_mode",
)


# Exempt from jaxtyping's checks in the tests: the class checks its own fields, with
# better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the application; names are those of vLLM's flags.

    Attributes:
        served_model_names: Names that requests may use for the model; responses use the
            first one.
        api_keys: Every request under /v1, to /invocations, and to the endpoints of
            corpora must have one of them; no check if empty. Default: VLLM_API_KEY of
            the environment.
        allowed_origins: Origins of web pages that may read responses; none by default.
        allowed_methods: HTTP methods that those web pages may use; all by default.
        allowed_headers: Request headers that those web pages may send; all by default.
        allow_credentials: Let those web pages send cookies.
        response_role: Role of generated chat messages.
        trust_request_chat_template: Accept chat templates in requests. They run in a
            sandbox, which does not limit their time.
        strict_roles: Refuse roles that the model's template refuses: for Gemma 2 a
            system message and two user messages in a row. By default they are merged
            into the user's turn.
        enable_auto_tool_choice: Let the model choose whether to call tools: in chats
            with `tools` and without a `tool_choice`, or with "auto".
        tool_call_parser: Name of the parser that finds such calls. "gemma" reads the
            format that the prompt describes if the model's template has no tools.
        tool_parser_plugin: A Python file that registers further parsers, as in vLLM.
        exclude_tools_when_tool_choice_none: Leave tools out of the prompt of requests
            with `tool_choice="none"`. On by default, unlike in vLLM.
        enable_request_id_headers: Send X-Request-Id with every response: the id from
            the request, or a new one.
        enable_prompt_tokens_details: Return the number of cached prompt tokens, in
            `usage` and in `timings`.
        enable_force_include_usage: Every chunk of a stream has token counts, without
            a request for them.
        per_request_spec_decode_metrics: "summary" returns each request's acceptance.
        enable_per_request_metrics: Return each request's times.
        enable_tokenizer_info_endpoint: Serve GET /tokenizer_info, with the tokenizer's
            configuration and the chat template.
        enable_server_load_tracking: Serve GET /load, the number of running prompts. On
            by default, unlike in vLLM.
        return_tokens_as_token_ids: Write tokens in logprobs as "token_id:7" unless the
            request sets this itself.
        reject_unknown_fields: Refuse requests with an unknown field, also in an object
            of the request. By default such fields are ignored, and each is logged
            once.
        max_body_bytes: Maximum bytes of a request body; larger requests are refused.
        timeout_read_body: Seconds for the body of a request to arrive.
        max_num_queued_reqs: Maximum number of sequences that may wait for a place in
            the batch; requests that exceed it are refused. None for no limit.
        max_num_queued_tokens: Maximum number of prompt tokens of the waiting sequences;
            requests that exceed it are refused. None for no limit.
        max_request_s: Seconds that one request may take; None for no limit.
        disable_fastapi_docs: Serve neither /docs nor /openapi.json.
        server_dev_mode: Serve /sleep, /wake_up, /is_sleeping, /pause, /resume,
            /is_paused, /reset_prefix_cache and /server_info without an API key, as in
            vLLM. VLLM_SERVER_DEV_MODE=1 in the environment turns it on as well.
        response_store: An SQLite file in which responses (POST /v1/responses) survive a
            restart; by default they are in memory.
        max_response_store_bytes: Maximum total bytes of stored responses, of which the
            oldest are evicted first; 0 to store none.
    """

    served_model_names: tuple[str, ...] = ("model",)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    response_role: str = "assistant"
    trust_request_chat_template: bool = False
    strict_roles: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str = GEMMA
    tool_parser_plugin: str = ""
    exclude_tools_when_tool_choice_none: bool = True
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    per_request_spec_decode_metrics: str = "none"
    enable_per_request_metrics: bool = False
    enable_tokenizer_info_endpoint: bool = False
    enable_server_load_tracking: bool = True
    return_tokens_as_token_ids: bool = False
    reject_unknown_fields: bool = False
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    timeout_read_body: float = DEFAULT_READ_BODY_S
    max_num_queued_reqs: int | None = 1024
    max_num_queued_tokens: int | None = None
    max_request_s: float | None = None
    disable_fastapi_docs: bool = False
    server_dev_mode: bool = False
    response_store: str | None = None
    max_response_store_bytes: int = DEFAULT_RESPONSE_STORE_BYTES

    def __post_init__(self):
        lists = ("served_model_names", "api_keys", "allowed_origins")
        for name in (*lists, "allowed_methods", "allowed_headers"):
            check_strings(ConfigError, name, getattr(self, name))
        for key in self.api_keys:
            if not (key.isascii() and key.isprintable() and key == key.strip()):
                allowed = "printable ASCII without white space at its ends"
                raise wrong_argument(ConfigError, "api_keys", allowed, key)
        if not self.served_model_names:
            raise wrong_argument(ConfigError, "served_model_name", "a name", [])
        for name in _FLAGS:
            check_flag(ConfigError, name, getattr(self, name))
        name = "per_request_spec_decode_metrics"
        check_choice(ConfigError, name, getattr(self, name), SPEC_METRICS)
        parser_class(self.tool_call_parser, self.tool_parser_plugin)
        check_integer(ConfigError, "max_body_bytes", self.max_body_bytes, low=1)
        name = "timeout_read_body"
        check_number(ConfigError, name, getattr(self, name), low=0, open_low=True)
        name = "max_response_store_bytes"
        check_integer(ConfigError, name, getattr(self, name), low=0)
        if self.response_store is not None:
            if not isinstance(self.response_store, str):
                allowed = "the path of a file"
                name = "response_store"
                raise wrong_argument(ConfigError, name, allowed, self.response_store)
            connect(self.response_store).close()
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                check_integer(ConfigError, name, getattr(self, name), low=0)
        if self.max_request_s is not None:
            seconds = self.max_request_s
            check_number(ConfigError, "max_request_s", seconds, low=0, open_low=True)

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        return self.served_model_names[0]
