"""What the host asks of one launch, and how it travels: one int32 vector.

Owns the layout of that vector, so that a launch costs one host-to-device copy. Plain
numpy: the engine imports this without importing jax.
"""

import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxspec.program.token_controls import MAX_BAD_WORD_LEN as MAX_BAD_WORD_LEN
from jaxspec.program.token_controls import MAX_BAD_WORDS as MAX_BAD_WORDS
from jaxspec.program.token_controls import MAX_BIAS as MAX_BIAS
from jaxspec.program.token_controls import (
    MAX_CONTROLLED,
    NO_TOKEN,
    TokenControls,
    control_fields,
    pack_controls,
)
from jaxspec.program.token_logprobs import TokenLogprobs, read_logprobs

# Prompt tokens are fed in tiles of one sequence each, right-aligned.
TILE = 32
# End-of-text ids plus a request's own stop_token_ids.
MAX_STOP_IDS = 40

# Bits of what a launch says of a sequence: it ended, or the target's or the draft's
# numbers were NaN or infinite.
DONE, TARGET_BROKEN, DRAFT_BROKEN = 1, 2, 4

# A row, an index in the row's page table, a page id.
PageUpdate = tuple[int, int, int]

STANDARD, BLOCK, COUPLED = 0, 1, 2
RULES = {"standard": STANDARD, "block": BLOCK, "coupled": COUPLED}


