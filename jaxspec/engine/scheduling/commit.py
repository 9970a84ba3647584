"""Commits the results of a launch: tokens of requests, rows, totals, acceptance.

Requests of a launch may have finished or been preempted since it was planned.
"""

import numpy as np

from jaxspec.engine.scheduling.launch import Advance, Launch, Progress
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.program.plan import TILE, Tile
from jaxspec.program.wire import StepResult, TokenLogprobs


def settle(
    launch: Launch, num_run: int, rows: RowTable, *, has_draft_model: bool
) -> None:
    """Undo the counts of rounds that were planned in a launch but did not run.

    Must be called before the rounds that did run are committed.
    """
    if launch.num_rounds == 1:
        return
    missing = launch.num_rounds - num_run
    has_row = rows.owner[launch.rows] == launch.owners
    rows.settle(
        launch.rows[has_row],
        launch.draft_counts[has_row],
        launch.num_rounds,
        missing,
        is_lag=has_draft_model and not launch.shape.num_levels,
    )
    for request, is_in_row in zip(launch.decoding, has_row.tolist(), strict=True):
        if not is_in_row and request.status is not Status.FINISHED:
            request.num_unread -= missing


def commit(
    launch: Launch,
    result: StepResult,
    rows: RowTable,
    stats: EngineStats,
    acceptance: AcceptanceRates,
) -> Advance:
    """Add a round's tokens to requests; update rows and totals."""
    advance = _commit_rounds(launch, result, rows, stats, acceptance)
    for index, (tile, request) in enumerate(
        zip(launch.plan.tiles, launch.tiled, strict=True)
    ):
        prompt_logprobs = _prompt_logprobs(result, index, tile, request)
        progress = _commit_first(result, index, request, rows) if tile.is_last else None
        if progress is not None:
            stats.num_generated_tokens += len(progress.token_ids)
            if request.only_final_output and not progress.is_done:
                advance.only_final.append(request)
                continue
            progress.prompt_logprobs = prompt_logprobs
            advance.parts.append(progress)
        elif request.status is not Status.FINISHED:
            if tile.is_last:
                advance.late.append(request)
            if prompt_logprobs is not None:
                advance.parts.append(
                    Progress(
                        request=request,
                        token_ids=[],
                        is_done=False,
                        prompt_logprobs=prompt_logprobs,
                    )
                )
    return advance


