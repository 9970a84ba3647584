"""The formats of a plan and of a result: one int32 vector each.

This module writes and reads both formats, on host and device. It uses methods that
numpy and jax arrays share, so that the engine can import it without jax.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxspec.program.plan import (
    TILE,
    Admission,
    Column,
    ControlValues,
    PoolShape,
    StepPlan,
    StepShape,
    Tile,
    columns,
)


class Layout:
    """Offsets of arrays in a vector of int32, one after the other."""

    def __init__(self, fields: dict[str, Column]):
        self.fields = fields
        sizes = [math.prod(field.shape) for field in fields.values()]
        ends = itertools.accumulate(sizes, initial=0)
        self.offsets = dict(zip(fields, ends, strict=False))
        self.size = sum(sizes)
        # Precomputed because `view` runs in every round. For each array: its slice; its
        # shape, or None if it is flat; its type, or None if it is read as int32.
        self._parts = {
            name: (
                slice(start, start + size),
                field.shape if len(field.shape) != 1 else None,
                field.dtype if field.dtype not in (np.int32, bool) else None,
            )
            for (name, field), start, size in zip(
                fields.items(), self.offsets.values(), sizes, strict=True
            )
        }
        self._flags = {name for name, one in fields.items() if one.dtype is bool}

    def view(self, vector: Any, name: str) -> Any:
        """Return one array of a vector, for numpy a view; flags are 0 or 1."""
        place, shape, dtype = self._parts[name]
        array = vector[place]
        if shape is not None:
            array = array.reshape(shape)
        return array if dtype is None else array.view(dtype)

    def read(self, vector: Any) -> dict[str, Any]:
        """Return all arrays of a vector, in their own types."""
        found = {name: self.view(vector, name) for name in self.fields}
        return {name: x != 0 if name in self._flags else x for name, x in found.items()}

    def flatten(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the parts of a vector, to be concatenated; the inverse of `read`.

        Args:
            values: Every array; those without entries may be missing.
        """
        assert values.keys() <= self.fields.keys(), (list(values), list(self.fields))
        parts = []
        for name, field in self.fields.items():
            if not math.prod(field.shape):
                continue
            value = values[name]
            assert value.shape == field.shape, (name, value.shape, field.shape)
            is_cast = field.dtype in (np.int32, bool)
            part = value.astype(np.int32) if is_cast else value.view(np.int32)
            parts.append(part.reshape(-1))
        return parts


