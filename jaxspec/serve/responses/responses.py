"""Owns the responses of POST /v1/responses, complete or as stream events."""

import itertools
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any, no_type_check

from jaxspec.errors import escaped
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import ChatBody, ResponseBody, TextFormat
from jaxspec.serve.requests.response_input import add_answer, call_of
from jaxspec.serve.requests.tool_choice import make_parser, read_choice
from jaxspec.serve.requests.tool_parsers import ToolStream, make_call_id, shown_calls
from jaxspec.serve.response_store import Stored
from jaxspec.serve.responses.response_items import (
    Call,
    ItemEvent,
    Message,
    Token,
    take_tokens,
)
from jaxspec.serve.responses.response_writers import Numbered, Writer
from jaxspec.serve.serving import Serving
from jaxspec.serve.streaming import SHORT_ANSWER

_log = logging.getLogger(__name__)

# Status of a response by the engine's finish reason. Any other reason means that the
# server shut down.
_STATUS = {"stop": "completed", "length": "incomplete"}
_FAILED = "failed"

Event = dict[str, Any]


def is_stored(serving: Serving, body: ResponseBody) -> bool:
    """Return whether a response will be stored: as with OpenAI, by default it is."""
    return serving.responses.is_on and body.store is not False


def _raw_message(text: str, tokens: list[int]) -> dict[str, Any]:
    """Write the model's input or output in vLLM's format."""
    return {"type": "raw_message_tokens", "message": text, "tokens": tokens}