def _commit_rounds(
    launch: Launch,
    result: StepResult,
    rows: RowTable,
    stats: EngineStats,
    acceptance: AcceptanceRates,
) -> Advance:
    """Add the tokens of decoding rows to their requests.

    The tokens of three kinds of rows are dropped: the target's logits are NaN or
    infinite (broken), the mask was not computed in time (late), or the request has
    ended since the launch was planned.
    """
    count = len(launch.rows)
    is_broken, emitted = result.is_broken[:count], result.num_emitted[:count]
    is_late = np.zeros(count, bool)
    if launch.shape.features.has_grammar:
        is_late = np.array([request.is_late for request in launch.decoding], bool)
    is_dropped = is_broken | is_late
    if is_dropped.any():
        emitted = np.where(is_dropped, 0, emitted)
    # A preempted request still gets the tokens of this launch, but has lost its row.
    has_row = rows.owner[launch.rows] == launch.owners
    if has_row.all():
        rows.count_read(launch.rows, launch.draft_counts, emitted)
    else:
        rows.count_read(
            launch.rows[has_row], launch.draft_counts[has_row], emitted[has_row]
        )
    draft_counts = accepted = side = np.zeros(count, np.int64)
    if launch.has_drafts or result.num_accepted_nodes is not None:
        # A lookup in the sequence may have found fewer drafts than were planned.
        draft_counts = np.minimum(result.num_valid_drafts[:count], launch.draft_counts)
        draft_counts = np.where(is_late & ~is_broken, 0, draft_counts)
        accepted = np.minimum(result.num_accepted[:count], draft_counts)
        # Drafts of a sequence that ended earlier do not count; of a sequence that ends
        # in this round, only drafts up to the end count.
        is_counted = has_row & (emitted > 0)
        is_done = result.is_done[:count]
        acceptance.record(
            launch.rows[is_counted],
            np.where(is_done, accepted, draft_counts)[is_counted],
            accepted[is_counted],
            np.where(is_done, accepted, launch.draft_counts)[is_counted],
        )
        if result.num_accepted_nodes is not None:
            accepted_nodes = np.minimum(result.num_accepted_nodes[:count], emitted)
            side = np.where(is_dropped, 0, accepted_nodes - accepted)
            acceptance.record_side_branches(accepted[is_counted], side[is_counted])
        if result.tree_row is not None:
            continues = is_counted & ~is_done & (draft_counts > 0)
            stats.record_ends(
                draft_counts[continues], result.tree_row[:count][continues]
            )
    columns = zip(
        launch.decoding,
        has_row.tolist(),
        result.tokens[:count].tolist(),
        emitted.tolist(),
        draft_counts.tolist(),
        accepted.tolist(),
        side.tolist(),
        result.is_done[:count].tolist(),
        is_broken.tolist(),
        is_late.tolist(),
        strict=True,
    )
    advance = Advance()
    has_ended = []
    logprobs = result.logprobs
    for index, column in enumerate(columns):
        request, is_in_row, tokens, num_new, *counts, done, broken, late = column
        num_valid_drafts, num_accepted, num_side = counts
        if not is_in_row:
            if request.status is Status.FINISHED:
                has_ended.append(index)
                continue
            request.num_unread -= 1
        if late and not broken:
            advance.late.append(request)
            continue
        del tokens[num_new:]
        request.output_token_ids += tokens
        if not num_new:
            num_valid_drafts = 0
        elif num_valid_drafts and request.spec_metrics is not None:
            request.spec_metrics.record_step(num_valid_drafts, num_accepted)
        failure = request.grammar_failure
        if request.only_final_output and not (done or broken or failure):
            if num_new:
                advance.only_final.append(request)
            continue
        progress = Progress(
            request=request,
            token_ids=tokens,
            is_done=done or broken or failure is not None,
            is_broken=broken,
            failure=failure,
            num_valid_drafts=num_valid_drafts,
            num_accepted=num_accepted,
            num_side_tokens=num_side,
        )
        if logprobs is not None and request.features.num_logprobs is not None:
            progress.logprobs = _pick(logprobs, (index, slice(0, num_new)))
        advance.parts.append(progress)
    if has_ended:
        emitted = emitted.copy()
        emitted[has_ended] = 0  # tokens after the end are dropped
    stats.record_round(draft_counts, accepted, emitted, side)
    return advance


def _commit_first(
    result: StepResult, index: int, request: Request, rows: RowTable
) -> Progress | None:
    """Add the first generated token; None if the request ended or its mask is late."""
    if request.status is Status.FINISHED:
        return None
    token, is_broken = int(result.tile_token[index]), bool(result.tile_is_broken[index])
    if request.row < 0:
        request.num_unread -= 1
    else:
        row = np.array([request.row])
        new = np.array([0 if is_broken or request.is_late else 1])
        rows.count_read(row, np.zeros(1, np.int64), new)
    if is_broken:
        return Progress(request=request, token_ids=[], is_done=True, is_broken=True)
    if request.is_late:
        return None
    request.output_token_ids.append(token)
    failure = request.grammar_failure
    progress = Progress(
        request=request,
        token_ids=[token],
        is_done=bool(result.tile_is_done[index]) or failure is not None,
        failure=failure,
    )
    if request.features.num_logprobs is not None and result.tile_logprobs is not None:
        progress.logprobs = _pick(result.tile_logprobs, slice(index, index + 1))
    return progress


def _prompt_logprobs(
    result: StepResult, index: int, tile: Tile, request: Request
) -> TokenLogprobs | None:
    """Return the prompt logprobs of a tile that were not returned before."""
    logprobs = result.prompt_logprobs
    if logprobs is None or request.features.num_prompt_logprobs is None:
        return None
    # Position t has the logprobs of token t + 1; the last belongs to a generated token.
    end = tile.start + len(tile.tokens)
    first = max(tile.start, request.num_prompt_logprobs)
    last = min(end, request.num_prompt_tokens - 1)
    if first >= last:
        return None
    request.num_prompt_logprobs = last
    # Tokens are right-aligned in their tile.
    return _pick(logprobs, (index, slice(TILE - end + first, TILE - end + last)))


def _pick(logprobs: TokenLogprobs, where: slice | tuple[int, slice]) -> TokenLogprobs:
    return TokenLogprobs(*(values[where] for values in logprobs))
