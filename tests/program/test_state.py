"""Rows start empty, and every leaf is an array of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.families import config_from_hf
from jaxspec.program.plan import NO_TOKEN, PoolShape
from jaxspec.program.rows import init_rows
from jaxspec.program.state import EngineState, init_token_pages, page_forms
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh
from jaxspec_checkpoints.gemma2.published import published_config

POOL = PoolShape(num_rows=3, num_pages=10, page_size=4, max_model_len=14, vocab_size=70)


def test_new_rows_hold_nobody():
    rows = init_rows(POOL)
    assert rows.page_table.shape == (3, 4)
    assert np.asarray(rows.is_done).all()
    assert not np.asarray(rows.num_tokens).any()
    # The pad page: whatever is written through it is dropped.
    assert (np.asarray(rows.page_table) == POOL.num_pages).all()
    assert (np.asarray(rows.stop_ids) == NO_TOKEN).all()


@pytest.mark.parametrize("scan_layers", [False, True])
def test_scanned_layers_of_a_kind_have_their_pages_in_one_array(scan_layers):
    config = config_from_hf(published_config("9b"))
    config = dataclasses.replace(config, scan_layers=scan_layers)
    dtype: Any = jnp.dtype(jnp.float32)
    forms = page_forms(config, dtype, POOL, make_mesh(8), TARGET_MESH_AXES)
    shapes = [(21 * 10, 4, 16, 256)] * 2 if scan_layers else [(10, 4, 16, 256)] * 42
    assert [form.shape for form in forms] == shapes
    assert all(form.sharding.shard_shape(form.shape)[2] == 2 for form in forms)


def test_the_state_can_be_donated_and_used_again():
    state = EngineState(
        # A copy: what shares numpy's memory is not donated at once.
        rows=jax.tree.map(jnp.copy, init_rows(POOL)),
        token_pages=jnp.copy(init_token_pages(POOL)),
        target_pages=(),
        proposers=(),
    )
    assert state.token_pages.shape == (10, 4)
    buffers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    assert len(buffers) == len(jax.tree.leaves(state))
    donating = jax.jit(
        lambda state: jax.tree.map(lambda leaf: leaf, state), donate_argnums=0
    )
    kept = donating(state)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kept)} == buffers
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
