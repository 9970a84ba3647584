"""On a CPU the bits of a token's logits do not depend on the rest of the batch.

The bundled target's first layers, with users' compile options, run the same texts in
regions of one to nine queries (K = 0 to 8), one to eight sequences at a time, in prompt
tiles, and with both in one launch. Bits are compared, not texts: texts would agree
unless there are near ties.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.engine import ModelConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.loader import load_weights
from jaxspec.engine.runner import build_mesh
from jaxspec.models.backend import Backend
from jaxspec.models.cpu import compiler_options
from jaxspec.models.network import build_network
from jaxspec.program.plan import TILE, PoolShape
from jaxspec.program.token_batch import join_batches, make_token_batch
from jaxspec_checkpoints import bundled_target
from jaxspec_kernels.bits import storage_dtype
from tests.long_suites import members
from tests.support.oracles import init_kv_pages
from tests.support.programs import USERS_COMPILER

NUM_LAYERS = 2
# Text lengths: longer than a block of keys and the window, and no multiples of tile
# sizes.
NUM_TOKENS, NUM_TEXTS = 139, 8
# Keep every 16th logit, as each depends on the whole computation of its row.
SPARSE = 16
POOL = PoolShape(
    num_rows=NUM_TEXTS,
    num_pages=NUM_TEXTS * 12,
    page_size=16,
    max_model_len=192,
    vocab_size=8192,
)
TEXTS = np.random.default_rng(7).integers(5, POOL.vocab_size, (NUM_TEXTS, NUM_TOKENS))
TABLES = np.arange(NUM_TEXTS * POOL.table_len, dtype=np.int32).reshape(NUM_TEXTS, -1)
AXES = range(1, NUM_TEXTS + 1), range(1, 10)
# Compiling takes most of the time, so `make test` has only users' default type, and the
# case that differs most from a plain round.
EXAMPLE = ("bfloat16", 8, 9)
# Networks never run a single row: see `cpu.MIN_ROWS`. There are only two texts, because
# one token at a time takes the most launches.
FEW_TEXTS = 2
DTYPES = ["float32", "bfloat16"]


@functools.cache
def model(dtype: str) -> tuple[ModelConfig, Any]:
    args = EngineArgs(model=str(bundled_target()), dtype=dtype, max_model_len=192)
    config = args.create_engine_config()
    params, _ = load_weights(config, build_mesh(config))
    layers = {str(index): params["layers"][str(index)] for index in range(NUM_LAYERS)}
    cut = dataclasses.replace(config.model_config, num_layers=NUM_LAYERS)
    return cut, params | {"layers": layers}


# Tokens, each text's length so far, its pages, and which tokens are not pads.
Part = tuple[Any, Any, Any, Any]


@functools.partial(
    jax.jit,
    static_argnums=0,
    donate_argnums=2,
    compiler_options=(compiler_options() or {}) | USERS_COMPILER,
)
def run(config: ModelConfig, params: Any, pages: Any, parts: list[Part]) -> Any:
    """Run one launch; return the logits of its rows, and the pages."""
    network = build_network(config, params, Backend(implementation="reference"))
    batch = join_batches([make_token_batch(*part, POOL) for part in parts])
    output, pages = network.forward(batch, pages)
    return network.logits(output.hidden_states)[:, ::SPARSE], pages


def part_of(texts: np.ndarray, ends: list[int], num_queries: int) -> Part:
    """Return the last `num_queries` tokens of each text up to its end in `ends`."""
    position = np.array(ends)[:, None] + np.arange(-num_queries, 0)
    tokens = np.take_along_axis(TEXTS[texts], np.maximum(position, 0), axis=1)
    return (
        tokens.astype(np.int32),
        np.array(ends, np.int32),
        TABLES[texts],
        position >= 0,
    )


class Reader:
    """Runs texts, and stores the logits of their tokens.

    Attributes:
        logits: Logits of every token of every text, NaN before it has run.
    """

    def __init__(self, dtype: str):
        self._config, self._params = model(dtype)
        stored = storage_dtype(jnp.dtype(dtype), "cpu")
        self._pages = init_kv_pages(
            self._config, POOL.num_pages, POOL.page_size, stored
        )
        shape = *TEXTS.shape, POOL.vocab_size // SPARSE
        self.logits = np.full(shape, np.nan, np.float32)

    def run(self, *parts: tuple[list[int], list[int], int]) -> None:
        """Run one launch of parts: texts, length so far of each, queries per text."""
        given = [part_of(np.array(part[0]), *part[1:]) for part in parts]
        rows, self._pages = run(self._config, self._params, self._pages, given)
        rows, start = np.asarray(rows), 0
        for texts, ends, num_queries in parts:
            for text, end in zip(texts, ends, strict=True):
                here = rows[start : start + num_queries]
                start += num_queries
                count = min(num_queries, end)
                self.logits[text, end - count : end] = here[num_queries - count :]


def by_rounds(
    dtype: str, num_seqs: int, num_queries: int, num_texts: int = NUM_TEXTS
) -> np.ndarray:
    """Run `num_seqs` texts at a time, `num_queries` tokens of each in a launch.

    Return the logits of all tokens.
    """
    reader = Reader(dtype)
    for first in range(0, num_texts, num_seqs):
        # The last batch is filled up by repeating the last text.
        texts = [min(text, num_texts - 1) for text in range(first, first + num_seqs)]
        for end in [*range(num_queries, NUM_TOKENS, num_queries), NUM_TOKENS]:
            reader.run((texts, [end] * num_seqs, num_queries))
    return reader.logits


def by_tiles(dtype: str, num_tiles: int, num_decoding: int = 0) -> np.ndarray:
    """Run prompts by tiles; `num_decoding` other texts decode 6 tokens per launch.

    Return the logits of all tokens.
    """
    reader = Reader(dtype)
    ends = [*range(NUM_TOKENS, 0, -TILE)][::-1]
    decoding = list(range(NUM_TEXTS - num_decoding, NUM_TEXTS))
    at = 6
    for text in range(NUM_TEXTS - num_decoding):
        for first in range(0, len(ends), num_tiles):
            tiles = ends[first : first + num_tiles]
            tiles += [0] * (num_tiles - len(tiles))  # pads
            parts = [([text] * num_tiles, tiles, TILE)]
            if decoding:
                parts.insert(0, (decoding, [at] * num_decoding, 6))
                at = min(at + 6, NUM_TOKENS)
            reader.run(*parts)
    return reader.logits


@functools.cache
def plain(dtype: str) -> np.ndarray:
    """Return the logits of all tokens, from launches with one token of two texts."""
    return by_rounds(dtype, 2, 1)


def assert_same_bits(found: np.ndarray, dtype: str, num_texts: int = NUM_TEXTS) -> None:
    is_known = ~np.isnan(found)
    assert is_known[:num_texts].any(axis=(1, 2)).all(), "a text was not run"
    differ = (found != plain(dtype)) & is_known
    assert not differ.any(), f"{differ.any(axis=2).sum()} of {TEXTS.size} tokens"


@pytest.mark.parametrize(
    ("dtype", "num_seqs", "num_queries"),
    members(
        "same_bits",
        itertools.product(DTYPES, *AXES),
        is_example=lambda one: one == EXAMPLE,
    ),
)
def test_drafts_and_batch_size_change_no_bit(dtype, num_seqs, num_queries):
    assert_same_bits(by_rounds(dtype, num_seqs, num_queries), dtype)


@pytest.mark.parametrize(
    "dtype",
    members("same_bits", DTYPES, is_example=lambda dtype: dtype == "bfloat16"),
)
def test_one_token_at_a_time_changes_no_bit(dtype):
    found = by_rounds(dtype, 1, 1, FEW_TEXTS)
    assert_same_bits(found, dtype, FEW_TEXTS)


@pytest.mark.parametrize(
    ("dtype", "num_tiles", "num_decoding"),
    members(
        "same_bits",
        [
            (dtype, *tiles)
            for dtype in DTYPES
            for tiles in ((4, 2), (1, 0), (2, 0), (4, 0), (16, 0), (1, 1), (16, 5))
        ],
        is_example=lambda one: one == ("bfloat16", 4, 2),
    ),
)
def test_prompts_in_any_chunks_change_no_bit(dtype, num_tiles, num_decoding):
    assert_same_bits(by_tiles(dtype, num_tiles, num_decoding), dtype)
