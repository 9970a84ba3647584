"""Owns beam search, by vLLM's rules.

Each step extends every open beam by its `2 * beam_width` most likely tokens, and keeps
the best `beam_width` of all these; beams that end are collected separately. The caller
requests one more token of each open beam from the engine, step by step.
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

# Candidates per open beam, as a multiple of beam_width: with fewer, beams that end
# could leave too few open ones. The same as HuggingFace's.
CANDIDATES = 2


@dataclass(kw_only=True)
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: Tokens of the prompt and the generated ones, with the end token.
        logprobs: Logprobs at each generated token.
        cum_logprob: Sum of the log-probabilities of the generated tokens.
        text: Text of all tokens; None before the search has ended.
        finish_reason: "stop" or "length"; None while it is open.
        stop_reason: The token that ended it.
        lora_request: vLLM's; always None.
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
    """Result of one prompt's beam search.

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
    """Return a beam's score, `cumulative_logprob / length**length_penalty`.

    The length includes the prompt and excludes the end token, as in vLLM.

    Args:
        eos_token_id: One or several tokens that end a text.
    """
    ends = (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
    length = len(tokens) - (tokens[-1] in ends)
    return cumulative_logprob / length**length_penalty


class _Candidate(NamedTuple):
    """An open beam with one more token."""

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
    """The beam search of one prompt."""

    def __init__(
        self,
        prompt: ParsedPrompt,
        params: BeamSearchParams,
        *,
        end_ids: Collection[int],
        max_model_len: int,
    ):
        """Start with the prompt as the only beam.

        Args:
            end_ids: Tokens that end a text.
            max_model_len: Maximum length of a text, with its prompt.
        """
        self._prompt, self._params = prompt, params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_ids)
        num_prompt = len(prompt.token_ids)
        self._longest = min(num_prompt + params.max_tokens, max_model_len)
        self._open = [BeamSearchSequence(tokens=list(prompt.token_ids))]
        # The best ended beams, the best first.
        self._ended: list[BeamSearchSequence] = []

    def prompts(self) -> list[TokensPrompt]:
        """Return the open beams, to extend by a token each; empty after the end."""
        prompts: list[TokensPrompt] = []
        for one in self._open:
            prompts.append({"prompt_token_ids": one.tokens})
            if self._prompt.cache_salt is not None:
                prompts[-1]["cache_salt"] = self._prompt.cache_salt
        return prompts

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend the beams by a token.

        Args:
            outputs: Output of each open beam, generated with `step_params`.
        """
        found: list[_Candidate] = []
        for before, output in zip(self._open, outputs, strict=True):
            if output.outputs[0].finish_reason == "abort":
                self._close("abort")
                return
            position = (output.outputs[0].logprobs or [None])[0]
            assert position is not None, "a token without log-probabilities"
            found += [
                _Candidate(before, token, position, before.cum_logprob + entry.logprob)
                for token, entry in position.items()
            ]
        # All candidates that end have equal length, and so have all others: within
        # each group the penalty changes no order. Python's sort is stable.
        found.sort(key=lambda one: one.cum_logprob, reverse=True)
        width = self._params.beam_width
        for one in [one for one in found if one.token in self._ends][:width]:
            ended = one.as_sequence()
            ended.finish_reason, ended.stop_reason = "stop", one.token
            self._ended.append(ended)
        self._ended = self._best(self._ended)
        still_open = [one for one in found if one.token not in self._ends][:width]
        self._open = [one.as_sequence() for one in still_open]
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
        """Return whether an open beam may still become one of the best.

        Its log-probability can only fall, and its final length is between the current
        one, if the next token ends it, and the maximum.
        """
        if len(self._ended) < self._params.beam_width:
            return True
        worst, penalty = self._score(self._ended[-1]), self._params.length_penalty
        for one in self._open:
            length = self._longest if penalty > 0 else len(one.tokens)
            if one.cum_logprob / length**penalty > worst:
                return True
        return False

    def _close(self, reason: str) -> None:
        """End the open beams."""
        for one in self._open:
            one.finish_reason = reason
        self._ended = self._best([*self._ended, *self._open])
        self._open = []

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        """Return the best texts, with their prompts, after the search has ended."""
        assert not self._open
        for one in self._ended:
            one.text = tokenizer.decode(one.tokens)
        return BeamSearchOutput(sequences=self._ended)

    def request_output(
        self, request_id: str, tokenizer: Tokenizer, params: SamplingParams
    ) -> RequestOutput:
        """Return the best texts, without their prompts, as an ordinary output.

        Args:
            params: Number of logprobs to return, and options of detokenization.
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
                    logprobs=_top_logprobs(
                        one.tokens[start:], one.logprobs, params.logprobs
                    ),
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
    """Return the sampling parameters of each step.

    Args:
        max_logprobs: Maximum number of logprobs that the engine returns per token.
        num_logprobs: Number to return per token of the result; -1 for all.

    Raises:
        RequestError: `max_logprobs` is too small for the beam width.
    """
    wanted = min(CANDIDATES * params.beam_width, vocab_size)
    if wanted > max_logprobs:
        allowed = f"at most {max_logprobs // CANDIDATES}"
        hint = (
            f"The search needs {CANDIDATES} * beam_width logprobs per token, and the "
            f"engine's max_logprobs is {max_logprobs}."
        )
        width = params.beam_width
        raise wrong_argument(RequestError, "beam_width", allowed, width, hint)
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=-1 if num_logprobs == -1 else max(wanted, num_logprobs),
        # The search itself handles end tokens.
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _top_logprobs(
    tokens: Sequence[int], positions: list[LogprobsOnePosition], count: int | None
) -> list[LogprobsOnePosition] | None:
    """Return each token's logprob and those of the `count` most likely tokens."""
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