@dataclass(frozen=True, kw_only=True)
class Features:
    """What requests may need beyond temperature, top-k, top-p and min-p.

    Each is a part of the program that the common one does without.

    Attributes:
        is_greedy: Every request takes the argmax: the program has no sampling in it.
        has_controls: Penalties, logit bias, allowed ids, bad words.
        has_grammar: Token masks that the host makes from the drafts.
        num_logprobs: Most probable tokens told per generated token; None tells nothing,
            0 the generated token's own log-probability alone.
        num_prompt_logprobs: The same for the tokens of prompts.
    """

    is_greedy: bool = False
    has_controls: bool = False
    has_grammar: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    def __or__(self, other: "Features") -> "Features":
        """What two requests in one launch need."""
        return Features(
            is_greedy=self.is_greedy and other.is_greedy,
            has_controls=self.has_controls or other.has_controls,
            has_grammar=self.has_grammar or other.has_grammar,
            num_logprobs=_most(self.num_logprobs, other.num_logprobs),
            num_prompt_logprobs=_most(
                self.num_prompt_logprobs, other.num_prompt_logprobs
            ),
        )

    @property
    def name(self) -> str:
        """What logs call a program of these features."""
        extras = {
            "controls": self.has_controls,
            "grammar": self.has_grammar,
            "logprobs": self.num_logprobs is not None,
            "prompt-logprobs": self.num_prompt_logprobs is not None,
        }
        names = [name for name, has_one in extras.items() if has_one]
        return "_".join(["greedy" if self.is_greedy else "sampled", *names])

    def covers(self, other: "Features") -> bool:
        """Whether a program of these features serves requests that need `other`."""
        return self | other == self


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static sizes of one executable.

    Attributes:
        num_seqs: Rows of the decode region.
        num_draft_tokens: K, the most drafts of a sequence, which may want fewer; 0
            leaves the draft model out of the program.
        chunk: Prompt tokens fed, a multiple of `TILE` (or 0).
        features: What the requests of the launch need.
    """

    num_seqs: int
    num_draft_tokens: int
    chunk: int
    features: Features = Features()

    @property
    def name(self) -> str:
        """What logs call it: `8x5+512_sampled`, sequences x drafts + prompt tokens."""
        chunk = f"+{self.chunk}" if self.chunk else ""
        return f"{self.num_seqs}x{self.num_draft_tokens}{chunk}_{self.features.name}"

    @property
    def num_tiles(self) -> int:
        """Tiles of the prefill region."""
        return self.chunk // TILE

    @property
    def max_controlled(self) -> int:
        """Admissions with controls; one comes with at least one tile."""
        return min(MAX_CONTROLLED, self.num_tiles) if self.features.has_controls else 0


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """The static sizes of the engine's state.

    Attributes:
        num_rows: Requests admitted at once; row `num_rows` is the pad.
        num_pages: Pages of the pool; page `num_pages` is the pad.
        page_size: Tokens per page.
        max_model_len: Tokens per sequence.
        vocab_size: Of the target, and so of its draft.
    """

    num_rows: int
    num_pages: int
    page_size: int
    max_model_len: int
    vocab_size: int

    @property
    def table_len(self) -> int:
        """Pages that the longest sequence needs."""
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """A request's values that the device keeps in the request's row.

    Attributes:
        num_prompt: Tokens of the prompt; the others are output.
        min_total: No stop id before the sequence has this many tokens.
        max_total: The sequence ends at this many tokens.
        rule: An index of `RULES`.
        controls: None for none; at most `StepShape.max_controlled` in a launch.
    """

    row: int
    num_prompt: int
    min_total: int
    max_total: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: tuple[int, int]
    rule: int
    stop_ids: tuple[int, ...]
    controls: TokenControls | None = None


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Up to `TILE` consecutive known tokens of one sequence.

    Attributes:
        start: Position of the first token.
        is_last: The prompt ends here: sample the next token.
        is_draft_only: The target has these tokens already; only the draft lacks them.
        next_token: The known token after these, whose log-probability is wanted.
    """

    row: int
    start: int
    tokens: np.ndarray
    is_last: bool
    is_draft_only: bool = False
    next_token: int = NO_TOKEN


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One launch: who decodes with how many drafts, what is fed, which pages are new.

    Attributes:
        decode: (row, draft tokens) of every decoding sequence.
        pages: (row, index in the row's page table, page id).
        grammars: Who answers for the text of a row, by its number `grammar_id`.
    """

    decode: list[tuple[int, int]] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    grammars: dict[int, Any] = field(default_factory=dict)


def _most(left: int | None, right: int | None) -> int | None:
    return max((n for n in (left, right) if n is not None), default=None)


class PlanLayout:
    """Where each part of a plan lies in the vector, for one pair of shapes."""

    def __init__(self, shape: StepShape, pool: PoolShape):
        self.shape, self.pool = shape, pool

    @cached_property
    def max_page_updates(self) -> int:
        """New pages one launch can need: every sequence's lookahead, and the chunk's.

        Two launches may be planned before the first is read, so a sequence's bound
        can move by twice the lookahead. A prompt that begins as an earlier one did
        takes over pages at once, at most as many as a sequence has; the launch of
        several such prompts has room for them all, or some come with the next.
        """
        size = self.pool.page_size
        lookahead = 2 * (self.shape.num_draft_tokens + 1)
        per_seq = -(-lookahead // size) + 1
        tiles = self.shape.num_tiles
        fed = tiles * (-(-TILE // size) + 1 + per_seq)
        shared = self.pool.table_len if tiles else 0
        return self.shape.num_seqs * per_seq + fed + shared

    @cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shape of every field, in order."""
        tiles, seqs = self.shape.num_tiles, self.shape.num_seqs
        fields = {
            "decode_row": (seqs,),
            "decode_draft": (seqs,),
            "page_update": (3, self.max_page_updates),
            "tile_tokens": (tiles, TILE),
            "tile_row": (tiles,),
            "tile_start": (tiles,),
            "tile_len": (tiles,),
            "tile_is_last": (tiles,),
            "tile_is_draft_only": (tiles,),
            "admit_row": (tiles,),
            "admit_num_prompt": (tiles,),
            "admit_min_total": (tiles,),
            "admit_max_total": (tiles,),
            "admit_temperature": (tiles,),  # the bits of a float32, as the next two
            "admit_top_p": (tiles,),
            "admit_min_p": (tiles,),
            "admit_top_k": (tiles,),
            "admit_seed": (tiles, 2),
            "admit_rule": (tiles,),
            "admit_stop_ids": (tiles, MAX_STOP_IDS),
        }
        if self.shape.max_controlled:
            count, vocab_size = self.shape.max_controlled, self.pool.vocab_size
            fields |= control_fields(count, vocab_size)
        if self.shape.features.num_prompt_logprobs is not None:
            fields["tile_next_token"] = (tiles,)
        if self.shape.features.has_grammar:
            fields["grammar_id"] = (self.pool.num_rows,)
        return fields

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Start of every field in the vector."""
        sizes = [math.prod(shape) for shape in self.fields.values()]
        ends = itertools.accumulate(sizes, initial=0)
        return dict(zip(self.fields, ends, strict=False))

    @cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.fields.values())

    def prepare(self) -> None:
        """Work out all that does not depend on a plan."""
        _ = self.offsets, self._empty

    @cached_property
    def _empty(self) -> np.ndarray:
        """The plan in which every entry is a pad."""
        vector = np.zeros(self.size, np.int32)
        for name in self.fields:
            if name.endswith("_row") or name == "page_update":
                start = self.offsets[name]
                stop = start + math.prod(self.fields[name])
                vector[start:stop] = self.pool.num_rows
        return vector

    def pack(self, plan: StepPlan) -> np.ndarray:
        """Write a plan into a fresh vector; absent entries are pads."""
        vector, at = self._empty.copy(), self.offsets
        decode = np.asarray(plan.decode, np.int32).reshape(-1, 2)
        for name, column in zip(("decode_row", "decode_draft"), decode.T, strict=True):
            vector[at[name] : at[name] + len(decode)] = column
        count = self.max_page_updates
        assert len(plan.pages) <= count, f"{len(plan.pages)} page updates over {count}"
        pages = np.asarray(plan.pages, np.int32).reshape(-1, 3)
        stop = at["page_update"] + 3 * count
        vector[at["page_update"] : stop].reshape(3, count)[:, : len(pages)] = pages.T
        for index, tile in enumerate(plan.tiles):
            stop = at["tile_tokens"] + (index + 1) * TILE
            vector[stop - len(tile.tokens) : stop] = tile.tokens
            vector[at["tile_row"] + index] = tile.row
            vector[at["tile_start"] + index] = tile.start
            vector[at["tile_len"] + index] = len(tile.tokens)
            vector[at["tile_is_last"] + index] = tile.is_last
            vector[at["tile_is_draft_only"] + index] = tile.is_draft_only
            if "tile_next_token" in at:
                vector[at["tile_next_token"] + index] = tile.next_token
        for index, admission in enumerate(plan.admissions):
            self._pack_admission(vector, index, admission)
        for row, reading in plan.grammars.items():
            vector[at["grammar_id"] + row] = reading.grammar_id
        controlled = [one for one in plan.admissions if one.controls is not None]
        most = self.shape.max_controlled
        assert len(controlled) <= most, f"{len(controlled)} controlled over {most}"
        for index, admission in enumerate(controlled):
            self._pack_controls(vector, index, admission)
        return vector

    def _pack_controls(
        self, vector: np.ndarray, index: int, admission: Admission
    ) -> None:
        assert admission.controls is not None
        vector[self.offsets["control_row"] + index] = admission.row
        parts = pack_controls(admission.controls, self.pool.vocab_size)
        for name, values in parts.items():
            start = self.offsets[name] + index * values.size
            vector[start : start + values.size] = values.reshape(-1)

    def _pack_admission(
        self, vector: np.ndarray, index: int, admission: Admission
    ) -> None:
        at = self.offsets
        for name in ("row", "num_prompt", "min_total", "max_total", "top_k", "rule"):
            vector[at[f"admit_{name}"] + index] = getattr(admission, name)
        for name in ("temperature", "top_p", "min_p"):
            bits = np.float32(getattr(admission, name)).view(np.int32)
            vector[at[f"admit_{name}"] + index] = bits
        start = at["admit_seed"] + 2 * index
        seed = np.array(admission.seed, np.uint32)
        vector[start : start + 2] = seed.view(np.int32)
        start = at["admit_stop_ids"] + MAX_STOP_IDS * index
        vector[start : start + MAX_STOP_IDS] = NO_TOKEN
        vector[start : start + len(admission.stop_ids)] = admission.stop_ids


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one launch did, read back as one int32 vector.

    Attributes:
        tokens: `[seq, K + 1]`, the first `num_emitted[s]` of row s count.
        num_draft: Draft tokens that were proposed: a lookup may find fewer than asked.
        num_accepted: Draft tokens among `tokens`.
        is_done: The sequence ended on the device.
        is_broken: The tokens mean nothing: the target's numbers were NaN or infinite.
        is_draft_broken: The draft model's were; the tokens are the target's.
        tile_token: `[tile]`, sampled where the tile was the prompt's last.
        tile_is_done, tile_is_broken: As for sequences.
        logprobs: `[seq, K + 1]`, of `tokens`, where the shape tells any.
        tile_logprobs: `[tile]`, of `tile_token`.
        prompt_logprobs: `[tile, TILE]`, where the shape tells any: entry t is about the
            token after the tile's t-th. Right-aligned, as the tokens are: the last
            entries count. Junk where no next token is known.
    """

    tokens: np.ndarray
    num_emitted: np.ndarray
    num_draft: np.ndarray
    num_accepted: np.ndarray
    is_done: np.ndarray
    is_broken: np.ndarray
    is_draft_broken: np.ndarray
    tile_token: np.ndarray
    tile_is_done: np.ndarray
    tile_is_broken: np.ndarray
    logprobs: TokenLogprobs | None = None
    tile_logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None

    @classmethod
    def unpack(cls, vector: np.ndarray, shape: StepShape) -> "StepResult":
        """Read the vector that `step.speculative_step` returns."""
        seqs, tiles, width = shape.num_seqs, shape.num_tiles, shape.num_draft_tokens + 5
        decode, rest = vector[: seqs * width], vector[seqs * width :]
        decode = decode.reshape(seqs, width)
        logprobs = prompt_logprobs = tile_logprobs = None
        top, prompt_top = (
            shape.features.num_logprobs,
            shape.features.num_prompt_logprobs,
        )
        if top is not None:
            leading = seqs, shape.num_draft_tokens + 1
            logprobs, rest = read_logprobs(rest, leading, top)
        if prompt_top is not None:
            prompt_logprobs, rest = read_logprobs(rest, (tiles, TILE), prompt_top)
        first, rest = rest[: 2 * tiles], rest[2 * tiles :]
        first = first.reshape(tiles, 2)
        if top is not None:
            tile_logprobs, rest = read_logprobs(rest, (tiles,), top)
        assert not rest.size, f"{rest.size} numbers of the result were not read"
        return cls(
            tokens=decode[:, : shape.num_draft_tokens + 1],
            num_emitted=decode[:, -4],
            num_draft=decode[:, -3],
            num_accepted=decode[:, -2],
            is_done=decode[:, -1] & DONE > 0,
            is_broken=decode[:, -1] & TARGET_BROKEN > 0,
            is_draft_broken=decode[:, -1] & DRAFT_BROKEN > 0,
            tile_token=first[:, 0],
            tile_is_done=first[:, 1] & DONE > 0,
            tile_is_broken=first[:, 1] & TARGET_BROKEN > 0,
            logprobs=logprobs,
            tile_logprobs=tile_logprobs,
            prompt_logprobs=prompt_logprobs,
        )
