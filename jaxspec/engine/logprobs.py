"""Owns the log-probabilities of one text: from arrays of a launch to vLLM's dicts."""

from typing import Any

from jaxspec.logprobs import FlatLogprobs, Logprob, LogprobsOnePosition
from jaxspec.program.plan import TokenLogprobs
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer

# By position; in either of vLLM's two forms.
Logprobs = list[Any] | FlatLogprobs


class LogprobStream:
    """What is told about the tokens of one growing text, and about its prompt's.

    Launches tell as many candidates as the engine's `max_logprobs`; here they are cut
    to what the request asked for.

    Attributes:
        cumulative: Sum of the text's own log-probabilities; None if none were asked.
        prompt: None until all of the prompt has been told, or if that was not asked.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: list[int]
    ):
        self._tokenizer = tokenizer
        self._params = params
        self._prompt_ids = prompt_ids
        self._told = self._empty()
        self._own: list[float] = []
        self.cumulative: float | None = None if params.logprobs is None else 0.0
        # Nothing precedes the first token, so nothing tells its probability.
        self._prompt = self._empty()
        self._prompt.append(None)

    def _empty(self) -> Logprobs:
        return FlatLogprobs() if self._params.flat_logprobs else []

    def push(self, token_ids: list[int], values: TokenLogprobs | None) -> None:
        """Add generated tokens; entry i of `values` is about token i."""
        asked = self._params.logprobs
        if asked is None or self.cumulative is None or not token_ids:
            return
        assert values is not None, "a launch told no logprobs"
        own = values.own.tolist()
        for index, token in enumerate(token_ids):
            self._told.append(self._position(token, values, index, asked))
            self._own.append(own[index])
            self.cumulative += own[index]

    def keep(self, count: int) -> None:
        """Forget what was told beyond the text's first `count` tokens."""
        if self.cumulative is not None and count < len(self._own):
            self._told = self._told[:count]
            del self._own[count:]
            self.cumulative = sum(self._own)

    def since(self, count: int) -> Logprobs | None:
        """What was told after the first `count` tokens; None if none was asked."""
        return None if self.cumulative is None else self._told[count:]

    def push_prompt(self, values: TokenLogprobs) -> None:
        """Add a part of the prompt: the next tokens of which nothing was told."""
        asked = self._params.prompt_logprobs
        if asked is None:
            return
        for index in range(len(values.own)):
            token = self._prompt_ids[len(self._prompt)]
            self._prompt.append(self._position(token, values, index, asked))

    @property
    def prompt(self) -> Logprobs | None:
        """By position of the prompt, None for the first."""
        is_whole = len(self._prompt) == len(self._prompt_ids)
        asked = self._params.prompt_logprobs is not None
        return self._prompt if asked and is_whole else None

    def _position(
        self, token: int, values: TokenLogprobs, index: int, asked: int
    ) -> LogprobsOnePosition:
        # As in vLLM: the token itself comes first, wherever it ranks.
        told = {token: (float(values.own[index]), int(values.rank[index]))}
        count = values.top_ids.shape[-1] if asked == -1 else asked
        top_ids = values.top_ids[index, :count].tolist()
        top = values.top[index, :count].tolist()
        for rank, (candidate, value) in enumerate(zip(top_ids, top, strict=True), 1):
            told.setdefault(candidate, (value, rank))
        return {
            candidate: Logprob(value, rank, self._text(candidate))
            for candidate, (value, rank) in told.items()
        }

    def _text(self, token: int) -> str | None:
        if not self._params.detokenize:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)
