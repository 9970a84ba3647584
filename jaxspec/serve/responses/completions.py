"""Owns the responses of POST /v1/completions."""

from collections.abc import Iterator
from typing import Any

from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import CompletionBody
from jaxspec.serve.responses.logprobs import TextOffsets, prompt_offsets
from jaxspec.serve.responses.response_writers import ChoiceWriter
from jaxspec.serve.serving import Serving


class CompletionWriter(ChoiceWriter):
    """Writes generated texts, each after its prompt if the request sets `echo`."""

    kind = ("text_completion", "text_completion")
    null_fields = ("prompt_logprobs", "prompt_token_ids", "token_ids")

    def __init__(
        self,
        serving: Serving,
        body: CompletionBody,
        params: SamplingParams,
        request_id: str,
        num_prompts: int = 1,
    ):
        super().__init__(serving, body, params, f"cmpl-{request_id}", num_prompts)
        self._body = body
        # With `echo` and `max_tokens=0` the response has only the prompt, although the
        # engine generates one token.
        self._is_echo_only = bool(body.echo) and body.max_tokens == 0
        # Number of characters returned so far, echoed ones included, by index of the
        # choice.
        self._lengths: dict[int, int] = {}
        # Character offsets of tokens by index of the choice, if log-probabilities are
        # requested.
        self._offsets: dict[int, TextOffsets] = {}

    def shown(self, completion: CompletionOutput) -> list[int]:
        """Return the generated tokens that the response shows."""
        return [] if self._is_echo_only else super().shown(completion)

    def deltas(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """Write the new part of a text, unless it is empty."""
        choice = self.choice(index, completion, output)
        fields = ("text", "logprobs", "token_ids", "token_origins")
        if any(map(choice.get, fields)) or completion.finished():
            yield choice

    def choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Write the text, or part of a text, of an output."""
        body, token_ids = self._body, self.shown(completion)
        is_first = index not in self._lengths
        before = self._lengths.get(index, 0)
        text = "" if self._is_echo_only else completion.text
        positions = self._logprobs(completion)
        has_prompt = bool(body.echo) and is_first
        prompt = self._prompt(output) if has_prompt else ""
        text = prompt + text
        length = self._lengths[index] = before + len(text)
        offsets: list[int] = []
        if positions is not None:
            if is_first:
                self._offsets[index] = self._begin_offsets(len(prompt))
            offsets = self._offsets[index].push(token_ids)
            if completion.finished():
                # The text ends before the stop string, so tokens of the stop string get
                # the offset of the text's end.
                offsets = [min(offset, length) for offset in offsets]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if positions or (has_prompt and positions is not None):
            own = self.logprobs.for_completion(token_ids, positions, offsets)
            if has_prompt:
                echoed = self.written_once(
                    index, lambda: self._write_prompt(index, prompt, output)
                )
                own = {name: echoed[name] + own[name] for name in own}
            choice["logprobs"] = own
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.written_once(
                index, lambda: self.logprobs.for_prompt(self.prompt_logprobs(index))
            )
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice | self.origins(completion)

    def _write_prompt(
        self, index: int, prompt: str, output: RequestOutput
    ) -> dict[str, Any]:
        positions = self.prompt_logprobs(index) or []
        count, token_ids = len(positions), output.prompt_token_ids or ()
        offsets = self._prompt_offsets(prompt, output)[:count]
        return self.logprobs.for_completion(token_ids[:count], positions, offsets)

    def finish(self, answer: dict[str, Any], output: RequestOutput) -> None:
        """Add nothing, because the choices have the fields of prompts."""

    def _logprobs(self, completion: CompletionOutput) -> list[Any] | None:
        """Return the logprobs of the shown tokens; None if not requested."""
        if self.params.num_logprobs is None:
            return None
        return [] if self._is_echo_only else list(completion.logprobs or ())

    def _prompt(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.tokenizer.decode(output.prompt_token_ids or [])

    def _begin_offsets(self, start: int) -> TextOffsets:
        is_hidden = self.params.skip_special_tokens
        return TextOffsets(self.tokenizer, start, skip_special_tokens=is_hidden)

    def _prompt_offsets(self, prompt: str, output: RequestOutput) -> list[int]:
        return prompt_offsets(
            self.tokenizer,
            prompt,
            output.prompt_token_ids or (),
            is_spelled=output.prompt is not None,
            is_cut_right=self._body.truncation_side == "right",
        )
