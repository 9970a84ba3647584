"""Owns the base classes that write the responses of generating endpoints."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar, no_type_check

from jaxspec.errors import RequestError
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import GenerationBody
from jaxspec.serve.responses.logprobs import LogprobWriter
from jaxspec.serve.responses.usage import Usage, request_metrics
from jaxspec.serve.serving import Serving
from jaxspec.serve.streaming import DONE

T = TypeVar("T")

# The engine's outputs, each with the index of its prompt in the request.
Numbered = AsyncGenerator[tuple[int, RequestOutput], None]


# Maximum number of log-probabilities and token ids of one response: about 25 MB of
# JSON.
MAX_ENTRIES = 2**20


class Writer(ABC):
    """Writes the response to one request, whole or in chunks.

    Attributes:
        id: Id of the response.
        created: Time of its creation, in seconds since 1970.
        end: Text that ends a stream, after the last chunk.
    """

    end = DONE

    def __init__(
        self,
        serving: Serving,
        body: GenerationBody,
        params: SamplingParams,
        request_id: str,
        num_prompts: int = 1,
    ):
        settings = serving.settings
        self.tokenizer, self.settings, self.params = serving.tokenizer, settings, params
        as_ids = body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = settings.return_tokens_as_token_ids
        self.logprobs = LogprobWriter(serving.tokenizer, as_ids=as_ids)
        # Logprobs of each prompt, by its number. Kept because only the first output of
        # a prompt has them.
        self._prompt_logprobs: dict[int, list[Any]] = {}
        self._written: dict[int, Any] = {}
        # Whether a stream ends with token counts, and whether every chunk has them.
        self._has_usage = self._counts_each = settings.enable_force_include_usage
        options = body.stream_options
        if options is not None and options.include_usage:
            self._has_usage = True
            self._counts_each |= options.continuous_usage_stats
        wanted = self._wants_metrics = bool(body.include_metrics)
        self._metrics = {
            "has_drafts": wanted or settings.per_request_spec_decode_metrics != "none",
            "has_times": wanted or settings.enable_per_request_metrics,
        }
        self._has_one_text = num_prompts * params.n == 1
        self._usage = Usage(
            has_details=settings.enable_prompt_tokens_details,
            has_drafts=self._metrics["has_drafts"],
        )
        self._is_stream, self._has_ids = body.stream, bool(body.return_token_ids)
        self._has_prompt_logprobs = getattr(body, "prompt_logprobs", None) is not None
        self.id, self.created = request_id, int(time.time())

    def check_size(
        self, lengths: list[int], max_model_len: int, vocab_size: int
    ) -> int:
        """Return the number of entries of a response whose texts have maximum length.

        Entries are the log-probabilities and token ids of prompts and, unless the
        response is a stream, the log-probabilities of generated tokens: a stream sends
        those one by one.

        Args:
            lengths: Number of tokens of each prompt.

        Raises:
            RequestError: The number is above `MAX_ENTRIES`.
        """

        def entries(num_logprobs: int | None) -> int:
            if num_logprobs is None:
                return 0
            return 1 + (vocab_size if num_logprobs < 0 else num_logprobs)

        params = self.params
        of_prompt = entries(params.prompt_logprobs) + self._has_ids
        of_text = 0 if self._is_stream else entries(params.num_logprobs)
        size = 0
        for length in lengths:
            longest = max_model_len - length
            longest = min(longest, params.max_tokens or longest)
            size += params.n * (length * of_prompt + longest * of_text)
        if size > MAX_ENTRIES:
            is_of_prompt = self._has_prompt_logprobs and of_prompt >= of_text
            name = "prompt_logprobs" if is_of_prompt else "logprobs"
            raise RequestError(
                f"The response may have {size} log-probabilities and token ids: n "
                f"times tokens of prompt and text times logprobs. At most {MAX_ENTRIES}"
                " are allowed: lower n, max_tokens or logprobs, or send fewer prompts.",
                parameter=name,
            )
        return size

    async def answer(self, outputs: Numbered) -> dict[str, Any]:
        """Wait until all output is generated, and write the complete response."""
        return self.whole([one async for one in outputs])

    @abstractmethod
    def whole(self, finished: list[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Write the response from the last output of every prompt, with its number."""

    def error_event(self, status: int, body: dict[str, Any]) -> dict[str, Any]:
        """Return the event of an error that ends a stream."""
        return body

    @abstractmethod
    def chunks(self, outputs: Numbered) -> AsyncGenerator[dict[str, Any], None]:
        """Write the chunks of every output when it arrives."""

    def shown(self, completion: CompletionOutput) -> list[int]:
        """Return the generated tokens that the response shows."""
        return list(completion.token_ids)

    def origins(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the field `token_origins` of the shown tokens, if requested.

        Echoed tokens have no origin.
        """
        if not self.params.return_token_origins:
            return {}
        origins = (completion.token_origins or [])[: len(self.shown(completion))]
        return {"token_origins": [one._asdict() for one in origins]}

    def _add_metrics(self, content: dict[str, Any], output: RequestOutput) -> None:
        if any(self._metrics.values()):
            content["metrics"] = (
                request_metrics(output, **self._metrics) if self._has_one_text else None
            )

    def _add_timings(self, content: dict[str, Any], output: RequestOutput) -> None:
        """Add llama.cpp's `timings` if the request is for one text."""
        if self._has_one_text and output.metrics is not None:
            content["timings"] = self._usage.timings(output.metrics)


class ChoiceWriter(Writer):
    """Writes texts as choices, for completions and chats.

    Attributes:
        kind: The field "object" of a response, and of its chunks.
        null_fields: Fields of a complete choice that are null unless requested.
    """

    kind: tuple[str, str]
    null_fields: tuple[str, ...]

    @abstractmethod
    def choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Write a complete choice."""

    def openings(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Write the choices that a stream sends before the first token of a text."""
        return iter(())

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields of the prompt in the first chunk of a text."""
        return {}

    @abstractmethod
    def deltas(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """Write the new part of a text, as any number of choices."""

    @abstractmethod
    def finish(self, answer: dict[str, Any], output: RequestOutput) -> None:
        """Add the fields that a complete response has and chunks do not."""

    def whole(self, finished: list[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Write the response from the last output of every prompt, with its number."""
        choices: dict[int, dict[str, Any]] = {}
        output = None
        for number, output in finished:
            assert output.finished
            for completion, index in self._texts(number, output):
                choice = self.choice(index, completion, output)
                choices[index] = dict.fromkeys(self.null_fields) | choice
        assert output is not None
        answer = self._head(self.kind[0])
        answer["choices"] = [choices[index] for index in sorted(choices)]
        answer["usage"] = self._usage.total()
        self._add_metrics(answer, output)
        self._add_timings(answer, output)
        self.finish(answer, output)
        return answer

    @no_type_check  # runtime type checks do not support async generators
    async def chunks(self, outputs: Numbered) -> AsyncGenerator[dict[str, Any], None]:
        """Write the chunks of every output when it arrives."""
        begun: set[int] = set()
        has_end = self._has_usage or (self._wants_metrics and self._has_one_text)
        async for number, output in outputs:
            for completion, index in self._texts(number, output):
                if index not in begun:
                    begun.add(index)
                    of_prompt = self.of_prompt(output)
                    for choice in self.openings(index, output):
                        chunk = self._head(self.kind[1]) | {"choices": [choice]}
                        chunk |= of_prompt
                        of_prompt = {}
                        if self._counts_each:
                            chunk["usage"] = self._usage.before_text(number)
                        yield chunk
                for choice in self.deltas(index, completion, output):
                    chunk = self._head(self.kind[1])
                    chunk["choices"] = [choice]
                    if self._counts_each:
                        chunk["usage"] = self._usage.of_text(number, index)
                    # As in llama.cpp: the last chunk has the timings.
                    if choice["finish_reason"] is not None and not has_end:
                        self._add_timings(chunk, output)
                    yield chunk
        last: dict[str, Any] = {}
        if self._has_usage:
            last["usage"] = self._usage.total()
        if has_end and self._has_one_text:
            self._add_metrics(last, output)
            self._add_timings(last, output)
        if last:
            yield self._head(self.kind[1]) | {"choices": []} | _without_nulls(last)

    def prompt_logprobs(self, index: int) -> list[Any] | None:
        """Return the logprobs of the prompt of a text."""
        return self._prompt_logprobs.get(index // self.params.n)

    def written_once(self, index: int, write: Callable[[], T]) -> T:
        """Return the result of `write` for a text's prompt, made once per prompt."""
        number = index // self.params.n
        if number not in self._written:
            self._written[number] = write()
        return self._written[number]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.settings.model_name,
        }

    def _texts(
        self, number: int, output: RequestOutput
    ) -> Iterator[tuple[CompletionOutput, int]]:
        """Count the tokens of an output; yield its completions and their indices."""
        self._usage.add_prompt(number, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = list(output.prompt_logprobs)
        for completion in output.outputs:
            index = number * self.params.n + completion.index
            self._usage.add_text(index, len(self.shown(completion)))
            self._usage.add_drafts(index, completion.spec_decode_metrics)
            yield completion, index


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields that are null, in inner objects too."""
    return {
        name: _without_nulls(one) if isinstance(one, dict) else one
        for name, one in value.items()
        if one is not None
    }
