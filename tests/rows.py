"""Sequences of one launch, made by hand."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.program.active import Active
from jaxspec.program.plan import MAX_STOP_IDS, NO_TOKEN, TokenControls
from jaxspec.program.state import ControlRows
from jaxspec.program.token_controls import pack_controls

INTEGERS = (
    "row",
    "num_tokens",
    "num_prompt",
    "min_total",
    "max_total",
    "top_k",
    "rule",
)
FLOATS = ("temperature", "top_p", "min_p")


def make_active(count: int, **fields: Any) -> Active:
    """`count` sequences; a field is one value for all or one per sequence.

    Args:
        fields: Fields of `Active`. `stop_ids` may be short lists; defaults are greedy
            sequences of ten tokens that nothing stops.
    """
    given = dict(
        row=np.arange(count),
        num_tokens=10,
        num_prompt=5,
        min_total=0,
        max_total=1000,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        rule=0,
        is_active=True,
    )
    stop_ids = np.full((count, MAX_STOP_IDS), NO_TOKEN)
    for index, ids in enumerate(fields.pop("stop_ids", [[]] * count)):
        stop_ids[index, : len(ids)] = ids
    seeds = np.random.default_rng(7).integers(0, 2**32, (count, 2), dtype=np.uint32)
    seeds = fields.pop("seed", seeds)
    assert not fields.keys() - given.keys(), fields.keys() - given.keys()
    given |= fields

    def column(name: str, dtype: Any) -> Any:
        return jnp.asarray(np.broadcast_to(given[name], (count,)), dtype)

    return Active(
        **{name: column(name, jnp.int32) for name in INTEGERS},
        **{name: column(name, jnp.float32) for name in FLOATS},
        is_active=column("is_active", bool),
        last_tokens=jnp.zeros((count, 2), jnp.int32),
        page_table=jnp.zeros((count, 1), jnp.int32),
        seed=jnp.asarray(seeds),
        stop_ids=jnp.asarray(stop_ids, jnp.int32),
    )


def make_control_rows(
    controls: list[TokenControls | None], vocab_size: int
) -> ControlRows:
    """One row per request; those without controls keep what somebody left there."""
    left = TokenControls(presence_penalty=9.0, bias=((3, 7.0),), allowed=(5,))
    packed = [pack_controls(one or left, vocab_size) for one in controls]

    def column(name: str, dtype: Any) -> Any:
        return jnp.asarray(np.stack([one[f"control_{name}"] for one in packed])).view(
            dtype
        )

    return ControlRows(
        is_controlled=jnp.asarray([one is not None for one in controls]),
        penalties=column("penalties", jnp.float32),
        bias_ids=column("bias_ids", jnp.int32),
        bias_values=column("bias_values", jnp.float32),
        allowed=column("allowed", jnp.uint32),
        bad_words=column("bad_words", jnp.int32),
    )
