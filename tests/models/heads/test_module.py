"""The Flax modules of heads compute the same as the functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.heads import eagle, eagle3, medusa
from jaxspec.models.heads.module import Eagle, Eagle3, Medusa
from jaxspec.models.heads.weights import init_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import (
    HEADS,
    PAGE_SIZE,
    head_pass,
    rows_at,
)

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
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_eagle_module_equals_the_function(kind):
    config = HEADS[kind]
    module, params = filled(
        {"eagle": Eagle, "eagle3": Eagle3}[kind](config, FLOAT32), config
    )
    hidden = ROWS
    if kind == "eagle3":
        streams = [ROWS, 2 * ROWS, 3 * ROWS]
        hidden = module.fuse(streams)
        np.testing.assert_array_equal(hidden, eagle3.fuse(config, params, streams))
    pages = jnp.zeros((8, PAGE_SIZE, 2 * theirs.KV_HEADS, theirs.HEAD_DIM))
    batch, target = rows_at(0, 4), DenseMatrix(EMBEDDING)
    found, after = nnx.jit(type(module).__call__)(
        module, batch, hidden, pages, EMBEDDING
    )
    functions = {"eagle": eagle, "eagle3": eagle3}[kind]
    given = batch, batch.tokens, target, hidden, pages
    wanted, _, logits = head_pass(functions, config, params, *given)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert isinstance(after, jax.Array) and jnp.abs(after).max() > 0
    if kind == "eagle":
        np.testing.assert_allclose(module.logits(found, EMBEDDING), logits, atol=1e-4)
    else:
        logits = eagle3.logits(config, params, wanted)
        np.testing.assert_array_equal(module.logits(found), logits)


def test_medusa_module_equals_the_function():
    module, params = filled(Medusa(HEADS["medusa"], FLOAT32), HEADS["medusa"])
    rows = medusa.forward(module.config, params, ROWS)
    for head, found in enumerate(module(ROWS, EMBEDDING)):
        wanted = medusa.logits(
            module.config, params, head, rows[head], DenseMatrix(EMBEDDING)
        )
        np.testing.assert_array_equal(found, wanted)
