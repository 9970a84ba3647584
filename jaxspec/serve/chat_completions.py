"""Owns the answers of POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Any

from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.protocol import ChatBody
from jaxspec.serve.response_writers import ChoiceWriter
from jaxspec.serve.serving import Serving


class ChatWriter(ChoiceWriter):
    """Writes messages."""

    kind = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self, serving: Serving, body: ChatBody, params: SamplingParams, request_id: str
    ):
        super().__init__(serving, body, params, f"chatcmpl-{request_id}")
        self._body = body
        self._role = self._role_of(body)
        self._begun: set[int] = set()

    def choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Write a whole message."""
        message = {
            "role": self._role,
            "content": self._echoed() + completion.text,
            "refusal": None,
            "tool_calls": [],
        }
        return self._about(index, completion, {"message": message})

    def deltas(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """Write what is new of a message: first of all, who speaks."""
        if index not in self._begun:
            self._begun.add(index)
            first = self._opening(index, {"role": self._role, "content": ""})
            if self._body.return_token_ids:
                first["prompt_token_ids"] = output.prompt_token_ids
            yield first
            if self._echoed():
                yield self._opening(index, {"content": self._echoed()})
        delta = {"content": completion.text}
        choice = self._about(index, completion, {"delta": delta})
        told = map(choice.get, ("logprobs", "token_ids", "token_origins"))
        if completion.text or any(told) or completion.finished():
            yield choice

    def finish(self, answer: dict[str, Any], output: RequestOutput) -> None:
        """Add what is known of the prompt."""
        body = self._body
        if body.prompt_logprobs is not None:
            told = self.logprobs.for_prompt(self.prompt_logprobs(0))
            answer["prompt_logprobs"] = told
        if body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        if body.return_prompt_text:
            answer["prompt_text"] = output.prompt

    def _opening(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        nothing = CompletionOutput(index=index, text="", token_ids=[])
        told = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return told | self.origins(nothing)

    def _about(
        self, index: int, completion: CompletionOutput, content: dict[str, Any]
    ) -> dict[str, Any]:
        told = None
        if self.params.logprobs is not None and completion.logprobs:
            told = self.logprobs.for_chat(
                completion.token_ids, completion.logprobs, self.params.logprobs
            )
        choice = {
            "index": index,
            **content,
            "logprobs": told,
            "finish_reason": completion.finish_reason,
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
