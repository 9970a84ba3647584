"""Owns what the answers of the generating endpoints have in common."""

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

Numbered = AsyncGenerator[tuple[int, RequestOutput], None]


# Log-probabilities and token ids of one answer: some 25 MB.
MAX_ENTRIES = 2**20


class Writer(ABC):
    """Writes what comes of one request, whole or in chunks.

    Attributes:
        id: Of the answer.
        created: When, in seconds since 1970.
        end: What a stream sends after its last chunk.
    """

    end = DONE

    def __init__(
        self,
        serving: Serving,
        body: GenerationBody,
        params: SamplingParams,
        request_id: str,
    ):
        settings = serving.settings
        self.tokenizer, self.settings, self.params = serving.tokenizer, settings, params
        as_ids = body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = settings.return_tokens_as_token_ids
        self.logprobs = LogprobWriter(serving.tokenizer, as_ids=as_ids)
        self._usage = Usage(has_details=settings.enable_prompt_tokens_details)
        # Of each prompt; only its first output has them.
        self._prompt_logprobs: dict[int, list[Any]] = {}
        self._written: dict[int, Any] = {}
        # Whether a stream ends with counts, and whether every chunk has them.
        self._has_usage = self._counts_each = settings.enable_force_include_usage
        options = body.stream_options
        if options is not None and options.include_usage:
            self._has_usage = True
            self._counts_each |= options.continuous_usage_stats
        asked = self._asks_metrics = bool(body.include_metrics)
        self._metrics = {
            "has_drafts": asked or settings.per_request_spec_decode_metrics != "none",
            "has_times": asked or settings.enable_per_request_metrics,
        }
        self._is_stream, self._has_ids = body.stream, bool(body.return_token_ids)
        self._has_prompt_logprobs = getattr(body, "prompt_logprobs", None) is not None
        self.id, self.created = request_id, int(time.time())

    def check_size(
        self, lengths: list[int], max_model_len: int, vocab_size: int
    ) -> int:
        """Return the entries of the answer, if all texts are as long as they may be.

        Entries are log-probabilities and tokens of prompts: a stream writes those of
        generated tokens one by one.

        Args:
            lengths: Tokens of each prompt.

        Raises:
            RequestError: It may have more than `MAX_ENTRIES`.
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
                f"The answer may have {size} log-probabilities and token ids: n times "
                f"tokens of prompt and text times logprobs. At most {MAX_ENTRIES} are "
                "allowed: lower n, max_tokens or logprobs, or send fewer prompts.",
                parameter=name,
            )
        return size

    async def answer(self, outputs: Numbered) -> dict[str, Any]:
        """Wait for all texts, and write the whole."""
        return self.whole([one async for one in outputs])

    @abstractmethod
    def whole(self, finished: list[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Write the answer from the last output of every prompt, with its number."""

    @abstractmethod
    def chunks(self, outputs: Numbered) -> AsyncGenerator[dict[str, Any], None]:
        """Write every output as it comes."""

    def shown(self, completion: CompletionOutput) -> list[int]:
        """Return the generated tokens that the answer shows."""
        return list(completion.token_ids)

    def origins(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the field that tells who drew the shown tokens, where it is wanted.

        Of what is echoed there is none.
        """
        if not self.params.return_token_origins:
            return {}
        told = (completion.token_origins or [])[: len(self.shown(completion))]
        return {"token_origins": [one._asdict() for one in told]}

    def _add_metrics(
        self, told: dict[str, Any], output: RequestOutput, *, is_one: bool
    ) -> None:
        if any(self._metrics.values()):
            told["metrics"] = (
                request_metrics(output, **self._metrics) if is_one else None
            )


class ChoiceWriter(Writer):
    """Writes texts as choices, as completions and chats do.

    Attributes:
        kind: What the answer calls itself, and its chunks do.
        unasked: Fields of a whole text that are null unless they are asked for.
    """

    kind: tuple[str, str]
    unasked: tuple[str, ...]

    @abstractmethod
    def choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        """Write a whole text."""

    def openings(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Write what a stream tells of a text before its first token."""
        return iter(())

    def of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return what the first chunk of a text has of the prompt."""
        return {}

    @abstractmethod
    def deltas(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        """Write what is new of a text: nothing, or in one or more choices."""

    @abstractmethod
    def finish(self, answer: dict[str, Any], output: RequestOutput) -> None:
        """Add what the whole answer has and chunks do not."""

    def whole(self, finished: list[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """Write the answer from the last output of every prompt, with its number."""
        choices: dict[int, dict[str, Any]] = {}
        output, num_prompts = None, 0
        for number, output in finished:
            assert output.finished
            num_prompts += 1
            for completion, index in self._texts(number, output):
                choice = self.choice(index, completion, output)
                choices[index] = dict.fromkeys(self.unasked) | choice
        assert output is not None
        answer = self._head(self.kind[0])
        answer["choices"] = [choices[index] for index in sorted(choices)]
        answer["usage"] = self._usage.total()
        self._add_metrics(answer, output, is_one=num_prompts == 1)
        self.finish(answer, output)
        return answer

    @no_type_check  # asynchronous generators are not checked
    async def chunks(self, outputs: Numbered) -> AsyncGenerator[dict[str, Any], None]:
        """Write every output as it comes."""
        begun: set[int] = set()
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
                    yield chunk
        last: dict[str, Any] = {}
        if self._has_usage:
            last["usage"] = self._usage.total()
        if begun == {0} and (self._has_usage or self._asks_metrics):
            self._add_metrics(last, output, is_one=True)
        if last:
            yield self._head(self.kind[1]) | {"choices": []} | _without_nulls(last)

    def prompt_logprobs(self, index: int) -> list[Any] | None:
        """What was told of the tokens of a text's prompt."""
        return self._prompt_logprobs.get(index // self.params.n)

    def written_once(self, index: int, write: Callable[[], T]) -> T:
        """Return what is written of a text's prompt, the same for all texts of it."""
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
        """Count an output; its texts, each with its index in the answer."""
        self._usage.add_prompt(number, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = list(output.prompt_logprobs)
        for completion in output.outputs:
            index = number * self.params.n + completion.index
            self._usage.add_text(index, len(self.shown(completion)))
            yield completion, index


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """The fields that have a value, in inner objects as well."""
    return {
        name: _without_nulls(one) if isinstance(one, dict) else one
        for name, one in value.items()
        if one is not None
    }
