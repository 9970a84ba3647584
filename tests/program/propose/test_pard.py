"""One pass proposes all drafts, each from its own distribution."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program import history
from jaxspec.program.propose import Pard
from jaxspec.program.tree.tree import Tree
from tests.kernels.oracle import UNOPTIMISED
from tests.support.distributions import filtered_distribution
from tests.support.engines import make_micro
from tests.support.oracles import PagedModel, hf_logits, load_ours, model_config
from tests.support.rows import make_active, make_context

MASK, DRAFTS = 15, 3


def propose(length: int, num_known: int, **fields: Any) -> tuple[Any, ...]:
    """Draft after the model has read `num_known` tokens; also return the old pages.

    Args:
        fields: Fields of the only sequence, or `wanted_levels` of the context.
    """
    reference = make_micro()
    tokens = np.random.default_rng(length).integers(3, 15, length)
    paged = PagedModel(
        model_config(reference, mask_token_id=MASK),
        load_ours(reference),
        compiler_options=UNOPTIMISED,
    )
    if num_known:
        paged.run(tokens[:num_known])
    # Leave the keys and values of masks of an earlier round.
    paged.run(np.full(2, MASK))
    pool = paged.pool
    table = jnp.asarray(paged.page_table)
    place = jnp.arange(length, dtype=jnp.int32)[None]
    token_pages = history.write(
        jnp.full((pool.num_pages, pool.page_size), 7, jnp.int32),
        table,
        place,
        jnp.asarray(tokens[None], jnp.int32),
        jnp.ones_like(place, bool),
    )
    wanted_levels = fields.pop("wanted_levels", DRAFTS)
    active = dataclasses.replace(
        make_active(1, num_tokens=length, **fields), page_table=table
    )

    def run(params: Any, pages: Any, token_pages: Any, active: Any) -> Any:
        context = make_context(
            active,
            Tree.chain(DRAFTS),
            pool,
            token_pages=token_pages,
            wanted_levels=jnp.array([wanted_levels], jnp.int32),
        )
        return Pard(config=paged.config).propose(params, pages, context, None)

    before = jax.tree.map(np.asarray, paged.kv_pages)
    run = jax.jit(run, compiler_options=UNOPTIMISED)
    found, pages = run(paged.params, paged.kv_pages, token_pages, active)
    masked = np.append(tokens, [MASK] * (DRAFTS - 1))
    return found, hf_logits(reference, masked)[length - 1 :], before, pages


@pytest.mark.parametrize(
    ("length", "num_known"),
    # A round that follows one with all drafts accepted, across a page border; and a
    # text of two tokens.
    [(13, 9), pytest.param(2, 0, marks=pytest.mark.slow)],
)
def test_each_draft_follows_its_own_distribution(length, num_known):
    found, logits, *_ = propose(length, num_known, temperature=0.8, top_p=0.95)
    distributions = filtered_distribution(logits, 0.8, top_p=np.float32(0.95))
    np.testing.assert_allclose(found.probs[0], distributions, atol=1e-4)
    drafts = np.asarray(found.tokens[0])
    assert (distributions[np.arange(DRAFTS), drafts] > 0).all()
    assert found.num_valid_drafts.tolist() == [DRAFTS]
    assert not found.is_broken.any()


def test_sequence_without_drafts_is_not_run():
    """A sequence without drafts writes nothing, as the model lacks its earlier tokens.

    Keys of the newest token would be wrong for other requests with the same prefix.
    """
    found, _, before, after = propose(13, 3, wanted_levels=0, temperature=0.0)
    assert found.num_valid_drafts.tolist() == [0]
    assert not found.is_broken.any()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
