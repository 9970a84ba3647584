"""The attention and feed-forward blocks in C++ are exact, and rows are independent."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_checkpoints.quantization import Scheme
from jaxspec_kernels.bits import ScaledPages, from_storage
from jaxspec_kernels.decoder_blocks import (
    GELU,
    SILU,
    attention_block,
    feed_forward_block,
)
from tests.kernels.oracle import UNOPTIMISED
from tests.support.decoder_layers import MODEL, PAGE_SIZE, Batch, Layer, make_batch

pytestmark = pytest.mark.usefixtures("has_native")
# Allowed difference between numbers in pages, by type: their float32 values differ in
# the last bit.
PAGE_STEPS = {"float32": 1e-6, "bfloat16": 1e-2, "uint16": 1e-2, "uint8": 0.13}

LAYERS = [
    Layer(),
    Layer(window=None, has_after=False),
    Layer(heads=(4, 4), head_dim=16, dtype="bfloat16", pages="uint16"),
    Layer(heads=(6, 2), head_dim=34, pages="bfloat16"),
    Layer(scheme=Scheme(kind="int8")),
    Layer(pages="uint8"),
    Layer(heads=(4, 4), head_dim=16, dtype="bfloat16", pages="uint8", window=None),
    Layer(pages="int8"),
    Layer(heads=(6, 2), head_dim=34, pages="int8", window=None),
    Layer(heads=(4, 4), head_dim=16, dtype="bfloat16", pages="int8"),
    Layer(has_head_norms=True),
    Layer(heads=(4, 1), head_dim=34, pages="int8", has_head_norms=True),
    Layer(scheme=Scheme(kind="int8"), pages="uint8", has_head_norms=True),
    Layer(
        heads=(4, 4), head_dim=16, dtype="bfloat16", pages="uint16", has_head_norms=True
    ),
]


# Gemma 3: no soft cap, and 640 is not a power of two. Matrices keep the size of rows.
GEMMA_3_270M = Layer(
    heads=(4, 1),
    head_dim=256,
    model=640,
    window=512,
    scale=256**-0.5,
    soft_cap=None,
    gain=640**-0.5,
    has_head_norms=True,
)
GEMMA_3_LAYERS = [
    GEMMA_3_270M,
    replace(GEMMA_3_270M, window=None, pages="int8"),
    replace(GEMMA_3_270M, scheme=Scheme(kind="int4", group_size=32)),
    replace(GEMMA_3_270M, scheme=Scheme(kind="int4", group_size=16)),
    replace(GEMMA_3_270M, scheme=Scheme(kind="int4", group_size=32, has_minima=True)),
    replace(GEMMA_3_270M, scheme=Scheme(kind="int8", group_size=16)),
    replace(GEMMA_3_270M, scheme=Scheme(kind="fp8", group_size=32)),
    replace(GEMMA_3_270M, dtype="bfloat16", pages="uint16"),
    # The published 27B scales queries by its width over its heads, 168, and not by the
    # head size.
    replace(GEMMA_3_270M, heads=(4, 2), head_dim=128, scale=168**-0.5),
]


def check_attention(layer: Layer, batch: Batch, least: float = 0.0, **changes) -> Any:
    """Check attention against the reference; return the rows."""
    found, pages = layer.attend(batch, "cpu", **changes)
    expected, expected_pages = layer.attend(batch, "reference", **changes)
    # Values that differ in the last bit of float32 may round differently to bfloat16.
    most = 2e-2 if layer.dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(found, expected, atol=most)
    np.testing.assert_allclose(
        from_storage(pages),
        from_storage(expected_pages),
        atol=max(PAGE_STEPS.get(layer.pages, 0.02), least),
    )
    return found


# Masks do not depend on most settings of a layer, so `make test` has few trees.
@pytest.mark.parametrize(
    ("layer", "is_tree"),
    [
        *((layer, False) for layer in LAYERS),
        *(
            pytest.param(layer, True, marks=[pytest.mark.slow] * (number % 3 > 0))
            for number, layer in enumerate(LAYERS)
        ),
    ],
)
def test_attention_equals_the_reference(layer, is_tree):
    masks = None
    if is_tree:  # both drafts are children of the newest token
        mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
        masks = jnp.asarray(np.stack([mask, mask]))
    check_attention(layer, make_batch(masks))


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norm_of_queries_or_keys_alone_equals_the_reference(name):
    layer = Layer()
    norm: Any = {name: layer.norm(6, layer.head_dim)}
    check_attention(layer, make_batch(), **norm)


@pytest.mark.parametrize(
    ("layer", "activation", "hidden", "block"),
    [
        *(
            (Layer(dtype=dtype), activation, *sizes)
            for dtype in ("float32", "bfloat16")
            for activation in (GELU, SILU)
            for sizes in ((40, 8), (36, 4), (96, 32))
        ),
        *((layer, GELU, 2048, 128) for layer in GEMMA_3_LAYERS[:8]),
    ],
    ids=str,
)
def test_feed_forward_equals_the_reference(layer, activation, hidden, block):
    stream = make_batch(None, layer.model).stream
    network = layer.network(hidden, block, activation)

    def run(implementation: str, rows: jax.Array) -> np.ndarray:
        def call(rows: jax.Array, **matrices: Any) -> jax.Array:
            given = network._replace(**matrices)
            return feed_forward_block(rows, given, implementation=implementation)

        if implementation == "reference":
            # Compiling its operations one by one would take 1 s.
            call = jax.jit(call, compiler_options=UNOPTIMISED)
        names = "gate_up_proj", "down_proj"
        return np.asarray(
            call(rows, **{name: getattr(network, name) for name in names})
        )

    found, expected = run("cpu", stream), run("reference", stream)
    most = 2e-2 if layer.dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(found, expected, atol=most)
    many = jnp.tile(stream, (40, 1))  # more rows than C++ computes at a time
    np.testing.assert_array_equal(run("cpu", many), np.tile(found, (40, 1)))
    for count in (1, 2, 5):
        np.testing.assert_array_equal(run("cpu", stream[:count]), found[:count])


@pytest.mark.parametrize("layer", GEMMA_3_LAYERS)
def test_attention_of_gemma_3_equals_the_reference(layer):
    # Contexts longer and shorter than the window, and more rows than one thread
    # computes.
    batch = make_batch(None, layer.model, ends=(521, 30, 40), counts=(5, 5, 40))
    found = check_attention(layer, batch, 1e-5)  # sums of 640 products
    alone = replace(
        batch,
        positions=batch.positions[:10],
        slots=batch.slots[:10],
        stream=batch.stream[:10],
        regions=batch.regions[:1],
    )
    few, _ = layer.attend(alone, implementation="cpu")
    np.testing.assert_array_equal(few, found[:10])
    if layer == GEMMA_3_270M:  # an error of one in the window would be seen
        for window in (511, 513):
            other, _ = layer.attend(batch, implementation="reference", window=window)
            assert np.abs(found - other).max() > 1e-3


@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("pages", ["float32", "uint8", "int8"])
def test_row_does_not_depend_on_other_rows(pages, has_head_norms):
    layer, batch = Layer(pages=pages, has_head_norms=has_head_norms), make_batch()
    whole, whole_pages = layer.attend(batch, implementation="cpu")
    part = replace(
        batch,
        positions=batch.positions[6:11],
        slots=batch.slots[6:11],
        stream=batch.stream[6:11],
        regions=batch.regions[1:],
    )
    alone, pages = layer.attend(part, implementation="cpu")
    np.testing.assert_array_equal(alone, whole[6:11])
    page = part.slots // PAGE_SIZE
    for one, other in zip(*map(jax.tree.leaves, (pages, whole_pages)), strict=True):
        np.testing.assert_array_equal(one[page], other[page])


@pytest.mark.parametrize(
    "layer",
    [Layer(), Layer(dtype="bfloat16", pages="uint16"), Layer(pages="int8", model=96)],
    ids=str,
)
def test_unused_rows_keep_their_stream_and_change_nothing_else(layer):
    batch = make_batch(None, layer.model)
    whole, _ = layer.attend(batch, "cpu")
    network = layer.network(96, 32)
    outputs = feed_forward_block(batch.stream, network, implementation="cpu")
    # Unused: the newest row of a sequence, the first of a prompt, and the padding.
    unused = np.array([2, 6, 11, 12])
    is_used = np.ones(len(batch.slots), bool)
    is_used[unused] = False
    # Values of unused rows are not read; only the NaN itself remains.
    stream = batch.stream.at[unused].set(jnp.nan)
    masked = replace(batch, stream=stream)
    slots = np.where(is_used, batch.slots, batch.slots[-1])
    expected_pages = replace(batch, slots=slots)
    # Rows after an unused one of their sequence would read its keys: none here does.
    for mask in (is_used, np.zeros_like(is_used)):
        found, pages = layer.attend(masked, "cpu", is_used=jnp.asarray(mask))
        rows = np.flatnonzero(mask[:6])  # the prompt's rows see the unused first one
        np.testing.assert_array_equal(found[rows], whole[rows])
        kept = np.flatnonzero(~mask)
        np.testing.assert_array_equal(found[kept], stream[kept])
        blocks = feed_forward_block(
            stream, network._replace(is_used=jnp.asarray(mask)), implementation="cpu"
        )
        np.testing.assert_array_equal(blocks[mask], outputs[mask])
        np.testing.assert_array_equal(blocks[~mask], stream[~mask])
        if mask.any():
            _, written = layer.attend(expected_pages, "cpu")
        else:
            written = layer.held(batch)
        for one, other in zip(*map(jax.tree.leaves, (pages, written)), strict=True):
            np.testing.assert_array_equal(one, other)
    check_attention(layer, batch, is_used=jnp.asarray(is_used))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_donated_pages_are_written_in_place(is_scaled):
    layer, batch = Layer(), make_batch()
    shape = (25, PAGE_SIZE, 4, 10)
    pages: Any = jnp.zeros(shape)
    if is_scaled:
        pages = ScaledPages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3]))

    def addresses(pages: Any) -> list[int]:
        return [one.unsafe_buffer_pointer() for one in jax.tree.leaves(pages)]

    before, settings = addresses(pages), layer.settings(batch)

    def run(pages: Any) -> Any:
        return attention_block(batch.stream, pages, settings, implementation="cpu")

    run = jax.jit(run, donate_argnums=0)
    # Each copy of a layer, even of an empty array, is one more operation that XLA may
    # run in another thread than its neighbours.
    compiled = run.lower(pages).compile().as_text()
    assert compiled
    assert " copy(" not in compiled
    _, made = run(pages)
    assert addresses(made) == before


def test_rejects_mismatched_arguments():
    layer, batch = Layer(), make_batch()
    norm, error = layer.norm(6), r"weights of shape \(24,\), but .* of the 10 elem"
    heads = r"query heads \(3\) must be a multiple of that of KV heads \(2\)"
    wrong: list[tuple[dict[str, Any], str]] = [
        (dict(num_q_heads=3), heads),
        (dict(q_norm=norm), error),
        (dict(k_norm=norm), error),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            layer.attend(batch, **changes)
    with pytest.raises(Exception, match="matrices do not fit"):
        layer.attend(batch, q_proj=layer.matrix(3, 40, 26), implementation="cpu")
    with pytest.raises(ValueError, match="got 'relu'"):
        feed_forward_block(batch.stream, layer.network(8, 8, "relu"))


def test_concurrent_calls_do_not_interfere():
    """Each thread has its own buffers, which remain after a call."""
    hidden, rows = 96, 64
    layer = Layer()
    network = layer.network(hidden, 16)

    @jax.jit
    def half(stream: jax.Array) -> jax.Array:
        def run(_: Any, rows: jax.Array) -> jax.Array:
            made = feed_forward_block(rows, network, implementation="cpu")
            return jnp.tanh(made)

        # Make many calls in a row, so that both threads run C++ code at the same time.
        return jax.lax.fori_loop(0, 200, run, stream)

    random = np.random.default_rng(0)
    streams = [
        jnp.asarray(random.normal(size=(rows, MODEL)), jnp.float32) for _ in range(2)
    ]
    alone = [np.asarray(half(stream)) for stream in streams]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            together = pool.map(lambda one: np.asarray(half(one)), streams)
            np.testing.assert_array_equal(list(together), alone)
