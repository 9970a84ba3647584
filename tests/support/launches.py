"""Requests run by launches made by hand: no scheduler in between."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from jaxspec.engine.runner import Runner
from jaxspec.program.plan import (
    NO_TOKEN,
    RULES,
    TILE,
    Admission,
    Features,
    StepPlan,
    StepShape,
    Tile,
    TokenControls,
)
from jaxspec.program.wire import StepResult, TokenLogprobs


@dataclass
class Played:
    """One request and what came of it."""

    prompt: list[int]
    admission: Admission
    tokens: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    is_done: bool = False
    num_pages: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


def request(
    prompt: list[int],
    *,
    max_tokens: int,
    min_tokens: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    rule: str = "standard",
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    controls: TokenControls | None = None,
) -> Played:
    """A request for `play`, which gives it a row."""
    admission = Admission(
        row=-1,
        num_prompt=len(prompt),
        min_total=len(prompt) + min_tokens,
        max_total=len(prompt) + max_tokens,
        temperature=temperature,
        top_k=0,
        top_p=top_p,
        min_p=0.0,
        seed=(seed, 77),
        rule=RULES[rule],
        stop_ids=stop_ids,
        controls=controls,
    )
    return Played(prompt=list(prompt), admission=admission)


def play(
    runner: Runner,
    requests: list[Played],
    *,
    num_drafts: int,
    features: Features = Features(),  # noqa: B008 frozen
) -> list[Played]:
    """Run requests to their ends, prompts first, one tile a launch."""
    seqs = runner.pool.num_rows
    assert len(requests) <= seqs
    for row, one in enumerate(requests):
        one.admission = dataclasses.replace(one.admission, row=row)
    prefill = StepShape(
        num_seqs=seqs, num_draft_tokens=num_drafts, chunk=TILE, features=features
    )
    for one in requests:
        for start in range(0, len(one.prompt), TILE):
            _feed(runner, one, start, prefill)
    decode = dataclasses.replace(prefill, chunk=0)
    while running := [one for one in requests if not one.is_done]:
        left = [one.admission.max_total - one.length - 1 for one in running]
        pages = [_pages(runner, one, one.length + num_drafts + 1) for one in running]
        plan = StepPlan(
            decode=[
                (one.admission.row, min(num_drafts, most))
                for one, most in zip(running, left, strict=True)
            ],
            pages=sum(pages, []),
        )
        result = runner.fetch(runner.launch(plan, decode), decode)
        assert isinstance(result, StepResult)
        for index, one in enumerate(running):
            _note_round(one, result, index)
    return requests


def _pages(runner: Runner, one: Played, length: int) -> list[tuple[int, int, int]]:
    """Every row has pages of its own, handed out as it grows."""
    pool, row, have = runner.pool, one.admission.row, one.num_pages
    own = pool.num_pages // pool.num_rows
    one.num_pages = max(-(-length // pool.page_size), have)
    assert one.num_pages <= own, f"{length} tokens need more than {own} pages"
    return [(row, index, own * row + index) for index in range(have, one.num_pages)]


def _feed(runner: Runner, one: Played, start: int, shape: StepShape) -> None:
    end = min(start + TILE, len(one.prompt))
    is_last = end == len(one.prompt)
    tokens = np.array(one.prompt[start:end], np.int32)
    tile = Tile(
        row=one.admission.row,
        start=start,
        tokens=tokens,
        is_last=is_last,
        next_token=NO_TOKEN if is_last else one.prompt[end],
    )
    plan = StepPlan(
        tiles=[tile],
        admissions=[one.admission] if start == 0 else [],
        pages=_pages(runner, one, end + 1),
    )
    result = runner.fetch(runner.launch(plan, shape), shape)
    assert isinstance(result, StepResult)
    if result.prompt_logprobs is not None:
        told = [values[0, TILE - len(tokens) :] for values in result.prompt_logprobs]
        one.prompt_logprobs += [
            TokenLogprobs(*values) for values in zip(*told, strict=True)
        ]
    if is_last:
        one.tokens.append(int(result.tile_token[0]))
        one.is_done = bool(result.tile_is_done[0])
        if result.tile_logprobs is not None:
            told = (values[0] for values in result.tile_logprobs)
            one.logprobs.append(TokenLogprobs(*told))


def _note_round(one: Played, result: StepResult, index: int) -> None:
    count = int(result.num_emitted[index])
    assert count > 0
    one.tokens += result.tokens[index, :count].tolist()
    one.num_accepted.append(int(result.num_accepted[index]))
    one.is_done = bool(result.is_done[index])
    if result.logprobs is not None:
        told = [values[index, :count] for values in result.logprobs]
        one.logprobs += [TokenLogprobs(*values) for values in zip(*told, strict=True)]
