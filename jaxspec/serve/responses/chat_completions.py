"""Owns the responses of POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import ChatBody
from jaxspec.serve.requests.tool_choice import make_parser, read_choice
from jaxspec.serve.requests.tool_parsers import ToolParser, ToolStream, shown_calls
from jaxspec.serve.responses.response_writers import ChoiceWriter
from jaxspec.serve.serving import Serving


class ChatWriter(ChoiceWriter):
    """Writes chat messages."""

    kind = ("chat.completion", "chat.completion.chunk")
    null_fields = ("token_ids",)

    def __init__(
        self,
        serving: Serving,
        body: ChatBody,
        params: SamplingParams,
        request_id: str,
        num_prompts: int = 1,
    ):
        super().__init__(serving, body, params, f"chatcmpl-{request_id}", num_prompts)
        self._body = body
        self._role = self._role_of(body)
        self._choice = read_choice(body)
        # Tool call parser of each choice, by its index; empty if the model may not call
        # tools.
        self._streams: dict[int, ToolStream] = {}

    def choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Write a complete message."""
        content, calls = self._echoed() + completion.text, []
        parser = self._make_parser()
        if parser is not None:
            found = parser.extract_tool_calls(completion.text, self._body)
            calls = shown_calls(found.tool_calls, self._body)
            content = self._echoed() + (found.content or "")
        is_null = not content and (bool(calls) or self._choice.is_forced)
        message: dict[str, Any] = {
            "role": self._role,
            "content": None if is_null else content,
            # Fields of vLLM's responses that are always null here.
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
            "reasoning": None,
        }
        if calls:
            message["tool_calls"] = [call.model_dump() for call in calls]
        return self._choice_of(index, completion, {"message": message}, bool(calls))

    def openings(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Write the role, and the echoed message."""
        yield self._empty_choice(index, {"role": self._role, "content": ""})
        if self._echoed():
            yield self._empty_choice(index, {"content": self._echoed()})

    def deltas(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """Write the new part of a message."""
        deltas, has_calls = self._split(index, completion)
        delta = deltas[0] if deltas else {"content": ""}
        choice = self._choice_of(index, completion, {"delta": delta}, has_calls)
        token_fields = map(choice.get, ("logprobs", "token_ids", "token_origins"))
        if not (deltas or any(token_fields) or completion.finished()):
            return
        # The parts of one output become several choices: only the first has the fields
        # about tokens, only the last one the finish reason.
        choices = [choice, *(self._empty_choice(index, delta) for delta in deltas[1:])]
        reasons = {name: choice[name] for name in ("finish_reason", "stop_reason")}
        choice |= dict.fromkeys(reasons)
        choices[-1] |= reasons
        yield from choices

    def _split(
        self, index: int, completion: CompletionOutput
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the new parts of a message, and whether a call has begun."""
        text, token_ids = completion.text, list(completion.token_ids)
        if index not in self._streams:
            parser = self._make_parser()
            if parser is None:
                return [{"content": text}] if text else [], False
            self._streams[index] = ToolStream(parser, self._body)
        stream = self._streams[index]
        deltas = stream.deltas(text, token_ids, is_last=completion.finished())
        return deltas, stream.has_calls

    def _make_parser(self) -> ToolParser | None:
        name = self.settings.tool_call_parser
        return make_parser(self._body, self._choice, name, self.tokenizer)

    def _reason(self, completion: CompletionOutput, has_calls: bool) -> str | None:
        """Return the finish reason.

        It is "tool_calls" in place of "stop" if the answer has calls and `tool_choice`
        does not name a tool.
        """
        is_call = has_calls and self._choice.kind != "named"
        if completion.finish_reason == "stop" and is_call:
            return "tool_calls"
        return completion.finish_reason

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return the token ids and the text of the prompt, if requested."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self._body.return_prompt_text:
            fields["prompt_text"] = output.prompt
        return fields

    def finish(self, answer: dict[str, Any], output: RequestOutput) -> None:
        """Add the fields of the prompt."""
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None}
        answer |= self.of_prompt(output)
        if self._body.prompt_logprobs is not None:
            logprobs = self.logprobs.for_prompt(self.prompt_logprobs(0))
            answer["prompt_logprobs"] = logprobs

    def _empty_choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        """Write a choice without tokens."""
        empty = CompletionOutput(index=index, text="", token_ids=[])
        choice = {"index": index, "delta": delta}
        choice |= {"logprobs": None, "finish_reason": None}
        return choice | self.origins(empty)

    def _choice_of(
        self,
        index: int,
        completion: CompletionOutput,
        content: dict[str, Any],
        has_calls: bool,
    ) -> dict[str, Any]:
        logprobs = None
        if self.params.num_logprobs is not None and completion.logprobs:
            logprobs = self.logprobs.for_chat(
                completion.token_ids, completion.logprobs, self.params.logprobs
            )
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": self._reason(completion, has_calls),
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self.shown(completion)
        return choice | self.origins(completion)

    def _role_of(self, body: ChatBody) -> str:
        """Return the answer's role: the last message's if the answer continues it."""
        if body.add_generation_prompt and not body.continue_final_message:
            return self.settings.response_role
        return str(body.messages[-1].get("role"))

    def _echoed(self) -> str:
        """Return the message that the answer continues if it is echoed, else ""."""
        last = self._body.messages[-1]
        is_same = last.get("role") == self._role
        content = last.get("content")
        if not (self._body.echo and is_same and isinstance(content, str)):
            return ""
        return content


class BatchChatWriter(ChatWriter):
    """Writes a choice for each of several conversations."""

    def __init__(
        self,
        serving: Serving,
        bodies: Sequence[ChatBody],
        params: SamplingParams,
        request_id: str,
    ):
        super().__init__(serving, bodies[0], params, request_id, len(bodies))
        self._writers = [
            ChatWriter(serving, body, params, request_id) for body in bodies
        ]

    def choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Write the complete message of a conversation."""
        return self._writers[index].choice(index, completion, output)

    def finish(self, answer: dict[str, Any], output: RequestOutput) -> None:
        """Add the fields of the prompt, which a batch does not have."""
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None}
