"""Owns the answers of POST /v1/responses: one message, whole or event by event."""

import itertools
from collections.abc import AsyncGenerator, Iterator
from typing import Any, no_type_check

from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.protocol import ResponseBody
from jaxspec.serve.response_input import answered
from jaxspec.serve.response_store import Stored
from jaxspec.serve.response_writers import Numbered, Writer
from jaxspec.serve.serving import Serving

# By why the text ended; what cuts it off otherwise is the server's end.
_STATUS = {"stop": "completed", "length": "incomplete"}
_FAILED = "failed"

Event = dict[str, Any]


def is_kept(serving: Serving, body: ResponseBody) -> bool:
    """Whether a response can be asked for later: as a rule, as with OpenAI."""
    return serving.responses.is_on and body.store is not False


def _raw_message(text: str, tokens: list[int]) -> dict[str, Any]:
    """What the model read, or wrote, in vLLM's form."""
    return {"type": "raw_message_tokens", "message": text, "tokens": tokens}


class ResponseWriter(Writer):
    """Writes one response."""

    # The last event is the end, as with OpenAI and vLLM.
    end = ""

    def __init__(
        self,
        serving: Serving,
        body: ResponseBody,
        params: SamplingParams,
        request_id: str,
        messages: list[dict[str, Any]],
    ):
        """Take what to write about.

        Args:
            messages: The conversation, for whoever goes on from the response.
        """
        super().__init__(serving, body, params, f"resp_{request_id}")
        self._body, self._messages = body, messages
        self._store = serving.responses if is_kept(serving, body) else None
        self._item_id = f"msg_{request_id}"
        self._numbers = itertools.count()
        # What was told of the text so far.
        self._text = ""
        self._logprobs: list[Any] = []
        self._origins: list[Any] = []
        self._tokens: list[int] = []

    def tell(self, status: str, message: str | None = None) -> dict[str, Any]:
        """Write a response that has no text, or none yet, and keep it.

        Args:
            message: Why it failed.
        """
        response = self._response(status, [])
        if message is not None:
            response["error"] = {"code": "server_error", "message": message}
        self._keep(response, self._messages)
        return response

    def _keep(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        if self._store is not None:
            self._store.put(Stored(response, messages))

    async def answer(self, outputs: Numbered) -> dict[str, Any]:
        """Wait for the text, and write the response."""
        output = None
        async for _, output in outputs:
            assert output.finished
        assert output is not None
        self._add(output.outputs[0])
        return self._ended(output)

    @no_type_check  # asynchronous generators are not checked
    async def chunks(self, outputs: Numbered) -> AsyncGenerator[Event, None]:
        """Write the events of every output as it comes.

        The first are told with the first output: until then a failure has a status.
        """
        has_begun = False
        async for _, output in outputs:
            for event in () if has_begun else self._opening():
                yield event
            has_begun = True
            for event in self._deltas(output.outputs[0]):
                yield event
        for event in self._closing(output):
            yield event

    def _opening(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            response = self._response("in_progress", [])
            yield self._event(f"response.{name}", response=response)
        yield self._of_output("output_item.added", item=self._item("in_progress", []))
        yield self._of_part("content_part.added", part=self._part())

    def _deltas(self, completion: CompletionOutput) -> Iterator[Event]:
        logprobs, origins = self._add(completion), self.origins(completion)
        if completion.text or logprobs or any(origins.values()):
            told = {"delta": completion.text, "logprobs": logprobs, **origins}
            yield self._of_part("output_text.delta", **told)

    def _closing(self, output: RequestOutput) -> Iterator[Event]:
        text = {"text": self._text, "logprobs": self._logprobs}
        yield self._of_part("output_text.done", **text)
        yield self._of_part("content_part.done", part=self._part())
        response = self._ended(output)
        yield self._of_output("output_item.done", item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def _add(self, completion: CompletionOutput) -> list[Any]:
        """Note what is new of the text; returns its log-probabilities."""
        told: list[Any] = []
        if self.params.logprobs is not None and completion.logprobs:
            told = self.logprobs.for_chat(
                completion.token_ids, completion.logprobs, self.params.logprobs
            )["content"]
        self._text += completion.text
        self._logprobs += told
        self._origins += self.origins(completion).get("token_origins", [])
        self._tokens += completion.token_ids
        return told

    def _ended(self, output: RequestOutput) -> dict[str, Any]:
        reason = output.outputs[0].finish_reason
        status = _STATUS.get(reason or "", _FAILED)
        has_all = "completed" if status == "completed" else "incomplete"
        response = self._response(status, [self._item(has_all, [self._part()])])
        if reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == _FAILED:
            message = f"The text was cut off ({reason}): the server ends."
            response["error"] = {"code": "server_error", "message": message}
        response["usage"] = self._usage_of(output)
        self._add_metrics(response, output, is_one=True)
        if self._body.enable_response_messages:
            prompt = output.prompt or "", list(output.prompt_token_ids or ())
            response["input_messages"] = [_raw_message(*prompt)]
            response["output_messages"] = [_raw_message(self._text, self._tokens)]
        self._keep(response, answered(self._body, self._messages, self._text))
        return response

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
            text |= body.text.model_dump(by_alias=True, exclude_unset=True)
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
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "background": bool(body.background),
            "store": self._store is not None,
            "user": body.user,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        part = {"type": "output_text", "annotations": []}
        part |= {"text": self._text, "logprobs": list(self._logprobs)}
        if self.params.return_token_origins:
            part["token_origins"] = list(self._origins)
        return part

    def _of_part(self, name: str, **content: Any) -> Event:
        place = {"item_id": self._item_id, "content_index": 0}
        return self._of_output(name, **place, **content)

    def _of_output(self, name: str, **content: Any) -> Event:
        return self._event(f"response.{name}", output_index=0, **content)

    def _event(self, name: str, **content: Any) -> Event:
        return {"type": name, "sequence_number": next(self._numbers), **content}