class ResponseWriter(Writer):
    """Writes one response."""

    # As with OpenAI and vLLM, no "[DONE]" follows a stream's last event.
    end = ""

    def __init__(
        self,
        serving: Serving,
        body: ResponseBody,
        chat: ChatBody,
        params: SamplingParams,
        request_id: str,
        messages: list[dict[str, Any]],
        owner: str = "",
    ):
        """Make the writer of one response.

        Args:
            chat: The chat request whose answer the response is.
            messages: The conversation, stored for a later request to continue.
            owner: The only owner who can retrieve the response later.
        """
        super().__init__(serving, body, params, f"resp_{request_id}")
        self._serving, self._chat, self._messages = serving, chat, messages
        self._body = body
        self._store = serving.responses if is_stored(serving, body) else None
        self._request_id, self._owner = request_id, owner
        self._is_added = False
        self._numbers = itertools.count()
        name = serving.settings.tool_call_parser
        self._parser = make_parser(chat, read_choice(chat), name, serving.tokenizer)
        self._stream = None
        if self._parser is not None:
            self._stream = ToolStream(self._parser, chat)
        self._items: list[Message | Call] = []
        # The generated text so far.
        self._text = ""
        self._tokens: list[int] = []
        # Tokens whose text the tool parser still holds back.
        self._waiting: list[Token] = []

    def write_status(self, status: str, message: str | None = None) -> dict[str, Any]:
        """Write and store a response without output.

        Args:
            message: Error message of a failed response.
        """
        response = self._response(status, [])
        if message is not None:
            response["error"] = {"code": "server_error", "message": message}
        self._put(response, self._messages)
        return response

    def last_event(self, response: dict[str, Any]) -> Event:
        """Write the event that ends a stream; its name is the response's status."""
        return self._event(response["status"], response=response)

    def _put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        if self._store is None:
            return
        stored = Stored(response, messages)
        if self._is_added:
            self._store.update(stored, self._owner)
        elif not self._store.add(stored, self._owner):
            _log.warning(
                "%s is not stored: another response has this id", escaped(self.id)
            )
        self._is_added = True

    def store_events(self, events: list[Event]) -> None:
        """Store the streamed events of the response."""
        if self._store is not None:
            self._store.put_events(self.id, events, self._owner)

    def whole(self, finished: list[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Write the complete response."""
        ((_, output),) = finished
        assert output.finished
        self._add_whole(output.outputs[0])
        return self._ended(output)

    @no_type_check  # runtime type checks do not support async generators
    async def chunks(self, outputs: Numbered) -> AsyncGenerator[Event, None]:
        """Write the events of every output when it arrives.

        The opening events are sent with the first output, so that an earlier failure
        can still be an HTTP error. Those of a background response are sent at once.
        """
        has_begun = False
        if self._body.background:
            # The client of a background response needs its id at once, to be able to
            # stream it again after a lost connection.
            has_begun = True
            for event in self._opening():
                yield event
        async for _, output in outputs:
            for event in () if has_begun else self._opening():
                yield event
            has_begun = True
            for event in self._deltas(output.outputs[0]):
                yield event
        num_logprobs = self.params.num_logprobs
        if num_logprobs is None:
            num_logprobs = 0
        elif num_logprobs < 0:
            num_logprobs = SHORT_ANSWER
        closing = await self._serving.write(
            lambda: list(self._closing(output)),
            is_large=len(self._tokens) * (1 + num_logprobs) > SHORT_ANSWER,
        )
        for event in closing:
            yield event

    def _opening(self) -> Iterator[Event]:
        begun = "queued" if self._body.background else "in_progress"
        for name, status in (("created", begun), ("in_progress", "in_progress")):
            yield self._event(name, response=self._response(status, []))
        if self._stream is None:  # no calls are possible
            yield from self._begin(self._make_message())

    def _deltas(self, completion: CompletionOutput) -> Iterator[Event]:
        self._waiting += self._read(completion)
        if self._stream is None:
            waiting, self._waiting = self._waiting, []
            yield from self._add_text(completion.text, waiting)
            return
        text, token_ids = completion.text, list(completion.token_ids)
        for delta in self._stream.deltas(
            text, token_ids, is_last=completion.finished()
        ):
            words = delta.get("content")
            if words is not None:
                tokens = take_tokens(self._waiting, words)
                yield from self._add_text(words, tokens)
            for call in delta.get("tool_calls", ()):
                yield from self._add_to_call(call)

    def _add_text(self, words: str, tokens: list[Token]) -> Iterator[Event]:
        message = self._items[-1] if self._items else None
        if not isinstance(message, Message):
            message = self._make_message()
            yield from self._begin(message)
        event = message.add(words, tokens)
        if event is not None:
            yield self._write(event)

    def _add_to_call(self, delta: dict[str, Any]) -> Iterator[Event]:
        function = delta["function"]
        if "name" in function:
            call_id = delta.get("id") or make_call_id()
            call = self._make_call(call_id, function["name"])
            yield from self._begin(call)
        call = self._items[-1]
        assert isinstance(call, Call)
        if function.get("arguments"):
            yield self._write(call.add(function["arguments"]))

    def _closing(self, output: RequestOutput) -> Iterator[Event]:
        if not self._items:
            yield from self._begin(self._make_message())
        item = self._items[-1]
        if isinstance(item, Message) and len(self._items) == 1:
            # The answer has no tool call: the remaining tokens, such as an end token,
            # belong to the message.
            yield from self._add_text("", self._waiting)
        response = self._ended(output)
        for event in item.closing(response["output"][-1]["status"]):
            yield self._write(event)
        yield self.last_event(response)

    def _begin(self, item: Message | Call) -> Iterator[Event]:
        """Close the previous item and begin the next."""
        *_, last = (None, *self._items)
        for event in () if last is None else last.closing("completed"):
            yield self._write(event)
        self._items.append(item)
        yield from map(self._write, item.opening())

    def _make_message(self) -> Message:
        at = len(self._items)
        item_id = f"msg_{self._request_id}" + (f"_{at}" if at else "")
        return Message(item_id, at, has_origins=self.params.return_token_origins)

    def _make_call(self, call_id: str, name: str) -> Call:
        at = len(self._items)
        return Call(f"fc_{self._request_id}_{at}", at, call_id=call_id, name=name)

    def _add_whole(self, completion: CompletionOutput) -> None:
        """Add the items of a complete answer: its message and its tool calls."""
        tokens, words, calls = self._read(completion), completion.text, []
        if self._parser is not None:
            found = self._parser.extract_tool_calls(words, self._chat)
            words, calls = found.content or "", found.tool_calls
            calls = shown_calls(calls, self._chat)
            tokens = take_tokens(tokens, words) if calls else tokens
        if words or not calls:
            message = self._make_message()
            message.add(words, tokens)
            self._items.append(message)
        for call in calls:
            item = self._make_call(call.id, call.function.name)
            item.add(call.function.arguments)
            self._items.append(item)

    def _read(self, completion: CompletionOutput) -> list[Token]:
        """Record new text; return its tokens if logprobs or origins are requested."""
        self._text += completion.text
        self._tokens += completion.token_ids
        logprobs: list[Any] = []
        if self.params.num_logprobs is not None and completion.logprobs:
            logprobs = self.logprobs.for_chat(
                completion.token_ids, completion.logprobs, self.params.logprobs
            )["content"]
        origins = self.origins(completion).get("token_origins", [])
        if not (logprobs or origins):
            return []
        return [
            Token(self.tokenizer.token_bytes(token), logprob, origin)
            for token, logprob, origin in itertools.zip_longest(
                completion.token_ids, logprobs, origins
            )
        ]

    def _ended(self, output: RequestOutput) -> dict[str, Any]:
        reason = output.outputs[0].finish_reason
        status = _STATUS.get(reason or "", _FAILED)
        *before, last = self._items
        items = [item.as_json("completed") for item in before]
        items.append(
            last.as_json("completed" if status == "completed" else "incomplete")
        )
        response = self._response(status, items)
        if reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == _FAILED:
            message = f"The text was cut off ({reason}): the server shuts down."
            response["error"] = {"code": "server_error", "message": message}
        response["usage"] = self._usage_of(output)
        self._add_metrics(response, output)
        if self._body.enable_response_messages:
            prompt = output.prompt or "", list(output.prompt_token_ids or ())
            response["input_messages"] = [_raw_message(*prompt)]
            response["output_messages"] = [_raw_message(self._text, self._tokens)]
        self._put(response, add_answer(self._body, self._messages, *self._answer()))
        return response

    def _answer(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the answer's text and calls, which a later request continues."""
        calls = [item for item in self._items if isinstance(item, Call)]
        if not all(_is_whole(call) for call in calls):
            return self._text, []  # a call that was cut off is stored as text
        words = [item.text for item in self._items if isinstance(item, Message)]
        made = [call_of(one.call_id, one.name, one.arguments) for one in calls]
        return "".join(words), made

    def _usage_of(self, output: RequestOutput) -> dict[str, Any]:
        num_input = len(output.prompt_token_ids or ())
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
            "output_tokens": len(self._tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + len(self._tokens),
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self.params
        text: dict[str, Any] = {"format": {"type": "text"}}
        if body.text is not None:
            known = {"format": set(TextFormat.model_fields)}
            text |= body.text.model_dump(
                by_alias=True, exclude_unset=True, include=known
            )
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.settings.model_name,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_output_tokens": params.max_tokens,
            "top_logprobs": params.logprobs,
            "text": text,
            "truncation": body.truncation or "disabled",
            "tools": [_with_null_fields(tool) for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "background": bool(body.background),
            "store": self._store is not None,
            "user": body.user,
        }

    def _write(self, event: ItemEvent) -> Event:
        name, content = event
        return self._event(name, **content)

    def _event(self, name: str, /, **content: Any) -> Event:
        number = next(self._numbers)
        return {"type": f"response.{name}", "sequence_number": number, **content}


def _is_whole(call: Call) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


def _with_null_fields(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function with null for the fields that the request left out."""
    if tool.get("type") != "function":
        return tool
    return dict.fromkeys(("description", "parameters", "strict")) | tool
