"""Owns beam search: which texts of a prompt are kept, and how they are compared.

By vLLM's rules: each step continues every open text by its most likely tokens, twice as
many as texts are kept, and keeps the best of all of them; those that end are set aside.
The caller asks the engine for one more token of each open text, step by step.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxspec.errors import RequestError, wrong_argument
from jaxspec.inputs import ParsedPrompt, TokensPrompt
from jaxspec.logprobs import Logprob, LogprobsOnePosition
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from jaxspec.text.tokenizer import Tokenizer

# Tokens by which each open text may go on, for every text that is kept: with fewer,
# ends of texts would leave too few that go on. HuggingFace has as many.
CANDIDATES = 2


@dataclass(kw_only=True)
class BeamSearchSequence:
    """One text.

    Attributes:
        tokens: The prompt's, then its own, with the one that ended it.
        logprobs: What the model said at each of its own tokens.
        cum_logprob: Sum of the log-probabilities of its own tokens.
        text: Of all its tokens; None before the search has ended.
        finish_reason: "stop" or "length"; None while it is open.
        stop_reason: The token that ended it.
    """

    tokens: list[int]
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True)
class BeamSearchOutput:
    """What came of one prompt.

    Attributes:
        sequences: The best texts, the best first.
    """

    sequences: list[BeamSearchSequence]


def get_beam_search_score(
    tokens: Sequence[int],
    cumulative_logprob: float,
    eos_token_id: int | Collection[int],
    length_penalty: float = 1.0,
) -> float:
    """Return what texts are compared by: their log-probability by their length.

    The prompt's tokens count, and an end of text does not, as in vLLM.

    Args:
        eos_token_id: That end texts, one or several.
    """
    ends = (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
    length = len(tokens) - (tokens[-1] in ends)
    return cumulative_logprob / length**length_penalty


class _Candidate(NamedTuple):
    """An open text with one more token."""

    before: BeamSearchSequence
    token: int
    position: LogprobsOnePosition
    cum_logprob: float

    def as_sequence(self) -> BeamSearchSequence:
        return BeamSearchSequence(
            tokens=[*self.before.tokens, self.token],
            logprobs=[*self.before.logprobs, self.position],
            cum_logprob=self.cum_logprob,
        )


class BeamSearch:
    """The search that continues one prompt."""

    def __init__(
        self,
        prompt: ParsedPrompt,
        params: BeamSearchParams,
        *,
        end_ids: Collection[int],
        max_model_len: int,
    ):
        """Begin.

        Args:
            end_ids: Tokens that end texts.
            max_model_len: Texts end there at the latest.
        """
        self._prompt, self._params = prompt, params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_ids)
        num_prompt = len(prompt.token_ids)
        self._longest = min(num_prompt + params.max_tokens, max_model_len)
        self._open = [BeamSearchSequence(tokens=list(prompt.token_ids))]
        # The best of those that ended, the best first.
        self._ended: list[BeamSearchSequence] = []

    def prompts(self) -> list[TokensPrompt]:
        """The open texts, each to be continued by a token; none where it has ended."""
        prompts: list[TokensPrompt] = []
        for one in self._open:
            prompts.append({"prompt_token_ids": one.tokens})
            if self._prompt.cache_salt is not None:
                prompts[-1]["cache_salt"] = self._prompt.cache_salt
        return prompts

    def advance(self, told: Sequence[RequestOutput]) -> None:
        """Go on by a token.

        Args:
            told: What came of each of the open texts, asked for with `step_params`.
        """
        found: list[_Candidate] = []
        for before, output in zip(self._open, told, strict=True):
            if output.outputs[0].finish_reason == "abort":
                self._close("abort")
                return
            position = (output.outputs[0].logprobs or [None])[0]
            assert position is not None, "a token without log-probabilities"
            found += [
                _Candidate(before, token, position, before.cum_logprob + entry.logprob)
                for token, entry in position.items()
            ]
        # Those that go on have one length, and those that end another. Python's sort
        # keeps the order of those that are equally good.
        found.sort(key=lambda one: one.cum_logprob, reverse=True)
        width = self._params.beam_width
        for one in [one for one in found if one.token in self._ends][:width]:
            ended = one.as_sequence()
            ended.finish_reason, ended.stop_reason = "stop", one.token
            self._ended.append(ended)
        self._ended = self._best(self._ended)
        going_on = [one for one in found if one.token not in self._ends][:width]
        self._open = [one.as_sequence() for one in going_on]
        if self._open and len(self._open[0].tokens) == self._longest:
            self._close("length")
        elif not self._can_improve():
            self._open = []

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        ranked = sorted(sequences, key=self._score, reverse=True)
        return ranked[: self._params.beam_width]

    def _score(self, one: BeamSearchSequence) -> float:
        penalty = self._params.length_penalty
        return get_beam_search_score(one.tokens, one.cum_logprob, self._ends, penalty)

    def _can_improve(self) -> bool:
        """Whether an open text may still be one of the best.

        Its log-probability only falls, and its length is between that of now, if the
        next token ends it, and the longest.
        """
        if len(self._ended) < self._params.beam_width:
            return True
        least, penalty = self._score(self._ended[-1]), self._params.length_penalty
        for one in self._open:
            length = self._longest if penalty > 0 else len(one.tokens)
            if one.cum_logprob / length**penalty > least:
                return True
        return False

    def _close(self, reason: str) -> None:
        """End the open texts."""
        for one in self._open:
            one.finish_reason = reason
        self._ended = self._best([*self._ended, *self._open])
        self._open = []

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        """Return the best texts, with their prompts, once nothing is open."""
        assert not self._open
        for one in self._ended:
            one.text = tokenizer.decode(one.tokens)
        return BeamSearchOutput(sequences=self._ended)

    def request_output(
        self, request_id: str, tokenizer: Tokenizer, params: SamplingParams
    ) -> RequestOutput:
        """Return the best texts, without their prompts, as other requests give them.

        Args:
            params: How many log-probabilities are told, and what is shown of tokens.
        """
        assert not self._open
        start = len(self._prompt.token_ids)
        return RequestOutput(
            request_id=request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[
                CompletionOutput(
                    index=index,
                    text=self._text(one, tokenizer, params),
                    token_ids=one.tokens[start:],
                    cumulative_logprob=one.cum_logprob,
                    logprobs=_told(one.tokens[start:], one.logprobs, params.logprobs),
                    finish_reason=one.finish_reason,
                    stop_reason=one.stop_reason,
                )
                for index, one in enumerate(self._ended)
            ],
            finished=True,
        )

    def _text(
        self, one: BeamSearchSequence, tokenizer: Tokenizer, params: SamplingParams
    ) -> str:
        tokens = one.tokens[len(self._prompt.token_ids) :]
        end = tokens.pop() if one.finish_reason == "stop" else None
        text = tokenizer.decode(tokens, params.skip_special_tokens)
        if end is not None and self._params.include_stop_str_in_output:
            text += tokenizer.decode([end], False)
        return text


def step_params(
    params: BeamSearchParams,
    *,
    vocab_size: int,
    max_logprobs: int,
    num_logprobs: int = 0,
) -> SamplingParams:
    """Return the sampling parameters of each step of the search.

    Args:
        max_logprobs: Most logprobs per token that the engine returns.
        num_logprobs: Logprobs per token in the final output; -1 for all.

    Raises:
        RequestError: The search needs more than `max_logprobs`.
    """
    wanted = min(CANDIDATES * params.beam_width, vocab_size)
    if wanted > max_logprobs:
        allowed = f"at most {max_logprobs // CANDIDATES}"
        hint = (
            f"It is chosen among {CANDIDATES} times as many tokens, and the engine's "
            f"max_logprobs is {max_logprobs}."
        )
        width = params.beam_width
        raise wrong_argument(RequestError, "beam_width", allowed, width, hint)
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=-1 if num_logprobs == -1 else max(wanted, num_logprobs),
        # What ends a text is for the search to say.
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _told(
    tokens: Sequence[int], positions: list[LogprobsOnePosition], count: int | None
) -> list[LogprobsOnePosition] | None:
    """What a request wants to know of each token: itself, and the most likely ones."""
    if count is None:
        return None
    most = math.inf if count == -1 else count
    return [
        {token: position[token]}
        | {key: one for key, one in position.items() if _rank(one) <= most}
        for token, position in zip(tokens, positions, strict=True)
    ]


def _rank(entry: Logprob) -> float | int:
    return math.inf if entry.rank is None else entry.rank
