"""Masks reach the logits bit by bit, and the host receives the right tokens."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.backend import Backend
from jaxspec.program import grammar
from jaxspec.program.plan import Features, PoolShape, StepPlan, StepShape
from jaxspec.program.wire import PlanLayout
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh
from jaxspec_kernels import native
from tests.support.rows import make_active

ROWS = 6
WINDOW = grammar.window_of(0)


def make_rows(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, raw logits, mask words, and the masks as one bool per token."""
    random = np.random.default_rng(vocab)
    raw = random.normal(size=(ROWS, vocab)).astype(np.float32)
    logits = raw + random.normal(size=raw.shape).astype(np.float32)
    is_allowed = random.random((ROWS, vocab)) < 0.3
    is_allowed[:, 0] = True
    is_allowed[0] = True
    is_allowed[1, :-1], is_allowed[1, -1] = False, True
    # The other controls forbid all tokens that these two grammars allow.
    logits[2, is_allowed[2]] = -np.inf
    logits[1, -1] = -np.inf
    words = -(-vocab // grammar.WORD)
    bits = np.zeros((ROWS, words * grammar.WORD), np.uint8)
    bits[:, :vocab] = is_allowed
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return logits, raw, packed, is_allowed


def expect(logits: np.ndarray, raw: np.ndarray, is_allowed: np.ndarray) -> np.ndarray:
    allowed = np.where(is_allowed, logits, -np.inf)
    has_token = np.isfinite(allowed).any(axis=1, keepdims=True)
    return np.where(is_allowed & ~has_token, raw, allowed)


@pytest.mark.parametrize("vocab", [16, 32, 40, 64, 8192])
@pytest.mark.parametrize("shards", [1, 8])
def test_restrict_keeps_allowed_tokens(vocab, shards):
    logits, raw, words, is_allowed = make_rows(vocab)
    backend = Backend(mesh=make_mesh(shards), mesh_axes=TARGET_MESH_AXES)

    @jax.jit
    def run(*arguments):
        # Two sequences of three rows.
        parts = [part.reshape(2, 3, -1) for part in arguments]
        return grammar.restrict(*parts, backend=backend)

    found = run(logits, raw, words).reshape(ROWS, vocab)
    np.testing.assert_array_equal(found, expect(logits, raw, is_allowed))


@pytest.mark.parametrize(
    ("num_before", "shards", "is_native"),
    [(0, 1, False), (1, 1, False), (1, 8, False), (1, 1, True)],
)
def test_host_receives_newest_tokens_and_drafts(
    num_before, shards, is_native, monkeypatch
):
    page_size, num_pages, vocab = 4, 16, 40
    token_pages = np.random.default_rng(0).integers(4, 90, (num_pages, page_size))
    lengths = [3, 18, 30, 7]
    table = np.full((4, 8), num_pages)
    table[1, :5] = [3, 0, 9, 2, 7]
    table[2, :8] = [15, 14, 13, 12, 11, 10, 1, 4]
    table[0, 0], table[3, :2] = 5, [6, 8]
    drafts = np.arange(8).reshape(4, 2)
    mesh, asked = make_mesh(shards), []
    if is_native and not grammar.has_native_masks(mesh):
        pytest.skip("no native operations here")
    masks = np.random.default_rng(1).integers(0, 2**32, (4, 2, 2), dtype=np.uint32)

    def source(*arguments):
        # Copy the arguments, because C++ frees its buffers after the call.
        asked.append([np.array(argument) for argument in arguments])
        return masks

    answer = [lambda words, *arguments: source(*arguments)]
    monkeypatch.setattr(native.masks, "_answers", answer)

    active = make_active(
        4,
        row=[3, 1, 0, 2],
        num_tokens=np.array(lengths),
        is_active=[True, True, True, False],
    )
    active = dataclasses.replace(active, page_table=jnp.asarray(table, jnp.int32))
    logits = np.random.default_rng(2).normal(size=(4, 2, vocab)).astype(np.float32)

    @jax.jit
    def run(logits, token_pages, before):
        adjust = grammar.adjuster(
            grammar.native_masks if is_native else source,
            jnp.array([9, 0, 7, 5], jnp.int32),
            token_pages,
            active,
            window=WINDOW,
            inner=lambda logits, drafts, num_before: 2 * logits,
            backend=Backend(mesh=mesh, mesh_axes=TARGET_MESH_AXES),
        )
        return adjust(logits, jnp.asarray(drafts, jnp.int32), num_before=before)

    # Shard as an engine does: logits are split by vocabulary, other arrays are
    # replicated.
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(None, None, TARGET_MESH_AXES))
    logits = jax.device_put(logits, split)
    pages = jax.device_put(jnp.asarray(token_pages, jnp.int32), whole)
    found = run(logits, pages, jax.device_put(np.int32(num_before), whole))
    bits = np.unpackbits(masks.view(np.uint8), axis=2, bitorder="little")
    expected = np.where(bits[:, :, :vocab], 2 * np.asarray(logits), -np.inf)
    np.testing.assert_array_equal(found, expected)
    ((ids, num_tokens, newest, received, before),) = asked
    assert ids.tolist() == [5, 0, 9, 0]  # a row that is done needs no mask
    assert num_tokens.tolist() == lengths
    assert before.tolist() == [num_before, num_before + 1]
    np.testing.assert_array_equal(received, drafts)
    for row, length in enumerate(lengths):
        known = token_pages[table[row][table[row] < num_pages]].reshape(-1)[:length]
        count = min(length, WINDOW)
        assert newest[row, -count:].tolist() == known[-count:].tolist()


class Named(NamedTuple):
    grammar_id: int


def test_grammar_ids_are_sent_only_with_grammars():
    pool = PoolShape(
        num_rows=5, num_pages=40, page_size=4, max_model_len=50, vocab_size=16
    )
    plain = StepShape(num_seqs=4, num_levels=3, max_prompt_tokens=0)
    shape = dataclasses.replace(plain, features=Features(has_grammar=True))
    layout = PlanLayout(shape, pool)
    vector = layout.pack(StepPlan(grammars={4: Named(77), 0: Named(2**31 - 1)}))
    fields = layout.read(jnp.asarray(vector))
    assert fields["grammar_id"].tolist() == [2**31 - 1, 0, 0, 0, 77]
    assert "grammar_id" not in PlanLayout(plain, pool).fields


def test_window_spans_two_of_the_longest_rounds():
    assert [grammar.window_of(count) for count in (0, 16, 17, 32)] == [34, 34, 36, 66]
