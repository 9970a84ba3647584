"""What lives on the device between launches, and the only way to make it."""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from jaxspec.config import ModelConfig
from jaxspec.program.plan import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_STOP_IDS,
    NO_TOKEN,
    PoolShape,
)
from jaxspec.program.token_controls import num_words
from jaxspec.sharding import kv_copies, named_sharding, num_parts
from jaxspec_kernels import storage_dtype


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ControlRows:
    """What each request asked of single tokens: see `plan.TokenControls`.

    Only the entries of rows that are controlled mean anything.
    """

    is_controlled: Bool[Array, " row"]
    penalties: Float[Array, "row 3"]  # presence, frequency, repetition
    bias_ids: Int[Array, "row bias"]
    bias_values: Float[Array, "row bias"]
    allowed: UInt32[Array, "row word"]  # a bit per token of the vocabulary
    bad_words: Int[Array, "row bad_word token"]  # right-aligned


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """One entry per admitted request."""

    num_tokens: Int[Array, " row"]  # 0 until the prompt's last tile is in
    num_prompt: Int[Array, " row"]
    is_done: Bool[Array, " row"]
    page_table: Int[Array, "row table"]  # pads hold the number of pages
    min_total: Int[Array, " row"]
    max_total: Int[Array, " row"]
    temperature: Float[Array, " row"]
    top_k: Int[Array, " row"]
    top_p: Float[Array, " row"]
    min_p: Float[Array, " row"]
    seed: UInt32[Array, "row 2"]
    rule: Int[Array, " row"]
    stop_ids: Int[Array, "row stop"]
    controls: ControlRows


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Pages of both models and the rows; donated to every launch."""

    rows: Rows
    token_pages: Int[Array, "page page_size"]  # known tokens, prompt and output
    target_pages: tuple[Num[Array, "page page_size two_kv_head head_dim"], ...]
    draft_pages: tuple[Num[Array, "page page_size two_kv_head head_dim"], ...]
    # Chance of each draft to stay if those before it do; None: the rules decide.
    forced_acceptance: Float[Array, " chance"] | None = None


def page_forms(
    config: ModelConfig,
    dtype: jnp.dtype,
    pool: PoolShape,
    mesh: Mesh,
    mesh_axes: tuple[str, ...],
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and placement of a model's pages, one array per layer.

    Args:
        dtype: The type of the model's weights.
    """
    parts = num_parts(mesh, mesh_axes)
    heads = config.num_kv_heads
    heads *= kv_copies(config.num_q_heads, heads, parts)
    shape = (pool.num_pages, pool.page_size, 2 * heads, config.head_dim)
    names = ("page", None, "kv_head", None)
    placement = named_sharding(mesh, names, shape, unit=2, mesh_axes=mesh_axes)
    platform = mesh.devices.flat[0].platform
    stored = storage_dtype(dtype, platform)
    form = jax.ShapeDtypeStruct(shape, stored, sharding=placement)
    return (form,) * config.num_layers


def init_pages(forms: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[Array, ...]:
    """Zeroed pages, each made where it stays."""
    return tuple(_zeros(form) for form in forms)


def _zeros(form: jax.ShapeDtypeStruct) -> Array:
    assert form.sharding is not None
    if all(device.platform == "cpu" for device in form.sharding.device_set):
        # Nothing travels, and nothing is compiled for it.
        return jax.device_put(np.zeros(form.shape, form.dtype), form.sharding)
    return jnp.zeros(form.shape, form.dtype, device=form.sharding)


def init_token_pages(pool: PoolShape) -> Int[np.ndarray, "page page_size"]:
    """Pages of tokens, none of which is known yet."""
    return np.zeros((pool.num_pages, pool.page_size), np.int32)


def init_control_rows(pool: PoolShape) -> ControlRows:
    """Rows without controls, on the host."""
    rows = pool.num_rows
    bad_words = rows, MAX_BAD_WORDS, MAX_BAD_WORD_LEN
    form: Any = ControlRows  # of arrays that no device has yet
    return form(
        is_controlled=np.zeros((rows,), bool),
        penalties=np.zeros((rows, 3), np.float32),
        bias_ids=np.full((rows, MAX_BIAS), NO_TOKEN, np.int32),
        bias_values=np.zeros((rows, MAX_BIAS), np.float32),
        allowed=np.zeros((rows, num_words(pool.vocab_size)), np.uint32),
        bad_words=np.full(bad_words, NO_TOKEN, np.int32),
    )


def init_rows(pool: PoolShape) -> Rows:
    """Rows without requests, on the host, where nothing is compiled for them.

    Every leaf is an array of its own: donation wants it.
    """
    rows = pool.num_rows

    def integers(*shape: int, fill: int = 0) -> np.ndarray:
        return np.full((rows, *shape), fill, np.int32)

    def floats(fill: float) -> np.ndarray:
        return np.full((rows,), fill, np.float32)

    form: Any = Rows  # of arrays that no device has yet
    return form(
        num_tokens=integers(),
        num_prompt=integers(),
        is_done=np.ones((rows,), bool),
        page_table=integers(pool.table_len, fill=pool.num_pages),
        min_total=integers(),
        max_total=integers(),
        temperature=floats(0.0),
        top_k=integers(),
        top_p=floats(1.0),
        min_p=floats(0.0),
        seed=np.zeros((rows, 2), np.uint32),
        rule=integers(),
        stop_ids=integers(MAX_STOP_IDS, fill=NO_TOKEN),
        controls=init_control_rows(pool),
    )
