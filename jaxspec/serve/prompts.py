"""Converts a request's text or messages to token ids.

Refuses prompts that are too long before they reach the engine, with vLLM's message,
from which clients parse the limit.
"""

import json
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.errors import RequestError, check_choice, refuse, wrong_argument
from jaxspec.inputs import TokensPrompt
from jaxspec.serve.requests.protocol import (
    MAX_TEXTS,
    ChatBody,
    CompletionBody,
    ConversationBody,
    GenerationBody,
)
from jaxspec.serve.requests.tool_choice import read_choice, tools_as_given
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer


class Prompts:
    """Makes the prompts of requests; may be used in any thread."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, settings: ServerSettings
    ):
        self._config, self._tokenizer = config, tokenizer
        self._settings = settings
        pieces = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
        self._longest_bytes = max(map(len, pieces), default=1)

    def of_completion(
        self, body: CompletionBody, max_tokens: int | None
    ) -> list[TokensPrompt]:
        """Encode every prompt of a request.

        Args:
            max_tokens: Maximum number of tokens to generate for each.

        Raises:
            RequestError: There is no prompt, there are too many, or one is too long.
        """
        given = body.prompt
        if given is None or given == "" or given == []:
            raise RequestError(
                "Either prompt or prompt_embeds must be provided and non-empty.",
                parameter="prompt",
                value=given,
            )
        is_one = isinstance(given, str) or isinstance(given[0], int)
        prompts: list[Any] = [given] if is_one else list(given)
        if len(prompts) * (body.n or 1) > MAX_TEXTS:
            allowed = f"prompts for at most {MAX_TEXTS} texts in one request"
            count = f"{len(prompts)} prompts, n={body.n or 1}"
            raise wrong_argument(RequestError, "prompt", allowed, count)
        return [
            self._finish(*self._read(prompt, body), body, max_tokens)
            for prompt in prompts
        ]

    def _read(
        self, prompt: str | list[int], body: CompletionBody
    ) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, prompt
        return prompt, self.encode(prompt, body.add_special_tokens)

    def of_chat(self, body: ChatBody, max_tokens: int | None) -> TokensPrompt:
        """Render and encode a conversation.

        Raises:
            RequestError: The roles do not alternate, or it is too long.
            ConfigError: The request's chat template cannot be used.
        """
        if body.chat_template is None:  # a request's template may leave messages out
            contents = (message.get("content") for message in body.messages)
            texts = [text.strip() for text in contents if isinstance(text, str)]
            texts += [json.dumps(tool) for tool in self._tools(body) or ()]
            self._check_length("".join(texts))
        text, token_ids = self.write(body.messages, body)
        return self._finish(text, token_ids, body, max_tokens)

    def write(
        self, messages: list[dict[str, Any]], body: ConversationBody
    ) -> tuple[str, list[int]]:
        """Render a conversation; return its text and its token ids.

        Raises:
            RequestError: The roles do not alternate, or an option cannot be used.
            ConfigError: The request's chat template cannot be used.
        """
        # As in vLLM: only an explicit add_generation_prompt conflicts, not its default.
        has_both = body.continue_final_message and body.add_generation_prompt
        if has_both and "add_generation_prompt" in body.model_fields_set:
            raise RequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` "
                "to True.",
                parameter="continue_final_message",
                value=True,
            )
        refuse("documents", body.documents)
        return self._tokenizer.write_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt
            and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            chat_template=self._template(body.chat_template),
            chat_template_kwargs=body.chat_template_kwargs,
            tools=self._tools(body),
            strict_roles=self._settings.strict_roles,
        )

    def _tools(self, body: ConversationBody) -> list[dict[str, Any]] | None:
        """Return the tools that the prompt lists."""
        may_exclude = self._settings.exclude_tools_when_tool_choice_none
        if may_exclude and isinstance(body, ChatBody):
            if read_choice(body).kind == "none":
                return None
        return tools_as_given(body)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode a text, unless it is certainly too long."""
        self._check_length(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def _check_length(self, text: str) -> None:
        """Refuse a text that is certainly too long: encoding it would take seconds."""
        min_tokens = len(text.encode()) // self._longest_bytes
        if min_tokens > self._config.max_model_len:
            raise self._too_long(f"at least {min_tokens}", 1)

    def _template(self, given: str | None) -> ChatTemplate | None:
        if given is None:
            return None
        if not self._settings.trust_request_chat_template:
            raise RequestError(
                "Requests may have a chat_template only if the server was started with "
                "--trust-request-chat-template.",
                parameter="chat_template",
            )
        # A request's template is never read as a path: a client could otherwise read
        # the server's files.
        return ChatTemplate(given, "chat_template")

    def _finish(
        self,
        text: str | None,
        token_ids: list[int],
        body: GenerationBody,
        max_tokens: int | None,
    ) -> TokensPrompt:
        token_ids = self._cut(token_ids, body, max_tokens or 1)
        longest = self._config.max_model_len
        if len(token_ids) + (max_tokens or 1) > longest:
            is_room = len(token_ids) < longest
            raise self._too_long(str(len(token_ids)), max_tokens or 1, is_room=is_room)
        prompt: TokensPrompt = {"prompt_token_ids": token_ids}
        if text is not None:
            prompt["prompt"] = text
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        return prompt

    def _cut(
        self, token_ids: list[int], body: GenerationBody, num_asked: int
    ) -> list[int]:
        keep = body.truncate_prompt_tokens
        side = body.truncation_side or "left"
        check_choice(RequestError, "truncation_side", side, ("left", "right"))
        if keep is None:
            return token_ids
        if keep == 0:
            allowed = "at least 1, or -1 for as many tokens as fit"
            raise wrong_argument(RequestError, "truncate_prompt_tokens", allowed, 0)
        if keep == -1:
            keep = max(self._config.max_model_len - num_asked, 1)
        if keep > self._config.max_model_len:
            allowed = f"at most max_model_len={self._config.max_model_len}"
            raise wrong_argument(RequestError, "truncate_prompt_tokens", allowed, keep)
        return token_ids[-keep:] if side == "left" else token_ids[:keep]

    def _too_long(
        self, num_prompt: str, num_asked: int, *, is_room: bool = False
    ) -> RequestError:
        return RequestError(
            "This model's maximum context length is "
            f"{self._config.max_model_len} tokens. However, you requested {num_asked} "
            f"output tokens and your prompt contains {num_prompt} input tokens. Reduce "
            "the length of the input, or the number of requested output tokens.",
            parameter="max_tokens" if is_room else "prompt",
        )