class PlanLayout(Layout):
    """Offsets of a plan's parts in its vector, for one pair of shapes."""

    def __init__(self, shape: StepShape, pool: PoolShape):
        self.shape, self.pool = shape, pool
        seqs, tiles = shape.num_seqs, shape.num_tiles
        row = functools.partial(Column, pad=pool.num_rows)  # the pad row

        def records(prefix: str, record: Any, count: int) -> dict[str, Column]:
            fields = {f"{prefix}_row": row(shape=(count,))}
            for name, one in columns(record).items():
                fields[f"{prefix}_{name}"] = one.of(count, pool.vocab_size)
            return fields

        fields = {
            "decode_row": row(shape=(seqs,)),
            "decode_wanted_levels": Column(shape=(seqs,)),
            "page_update": row(shape=(3, self.max_page_updates)),
            "tile_length": Column(shape=(tiles,)),
            **records("tile", Tile, tiles),
            **records("admit", Admission, tiles),
        }
        if pool.unit_pages is not None:
            fields["local_page_update"] = fields["page_update"]
        if shape.max_controlled:
            fields |= records("control", ControlValues, shape.max_controlled)
        if shape.features.has_grammar:
            fields["grammar_id"] = Column(shape=(pool.num_rows,))
        if shape.max_rounds > 1:
            fields["num_rounds"] = Column(pad=1)
        super().__init__(fields)
        self._empty = np.concatenate(
            self.flatten({name: field.empty() for name, field in fields.items()})
        )

    @property
    def max_page_updates(self) -> int:
        """Maximum new pages of a launch: for every sequence's lookahead, and prompts.

        Two launches may be planned before the first is read, so a sequence's bound
        can move by twice the lookahead. A prompt that shares a prefix with an earlier
        one reuses its pages at once, at most those of one sequence; if several such
        prompts do not fit, some wait for the next launch. Pages are allocated in whole
        units, which adds less than one unit.
        """
        size = self.pool.page_size
        lookahead = 2 * self.shape.max_rounds * self.shape.num_slots
        per_seq = -(-lookahead // size) + (self.pool.unit_pages or 1)
        tiles = self.shape.num_tiles
        prompts = tiles * (-(-TILE // size) + 1 + per_seq)
        shared = self.pool.table_len if tiles else 0
        return self.shape.num_seqs * per_seq + prompts + shared

    def pack(self, plan: StepPlan) -> np.ndarray:
        """Write a plan into a new vector; absent entries are pads."""
        vector = self._empty.copy()
        if plan.decode:
            decode = np.array(plan.decode, np.int32)
            self.view(vector, "decode_row")[: len(decode)] = decode[:, 0]
            self.view(vector, "decode_wanted_levels")[: len(decode)] = decode[:, 1]
        for name, updates in (
            ("page_update", plan.pages),
            ("local_page_update", plan.local_pages),
        ):
            if updates:
                pages, count = np.array(updates, np.int32), self.max_page_updates
                assert len(pages) <= count, f"{len(pages)} page updates over {count}"
                self.view(vector, name)[:, : len(pages)] = pages.T
        if plan.tiles:
            lengths = [len(tile.tokens) for tile in plan.tiles]
            self.view(vector, "tile_length")[: len(lengths)] = lengths
        self._write(vector, "tile", [tile.row for tile in plan.tiles], plan.tiles)
        admitted = plan.admissions
        self._write(vector, "admit", [one.row for one in admitted], admitted)
        controlled = [one for one in admitted if one.controls is not None]
        max_controlled = self.shape.max_controlled
        assert len(controlled) <= max_controlled, (
            f"{len(controlled)} controlled over {max_controlled}"
        )
        values = [
            admission.controls.values(self.pool.vocab_size)
            for admission in controlled
            if admission.controls is not None
        ]
        self._write(vector, "control", [one.row for one in controlled], values)
        for row, reading in plan.grammars.items():
            self.view(vector, "grammar_id")[row] = reading.grammar_id
        assert 1 <= plan.num_rounds <= self.shape.max_rounds, plan.num_rounds
        if self.shape.max_rounds > 1:
            self.view(vector, "num_rounds")[...] = plan.num_rounds
        return vector

    def _write(
        self, vector: np.ndarray, prefix: str, rows: list[int], records: list[Any]
    ) -> None:
        """Write records of one kind; entries that are short leave pads."""
        if not records:
            return
        self.view(vector, f"{prefix}_row")[: len(rows)] = rows
        for name, declared in columns(records[0]).items():
            if f"{prefix}_{name}" not in self.fields:
                continue
            entries = self.view(vector, f"{prefix}_{name}")
            if entries.ndim == 1:
                entries[: len(records)] = [getattr(record, name) for record in records]
                continue
            for entry, record in zip(entries, records, strict=False):
                value = getattr(record, name)
                start = len(entry) - len(value) if declared.is_right_aligned else 0
                entry[start : start + len(value)] = value


class TokenLogprobs(NamedTuple):
    """The model's own logprobs at the positions of tokens, before every control.

    The leading axes are those of the tokens. `own` is the token's logprob, `rank` one
    more than the number of more probable tokens; `top_ids` and `top` are the most
    probable tokens, the best first, ties by id. `chosen` are the logprobs of the ids
    that the request chose, in their order, then junk. The device fills the fields with
    jax arrays.
    """

    own: np.ndarray  # float32 [...]
    rank: np.ndarray  # int32 [...]
    top_ids: np.ndarray  # int32 [..., N]
    top: np.ndarray  # float32 [..., N]
    chosen: np.ndarray  # float32 [..., C]

    def parts(self) -> list[Any]:
        """Return the parts of a table, to be concatenated: `num_columns` per token."""
        own, rank, top_ids, top, chosen = self
        single = own.view(np.int32)[..., None], rank[..., None]
        return [*single, top_ids, top.view(np.int32), chosen.view(np.int32)]

    @classmethod
    def read(cls, table: np.ndarray, num_chosen: int = 0) -> "TokenLogprobs":
        """Read a table of `num_columns` numbers per token; the inverse of `parts`."""
        num_top = (table.shape[-1] - num_chosen) // 2 - 1
        end = 2 + 2 * num_top
        return cls(
            own=table[..., 0].view(np.float32),
            rank=table[..., 1],
            top_ids=table[..., 2 : 2 + num_top],
            top=table[..., 2 + num_top : end].view(np.float32),
            chosen=table[..., end:].view(np.float32),
        )


def num_columns(num_top: int, num_chosen: int = 0) -> int:
    """Return the number of columns for the logprobs of one token."""
    return 2 + 2 * num_top + num_chosen


def _part(sizes: str, dtype: Any = np.int32, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field of a result; its sizes are names of `_sizes`."""
    return dataclasses.field(default=default, metadata={"part": (sizes, dtype)})


def _sizes(shape: StepShape) -> dict[str, int]:
    """Return sizes by name; a part whose size has no value is left out."""
    features, seqs = shape.features, shape.num_seqs
    sizes = dict(seq=seqs, emitted=shape.tree.max_emitted, tile=shape.num_tiles)
    sizes["token"] = TILE
    if not shape.tree.is_chain:
        sizes["seq_of_trees"] = seqs
    if features.num_logprobs is not None:
        sizes["logprob"] = num_columns(
            features.num_logprobs, features.num_logprob_token_ids
        )
    if features.num_prompt_logprobs is not None:
        sizes["prompt_logprob"] = num_columns(features.num_prompt_logprobs)
    return sizes


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one round, declared here for device and host.

    The device fills it in by name (`step._result`); the vector's layout follows.

    Attributes:
        tokens: `[seq, K + 1]`, of which the first `num_emitted[s]` of row s are valid.
        num_valid_drafts: Draft tokens proposed: a lookup may find fewer than requested.
        num_accepted: Draft tokens among `tokens`, the first ones, on the main chain.
        num_accepted_nodes: Accepted drafts, side branches included, even past the end
            of the text; None in a chain.
        tree_row: Row in the tree of the last accepted draft; None in a chain.
        is_done: The sequence ended on the device.
        is_broken: The tokens are junk: the target computed NaN or infinity.
        is_draft_broken: The draft model computed NaN or infinity; the tokens are the
            target's.
        tile_token: `[tile]`, sampled where the tile was the prompt's last.
        tile_is_done, tile_is_broken: As for sequences.
        logprobs: `[seq, K + 1]`, of `tokens`; None without logprobs.
        tile_logprobs: `[tile]`, of `tile_token`.
        prompt_logprobs: `[tile, TILE]`; entry t is for the token after the tile's t-th.
            Right-aligned, as the tokens are. Junk if the next token is not known.
        later: Results of the launch's later rounds.
    """

    tokens: np.ndarray = _part("seq emitted")
    num_emitted: np.ndarray = _part("seq")
    num_valid_drafts: np.ndarray = _part("seq")
    num_accepted: np.ndarray = _part("seq")
    is_done: np.ndarray = _part("seq", bool)
    is_broken: np.ndarray = _part("seq", bool)
    is_draft_broken: np.ndarray = _part("seq", bool)
    tile_token: np.ndarray = _part("tile")
    tile_is_done: np.ndarray = _part("tile", bool)
    tile_is_broken: np.ndarray = _part("tile", bool)
    num_accepted_nodes: np.ndarray | None = _part("seq_of_trees", default=None)
    tree_row: np.ndarray | None = _part("seq_of_trees", default=None)
    logprobs: TokenLogprobs | None = _part("seq emitted logprob", default=None)
    tile_logprobs: TokenLogprobs | None = _part("tile logprob", default=None)
    prompt_logprobs: TokenLogprobs | None = _part(
        "tile token prompt_logprob", default=None
    )
    later: tuple["StepResult", ...] = ()

    @property
    def rounds(self) -> tuple["StepResult", ...]:
        """Results of all rounds of the launch, in order."""
        return (self, *self.later)

    @classmethod
    def unpack(cls, vector: np.ndarray, shape: StepShape) -> "StepResult":
        """Read the vector that `step.speculative_step` returns."""
        if shape.max_rounds == 1:
            return cls._of_round(vector, shape)
        parts = vector[1:].reshape(shape.max_rounds, -1)[: vector[0]]
        first, *later = (cls._of_round(part, shape) for part in parts)
        return dataclasses.replace(first, later=tuple(later))

    @classmethod
    def _of_round(cls, vector: np.ndarray, shape: StepShape) -> "StepResult":
        values = _read(vector, shape)
        num_chosen = shape.features.num_logprob_token_ids
        for name in ("logprobs", "tile_logprobs"):
            if name in values:
                values[name] = TokenLogprobs.read(values[name], num_chosen)
        if "prompt_logprobs" in values:
            read = TokenLogprobs.read(values["prompt_logprobs"])
            values["prompt_logprobs"] = read
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class DraftPrefillResult:
    """The result of a draft-prefill launch.

    Attributes:
        acceptance_probabilities: float32 `[tile, TILE]`: the probability that a draft
            in place of each token's successor would have been accepted. Negative if
            unknown: prompts, pads, and drafts that are sampled without a seed.
    """

    acceptance_probabilities: np.ndarray = _part("tile token", np.float32)

    @property
    def rounds(self) -> tuple["DraftPrefillResult"]:
        """The result itself: such a launch has one round."""
        return (self,)

    @classmethod
    def unpack(cls, vector: np.ndarray, shape: StepShape) -> "DraftPrefillResult":
        """Read the vector that `step.speculative_step` returns."""
        return cls(**_read(vector, shape))


class ResultLayout(Layout):
    """Offsets of a result's parts in its vector.

    The vector of a launch that may run several rounds starts with the number of rounds
    run, then holds a part for each round that it may run.
    """

    def __init__(self, shape: StepShape):
        sizes, parts = _sizes(shape), {}
        for declared in dataclasses.fields(
            DraftPrefillResult if shape.is_draft_prefill else StepResult
        ):
            if "part" in declared.metadata:
                words, dtype = declared.metadata["part"]
                if sizes.keys() >= set(words.split()):
                    part_shape = tuple(sizes[word] for word in words.split())
                    parts[declared.name] = Column(dtype, part_shape)
        super().__init__(parts)


# Building a layout takes longer than reading a result.
result_layout = functools.lru_cache(maxsize=256)(ResultLayout)


def _read(vector: np.ndarray, shape: StepShape) -> dict[str, Any]:
    layout = result_layout(shape)
    assert vector.shape == (layout.size,), (vector.shape, layout.size)
    return layout.read(vector)
