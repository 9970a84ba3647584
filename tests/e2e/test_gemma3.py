"""A Gemma 3 pair is sharded over eight devices.

The target has one KV head, and norms of query and key heads. `tests/conformance` checks
the pair's texts, and `test_lossless.py` runs all proposers on it.
"""

import jax

from tests.conformance import proposers


def test_kv_heads_are_copied_and_norms_replicated():
    runner = proposers.split_engine("draft model, Gemma 3", 8, 2).runner
    (pages, *_) = runner.state.target_pages
    assert isinstance(pages, jax.Array)
    assert pages.shape[2] == 8 * 2 and pages.addressable_shards[0].data.shape[2] == 2
    norms = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(runner.params)
        if any(name in jax.tree_util.keystr(path) for name in ("q_norm", "k_norm"))
    ]
    assert len(norms) == 2 * 2 * 8
    assert all(norm.sharding.is_fully_replicated for norm in norms)
