"""Owns the responses of POST /v1/messages, complete or as stream events."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, no_type_check

from jaxspec.errors import EngineGenerateError
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.errors import anthropic_error
from jaxspec.serve.requests.anthropic_input import MessagesBody
from jaxspec.serve.requests.protocol import ChatBody
from jaxspec.serve.requests.tool_choice import make_parser, read_choice
from jaxspec.serve.requests.tool_parsers import ToolStream, make_call_id, shown_calls
from jaxspec.serve.responses.response_writers import Numbered, Writer
from jaxspec.serve.serving import Serving

Event = dict[str, Any]


class MessageWriter(Writer):
    """Writes one message, whole or as events."""

    end = ""  # `message_stop` ends a stream

    def __init__(
        self,
        serving: Serving,
        body: MessagesBody,
        chat: ChatBody,
        params: SamplingParams,
        request_id: str,
    ):
        """Make the writer of one message.

        Args:
            chat: The chat request whose answer the message is.
        """
        super().__init__(serving, body, params, f"msg_{request_id}")
        self._chat, self._config = chat, serving.config
        name = serving.settings.tool_call_parser
        self._parser = make_parser(chat, read_choice(chat), name, serving.tokenizer)
        # Number of the block that a stream writes, and its type.
        self._block, self._kind = -1, ""
        self._num_tokens, self._has_calls = 0, False

    def error_event(self, status: int, body: dict[str, Any]) -> dict[str, Any]:
        """Return the event of an error that ends a stream."""
        return anthropic_error(status, body)

    def whole(self, finished: list[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Write the complete message."""
        ((_, output),) = finished
        completion = output.outputs[0]
        text, calls = completion.text, []
        if self._parser is not None:
            found = self._parser.extract_tool_calls(text, self._chat)
            text = found.content or ""
            calls = shown_calls(found.tool_calls, self._chat)
        content: list[Any] = []
        if text or not calls:
            content.append({"type": "text", "text": text})
        for call in calls:
            made = _tool_use(call.id, call.function.name)
            content.append(made | {"input": _arguments(call.function.arguments)})
        self._num_tokens, self._has_calls = len(completion.token_ids), bool(calls)
        message = self._message(output, content) | self._ended(completion)
        self._add_metrics(message, output)
        return message

    @no_type_check  # runtime type checks do not support async generators
    async def chunks(self, outputs: Numbered) -> AsyncGenerator[Event, None]:
        """Write the events of every output when it arrives.

        The opening event is sent with the first output, so that an earlier failure can
        still be an HTTP error.
        """
        stream = self._parser and ToolStream(self._parser, self._chat)
        has_begun = False
        async for _, output in outputs:
            if not has_begun:
                has_begun = True
                message = self._message(output, [])
                yield {"type": "message_start", "message": message}
            completion = output.outputs[0]
            self._num_tokens += len(completion.token_ids)
            for event in self._deltas(completion, stream):
                yield event
        if not self._kind:  # an empty answer
            yield self._opened({"type": "text", "text": ""})
        yield {"type": "content_block_stop", "index": self._block}
        ended = self._ended(completion)
        usage = self._usage_of(output)
        content = {"type": "message_delta", "delta": ended, "usage": usage}
        self._add_metrics(content, output)
        yield content
        yield {"type": "message_stop"}

    def _deltas(
        self, completion: CompletionOutput, stream: ToolStream | None
    ) -> Iterator[Event]:
        text = completion.text
        if stream is None:
            yield from self._add_text(text)
            return
        is_last = completion.finished()
        for delta in stream.deltas(text, list(completion.token_ids), is_last=is_last):
            yield from self._add_text(delta.get("content") or "")
            for call in delta.get("tool_calls", ()):
                yield from self._add_to_call(call)
        self._has_calls = stream.has_calls

    def _add_text(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._kind != "text":
            yield from self._next({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _add_to_call(self, delta: dict[str, Any]) -> Iterator[Event]:
        function = delta["function"]
        if "name" in function:
            call_id = delta.get("id") or make_call_id()
            yield from self._next(_tool_use(call_id, function["name"]))
        if function.get("arguments"):
            part = function["arguments"]
            yield self._delta({"type": "input_json_delta", "partial_json": part})

    def _next(self, block: dict[str, Any]) -> Iterator[Event]:
        """Close the current block, if any, and begin the next."""
        if self._kind:
            yield {"type": "content_block_stop", "index": self._block}
        yield self._opened(block)

    def _opened(self, block: dict[str, Any]) -> Event:
        self._block, self._kind = self._block + 1, block["type"]
        at = self._block
        return {"type": "content_block_start", "index": at, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _message(self, output: RequestOutput, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.settings.model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage_of(output),
        }

    def _ended(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return why the text ended, in Anthropic's terms.

        Raises:
            EngineGenerateError: The server cut it off.
        """
        if completion.finish_reason == "abort":
            raise EngineGenerateError("The text was cut off: the server shuts down.")
        reason, sequence = "end_turn", None
        if completion.finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(completion.stop_reason, str):
            reason, sequence = "stop_sequence", completion.stop_reason
        elif self._has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage_of(self, output: RequestOutput) -> dict[str, Any]:
        """Count tokens; as in vLLM, counts of the prefix cache need a setting.

        With them, input tokens are those that are not in the prefix cache.
        """
        num_prompt = len(output.prompt_token_ids or ())
        usage = {"input_tokens": num_prompt, "output_tokens": self._num_tokens}
        if not self.settings.enable_prompt_tokens_details:
            return usage
        num_cached, num_created = output.num_cached_tokens or 0, 0
        if self._config.enable_prefix_caching:
            # Complete pages are cached.
            num_in_pages = num_prompt - num_prompt % self._config.page_size
            num_created = max(num_in_pages - num_cached, 0)
        return usage | {
            "input_tokens": num_prompt - num_cached - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_cached,
        }


def _tool_use(call_id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}}


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; those that were cut off are no JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"partial_json": text}
