"""The prefill part of a plan: known tokens cut into tiles, as many as have room."""

import numpy as np

from jaxspec.engine.kv_cache import PageTables
from jaxspec.engine.request import Request, Status
from jaxspec.engine.rows import RowTable
from jaxspec.program.plan import (
    NO_TOKEN,
    TILE,
    Admission,
    PageUpdate,
    Tile,
)

# A request, and the number of its first tokens that must have pages.
Claim = tuple[Request, int]


class Prefill:
    """Tiles, admissions and new pages of one plan, while it is made.

    Attributes:
        room: Tiles that still fit.
        tiled: Whose each of the tiles is.
        registered: Pages that can be found from now on.
        num_found: Pages that admitted requests begin with.
    """

    def __init__(
        self, rows: RowTable, tables: PageTables, room: int, updates: list[PageUpdate]
    ):
        self.rows, self.tables, self.room, self.updates = rows, tables, room, updates
        self.tiles: list[Tile] = []
        self.tiled: list[Request] = []
        self.admissions: list[Admission] = []
        self.registered: list[int] = []
        self.num_found = 0

    @property
    def num_controlled(self) -> int:
        """Admissions with controls."""
        return sum(admission.controls is not None for admission in self.admissions)

    def begin(self, request: Request, found: list[int], longest: int) -> None:
        """Admit a request that has found pages to begin with, and feed it.

        Args:
            longest: Positions that may ever be written.
        """
        self.rows.admit(request, longest)
        self.tables.begin(request, found)
        request.status = Status.PREFILL
        self.num_found += len(found)
        self.admissions.append(_admission(request))
        self.updates += [(request.row, i, page) for i, page in enumerate(found)]
        end = next_end(request, self.room)
        self.updates += self.tables.grow(request, end + 1)
        self.feed(request)

    def feed(self, request: Request) -> None:
        """Feed a prompt as far as there is room; the pages are there."""
        tiles = _prompt_tiles(request, self.room)
        self._add(request, tiles)
        self.registered += self.tables.register(request, request.num_fed)
        if tiles[-1].is_last:
            request.status = Status.DECODE
            row = np.array([request.row])
            self.rows.is_decoding[row] = True
            self.rows.launch(row, np.zeros(1, np.int64))

    def catch_up(self, request: Request) -> None:
        """Feed the draft model alone with tokens of rounds that ran without it."""
        gap = int(self.rows.draft_gap[request.row])
        tiles = _catch_up_tiles(request, gap, self.room)
        gap -= sum(len(tile.tokens) for tile in tiles)
        self.rows.draft_gap[request.row] = gap
        self._add(request, tiles)

    def _add(self, request: Request, tiles: list[Tile]) -> None:
        self.tiles += tiles
        self.tiled += [request] * len(tiles)
        self.room -= len(tiles)


def next_end(request: Request, room: int) -> int:
    """Where a prompt stands once `room` more tiles of it are fed."""
    return min(request.num_fed + room * TILE, len(request.tokens_to_feed))


def claims_of(prefilling: list[Request], room: int) -> list[Claim]:
    """Requests whose prompts are continued, and the tokens that need pages then."""
    claims = []
    for request in prefilling:
        if room > 0:
            end = next_end(request, room)
            room -= -(-(end - request.num_fed) // TILE)
            claims.append((request, end + 1))
    return claims


def _prompt_tiles(request: Request, room: int) -> list[Tile]:
    tiles = []
    known = request.tokens_to_feed
    while request.num_fed < len(known) and len(tiles) < room:
        start = request.num_fed
        end = request.num_fed = next_end(request, 1)
        is_last = end == len(known)
        tiles.append(
            Tile(
                row=request.row,
                start=start,
                tokens=np.array(known[start:end], np.int32),
                is_last=is_last,
                next_token=NO_TOKEN if is_last else known[end],
            )
        )
    return tiles


def _catch_up_tiles(request: Request, gap: int, room: int) -> list[Tile]:
    tiles = []
    start = request.num_tokens - gap
    # The last token stays out: it is the next round's input.
    end = request.num_tokens - 1
    while start < end and len(tiles) < room:
        stop = min(start + TILE, end)
        tokens = np.array(request.tokens(start, stop), np.int32)
        tiles.append(
            Tile(
                row=request.row,
                start=start,
                tokens=tokens,
                is_last=False,
                is_draft_only=True,
            )
        )
        start = stop
    return tiles


def _admission(request: Request) -> Admission:
    params = request.params
    return Admission(
        row=request.row,
        num_prompt=request.num_prompt_tokens,
        min_total=request.min_total,
        max_total=request.max_total,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        rule=request.rule,
        stop_ids=request.stop_ids,
        controls=request.controls,
    )
