"""The Flax modules of heads compute the same as the functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.heads import eagle3, medusa
from jaxspec.models.heads.module import Eagle, Eagle3, Medusa
from jaxspec.models.heads.weights import init_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.test_config import HEADS
from tests.models.heads.test_eagle import one_pass as eagle_pass
from tests.models.heads.test_eagle3 import PAGE_SIZE, one_pass, rows_at

FLOAT32 = jnp.dtype(jnp.float32)
RANDOM = np.random.default_rng(5)
ROWS = jnp.asarray(RANDOM.normal(size=(4, theirs.HIDDEN)), jnp.float32)
EMBEDDING = jnp.asarray(RANDOM.normal(size=(theirs.VOCAB, theirs.HIDDEN)), jnp.float32)


def filled(module, config):
    """Return the module with random parameters, and the tree of these."""
    ids = np.arange(config.draft_vocab_size)
    params = init_head(config, seed=2, mesh=make_mesh(1), token_ids=ids)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 if leaf.dtype == FLOAT32 else leaf, params
    )
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        node = params
        for key in path[1:]:
            node = node[str(key)]
        variable[...] = jax.tree.leaves(node)[0]
    return module, params


@pytest.mark.slow
def test_eagle3_module_equals_the_function():
    module, params = filled(Eagle3(HEADS["eagle3"], FLOAT32), HEADS["eagle3"])
    streams = [ROWS, 2 * ROWS, 3 * ROWS]
    hidden = module.fuse(streams)
    np.testing.assert_array_equal(hidden, eagle3.fuse(module.config, params, streams))
    pages = jnp.zeros((8, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM))
    batch = rows_at(0, 4)
    found, after = nnx.jit(Eagle3.__call__)(module, batch, hidden, pages, EMBEDDING)
    wanted, _, _ = one_pass(
        module.config,
        params,
        batch,
        batch.tokens,
        DenseMatrix(EMBEDDING),
        hidden,
        pages,
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert isinstance(after, jax.Array) and jnp.abs(after).max() > 0
    np.testing.assert_array_equal(
        module.logits(found), eagle3.logits(module.config, params, wanted)
    )


@pytest.mark.slow
def test_eagle_module_equals_the_function():
    config = HEADS["eagle"]
    module, params = filled(Eagle(config, FLOAT32), config)
    pages = jnp.zeros((8, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM))
    batch, target = rows_at(0, 4), DenseMatrix(EMBEDDING)
    found, after = nnx.jit(Eagle.__call__)(module, batch, ROWS, pages, EMBEDDING)
    wanted, _, logits = eagle_pass(
        config, params, batch, batch.tokens, target, ROWS, pages
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert isinstance(after, jax.Array) and jnp.abs(after).max() > 0
    np.testing.assert_allclose(module.logits(found, EMBEDDING), logits, atol=1e-4)


def test_medusa_module_equals_the_function():
    module, params = filled(Medusa(HEADS["medusa"], FLOAT32), HEADS["medusa"])
    rows = medusa.forward(module.config, params, ROWS)
    for head, found in enumerate(module(ROWS, EMBEDDING)):
        wanted = medusa.logits(
            module.config, params, head, rows[head], DenseMatrix(EMBEDDING)
        )
        np.testing.assert_array_equal(found, wanted)
