"""Takes what a launch did into the requests that it was about.

They may have ended since it was planned, or lost their row; what those said counts.
"""

import numpy as np

from jaxspec.engine.costs import Costs
from jaxspec.engine.launch import Launch, Progress
from jaxspec.engine.request import Request, Status
from jaxspec.engine.rows import RowTable
from jaxspec.engine.stats import EngineStats
from jaxspec.program.plan import TILE, StepResult, Tile, TokenLogprobs


def commit(
    launch: Launch,
    result: StepResult,
    rows: RowTable,
    stats: EngineStats,
    costs: Costs,
) -> list[Progress]:
    """Add new tokens to requests and bring rows and totals up to date."""
    progress = _commit_rounds(launch, result, rows, stats, costs)
    for index, (tile, request) in enumerate(
        zip(launch.plan.tiles, launch.tiled, strict=True)
    ):
        told = _prompt_logprobs(result, index, tile, request)
        if tile.is_last:
            part = _commit_first(result, index, request, rows)
            if part is None:
                continue
            stats.num_generated_tokens += len(part.token_ids)
            part.prompt_logprobs = told
            progress.append(part)
        elif told is not None and request.status is not Status.FINISHED:
            progress.append(
                Progress(
                    request=request, token_ids=[], is_done=False, prompt_logprobs=told
                )
            )
    return progress


def _commit_rounds(
    launch: Launch,
    result: StepResult,
    rows: RowTable,
    stats: EngineStats,
    costs: Costs,
) -> list[Progress]:
    count = len(launch.rows)
    is_broken = result.is_broken[:count]
    emitted = np.where(is_broken, 0, result.num_emitted[:count])
    is_there = rows.owner[launch.rows] == launch.owners
    there, planned, new = launch.rows, launch.drafts, emitted
    if not is_there.all():
        there, planned, new = there[is_there], planned[is_there], new[is_there]
    rows.read(there, planned, new)
    # A lookup in the sequence may have found fewer than were planned.
    drafts = np.minimum(result.num_draft[:count], launch.drafts)
    accepted = np.minimum(result.num_accepted[:count], drafts)
    # Of a sequence that ended before this round, drafts say nothing.
    is_counted = is_there & (emitted > 0)
    costs.record_acceptance(
        launch.rows[is_counted], drafts[is_counted], accepted[is_counted]
    )
    columns = zip(
        launch.decoding,
        is_there.tolist(),
        result.tokens[:count].tolist(),
        emitted.tolist(),
        drafts.tolist(),
        accepted.tolist(),
        result.is_done[:count].tolist(),
        is_broken.tolist(),
        strict=True,
    )
    progress = []
    has_ended = []
    logprobs = result.logprobs
    for index, column in enumerate(columns):
        request, has_row, tokens, new, asked, kept, done, broken = column
        if not has_row:
            if request.status is Status.FINISHED:
                has_ended.append(index)
                continue
            request.num_unread -= 1
        del tokens[new:]
        request.output_token_ids += tokens
        if not new:
            asked = 0
        elif asked and request.spec_metrics is not None:
            request.spec_metrics.record_step(asked, kept)
        part = Progress(
            request=request,
            token_ids=tokens,
            is_done=done or broken,
            is_broken=broken,
            num_draft_tokens=asked,
            num_accepted=kept,
        )
        if logprobs is not None and request.features.num_logprobs is not None:
            part.logprobs = _pick(logprobs, (index, slice(0, new)))
        progress.append(part)
    if has_ended:
        emitted = emitted.copy()
        emitted[has_ended] = 0  # nobody gets it
    stats.record_round(drafts, accepted, emitted)
    return progress


def _commit_first(
    result: StepResult, index: int, request: Request, rows: RowTable
) -> Progress | None:
    """The token after a prompt; None if the request has ended."""
    if request.status is Status.FINISHED:
        return None
    token, is_broken = int(result.tile_token[index]), bool(result.tile_is_broken[index])
    if request.row < 0:
        request.num_unread -= 1
    else:
        one = np.array([request.row])
        new = np.array([0 if is_broken else 1])
        rows.read(one, np.zeros(1, np.int64), new)
    if is_broken:
        return Progress(request=request, token_ids=[], is_done=True, is_broken=True)
    request.output_token_ids.append(token)
    part = Progress(
        request=request, token_ids=[token], is_done=bool(result.tile_is_done[index])
    )
    if request.features.num_logprobs is not None and result.tile_logprobs is not None:
        part.logprobs = _pick(result.tile_logprobs, slice(index, index + 1))
    return part


def _prompt_logprobs(
    result: StepResult, index: int, tile: Tile, request: Request
) -> TokenLogprobs | None:
    """What a tile says of prompt tokens that nothing has been told of yet."""
    found = result.prompt_logprobs
    if found is None or request.features.num_prompt_logprobs is None:
        return None
    if tile.is_draft_only:
        return None
    # The entry of position t is about token t + 1; the last is about generated ones.
    end = tile.start + len(tile.tokens)
    first = max(tile.start, request.num_prompt_told)
    last = min(end, request.num_prompt_tokens - 1)
    if first >= last:
        return None
    request.num_prompt_told = last
    # Tokens are right-aligned in their tile.
    return _pick(found, (index, slice(TILE - end + first, TILE - end + last)))


def _pick(found: TokenLogprobs, where: slice | tuple[int, slice]) -> TokenLogprobs:
    return TokenLogprobs(*(values[where] for values in found))
