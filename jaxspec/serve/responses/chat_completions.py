"""Owns the answers of POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Any

from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import ChatBody
from jaxspec.serve.requests.tool_choice import make_parser, read_choice
from jaxspec.serve.requests.tool_parsers import ToolParser, ToolStream, shown_calls
from jaxspec.serve.responses.response_writers import ChoiceWriter
from jaxspec.serve.serving import Serving


class ChatWriter(ChoiceWriter):
    """Writes messages."""

    kind = ("chat.completion", "chat.completion.chunk")
    unasked = ("token_ids",)

    def __init__(
        self, serving: Serving, body: ChatBody, params: SamplingParams, request_id: str
    ):
        super().__init__(serving, body, params, f"chatcmpl-{request_id}")
        self._body = body
        self._role = self._role_of(body)
        self._choice = read_choice(body)
        # By text, where the model may call.
        self._streams: dict[int, ToolStream] = {}

    def choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Write a whole message."""
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
            # vLLM's fields that are null here.
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
            "reasoning": None,
        }
        if calls:
            message["tool_calls"] = [call.model_dump() for call in calls]
        return self._about(index, completion, {"message": message}, bool(calls))

    def openings(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Write who speaks, and what is repeated."""
        yield self._opening(index, {"role": self._role, "content": ""})
        if self._echoed():
            yield self._opening(index, {"content": self._echoed()})

    def deltas(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """Write what is new of a message."""
        deltas, has_calls = self._split(index, completion)
        delta = deltas[0] if deltas else {"content": ""}
        choice = self._about(index, completion, {"delta": delta}, has_calls)
        told = map(choice.get, ("logprobs", "token_ids", "token_origins"))
        if not (deltas or any(told) or completion.finished()):
            return
        # The first tells of the tokens, the last why it is the last.
        choices = [choice, *(self._opening(index, delta) for delta in deltas[1:])]
        why = {name: choice[name] for name in ("finish_reason", "stop_reason")}
        choice |= dict.fromkeys(why)
        choices[-1] |= why
        yield from choices

    def _split(
        self, index: int, completion: CompletionOutput
    ) -> tuple[list[dict[str, Any]], bool]:
        """What is new of a message, in parts, and whether it has called by then."""
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
        """Why a text ended; as with OpenAI, a call that was named is no reason."""
        is_call = has_calls and self._choice.kind != "named"
        if completion.finish_reason == "stop" and is_call:
            return "tool_calls"
        return completion.finish_reason

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return the tokens and the text of the prompt, where they are asked for."""
        told: dict[str, Any] = {}
        if self._body.return_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        if self._body.return_prompt_text:
            told["prompt_text"] = output.prompt
        return told

    def finish(self, answer: dict[str, Any], output: RequestOutput) -> None:
        """Add what is known of the prompt."""
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None}
        answer |= self.of_prompt(output)
        if self._body.prompt_logprobs is not None:
            told = self.logprobs.for_prompt(self.prompt_logprobs(0))
            answer["prompt_logprobs"] = told

    def _opening(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        nothing = CompletionOutput(index=index, text="", token_ids=[])
        told = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return told | self.origins(nothing)

    def _about(
        self,
        index: int,
        completion: CompletionOutput,
        content: dict[str, Any],
        has_calls: bool,
    ) -> dict[str, Any]:
        told = None
        if self.params.num_logprobs is not None and completion.logprobs:
            told = self.logprobs.for_chat(
                completion.token_ids, completion.logprobs, self.params.logprobs
            )
        choice = {
            "index": index,
            **content,
            "logprobs": told,
            "finish_reason": self._reason(completion, has_calls),
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = self.shown(completion)
        return choice | self.origins(completion)

    def _role_of(self, body: ChatBody) -> str:
        """Who speaks: a turn that goes on is still the last message's."""
        if body.add_generation_prompt and not body.continue_final_message:
            return self.settings.response_role
        return str(body.messages[-1].get("role"))

    def _echoed(self) -> str:
        """The message that the answer continues, if it is to be told again."""
        last = self._body.messages[-1]
        is_same = last.get("role") == self._role
        content = last.get("content")
        if not (self._body.echo and is_same and isinstance(content, str)):
            return ""
        return content
