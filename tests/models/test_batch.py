"""Sequences in several regions of a batch give the same results as alone."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.batch import Region, TokenBatch
from jaxspec.models.network import build_network
from tests.support.oracles import (
    hf_logits,
    init_kv_pages,
    load_ours,
    make_hf_model,
    model_config,
)


def test_two_regions_in_one_pass_equal_huggingface():
    """Two sequences of 4 rows, then one of 6, over interleaved pages."""
    reference = make_hf_model(num_hidden_layers=2, sliding_window=3)
    config = model_config(reference)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 96, size) for size in (4, 4, 6)]
    tables = np.array([[5, 0], [2, 7], [1, 6]], np.int32)
    places = [np.arange(len(tokens)) for tokens in sequences]
    slots = [
        table[place // 4] * 4 + place % 4
        for table, place in zip(tables, places, strict=True)
    ]

    def region(rows: slice, num_queries: int) -> Region:
        table = jnp.asarray(tables[rows])
        lengths = jnp.full(len(table), num_queries, jnp.int32)
        return Region(page_table=table, kv_len=lengths, num_queries=num_queries)

    def joined(parts: list[np.ndarray]) -> jax.Array:
        return jnp.asarray(np.concatenate(parts), jnp.int32)

    batch = TokenBatch(
        tokens=joined(sequences),
        positions=joined(places),
        slot_mapping=joined(slots),
        regions=(region(slice(2), 4), region(slice(2, 3), 6)),
    )

    @jax.jit
    def forward(params, batch, kv_pages):
        model = build_network(config, params)
        output, _ = model.forward(batch, kv_pages)
        return model.logits(output.hidden_states)

    pages = init_kv_pages(config, 8, 4, jnp.dtype(jnp.float32))
    logits = np.asarray(forward(load_ours(reference), batch, pages))
    expected = np.concatenate([hf_logits(reference, tokens) for tokens in sequences])
    assert np.abs(logits - expected).max() <= 1e-4
