"""The C++ operations with invalid data and shapes.

No value may lead to access outside of arrays. Such an access may go unnoticed here, so
`test_native_builds.py` runs these tests again with sanitizers, in a separate process.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxspec_kernels import native, paged_attention, panel_rows
from jaxspec_kernels.panel_matmul import WIDTH, to_panels
from jaxspec_kernels.rejection_sampling import cpu
from jaxspec_kernels.rejection_sampling.passes import Distribution, Draft, VocabShard
from tests.kernels.conftest import THOROUGH
from tests.kernels.oracle import SMALL, build, random_forest
from tests.support.decoder_layers import PAGE_SIZE, Layer, make_batch

pytestmark = pytest.mark.usefixtures("has_native")

SIXTEEN = replace(SMALL, head_dim=16)
fuzzed = settings(
    # Every other shape compiles. With sanitizers, which find more, there are more.
    max_examples=40 if settings.get_current_profile_name() == THOROUGH else 8,
    # The fixture only checks that there is a library, so all examples may share it.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# Limits of legal values, and values far outside.
INTEGERS = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 110)
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 1e-38, -1.0])
SEEDS = st.integers(0, 2**32 - 1)


def integers(data: Any, shape: tuple[int, ...]) -> jax.Array:
    count = int(np.prod(shape))
    drawn = data.draw(st.lists(INTEGERS, min_size=count, max_size=count))
    return jnp.asarray(np.array(drawn).reshape(shape), jnp.int32)


@fuzzed
@given(
    data=st.data(), seed=SEEDS, is_tree=st.booleans(), window=st.sampled_from([0, 7])
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequence_out_of_range_does_not_change_others(
    dtype, data, seed, is_tree, window
):
    """Sequences 1 and 3 have arbitrary page ids, lengths and masks."""
    case = replace(SIXTEEN, window=window or None)
    kv_len = np.random.default_rng(seed).integers(5, 91, 4).tolist()
    mask = random_forest(4, 5, seed % 1000) if is_tree else None
    call = build(case, 0, dtype=dtype, kv_len=kv_len, mask=mask)
    query, pages, table, lengths = call.arrays
    run: Callable[..., Any] = jax.tree_util.Partial(
        paged_attention, scale=0.4, soft_cap=2.0, window=window or None
    )
    expected = run(*call.arrays, ancestor_mask=call.ancestor_mask, implementation="cpu")
    odd = np.array([1, 3])
    masks = call.ancestor_mask
    if masks is not None:
        any_mask = np.random.default_rng(seed).integers(0, 2, (2, 5, 5)).astype(bool)
        masks = masks.at[odd].set(any_mask)
    # Arbitrary page ids may point to slots that hold NaN for others, so 0 replaces NaN
    # here.
    found = run(
        query,
        jnp.nan_to_num(pages),
        table.at[odd].set(integers(data, (2, table.shape[1]))),
        lengths.at[odd].set(integers(data, (2,))),
        ancestor_mask=masks,
        implementation="cpu",
    )
    np.testing.assert_array_equal(found[::2], expected[::2])
    assert np.isfinite(np.asarray(found, np.float32)).all()


@settings(fuzzed, max_examples=40)
@given(data=st.data(), has_masks=st.booleans(), seed=SEEDS)
@pytest.mark.parametrize("pages", ["float32", "int8"])
def test_only_existing_slots_are_written(pages, data, has_masks, seed):
    layer, rng = Layer(pages=pages), np.random.default_rng(seed)
    masks = jnp.asarray(rng.integers(0, 2, (2, 3, 3)).astype(bool))
    batch = make_batch(masks if has_masks else None)
    regions = tuple(
        one._replace(
            page_table=integers(data, one.page_table.shape),
            kv_len=integers(data, one.kv_len.shape),
        )
        for one in batch.regions
    )
    slots = np.asarray(integers(data, batch.slots.shape))
    num_slots = (batch.table.size + 1) * PAGE_SIZE
    far = np.full_like(slots, num_slots)

    def attend(slots: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        one = replace(batch, regions=regions, slots=slots)
        made, held = layer.attend(one, implementation="cpu")
        parts = [np.asarray(part) for part in jax.tree.leaves(held)]
        return np.asarray(made), [
            part.reshape(num_slots, *part.shape[2:]) for part in parts
        ]

    (made, after), (_, before) = attend(slots), attend(far)
    assert np.isfinite(made).all()
    is_given = np.isin(np.arange(num_slots), slots)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[~is_given], old[~is_given])
    changed = np.any(after[0] != before[0], axis=(1, 2))
    np.testing.assert_array_equal(changed, is_given)


@fuzzed
@given(data=st.data())
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_row_numbers_are_clamped(dtype, data):
    outputs, features = WIDTH + 3, 5
    matrix = np.arange(outputs * features).reshape(outputs, features) % 97
    panels = jnp.asarray(to_panels(matrix.astype(jnp.dtype(dtype))))
    index = integers(data, (9,))
    found = panel_rows(index, panels, shape=matrix.shape, implementation="cpu")
    clipped = np.clip(np.asarray(index), 0, outputs - 1)
    np.testing.assert_array_equal(found, matrix[clipped])


def floats(data: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return an array of a few drawn numbers, including NaN and infinities."""
    drawn = data.draw(st.lists(FLOATS, min_size=1, max_size=8))
    rng = np.random.default_rng(data.draw(SEEDS))
    return jnp.asarray(rng.choice(np.array(drawn, np.float32), shape))


@fuzzed
@given(data=st.data(), is_certain=st.booleans())
@pytest.mark.parametrize("columns", [7, 600])
def test_tokens_are_in_the_vocabulary_for_any_logits(columns, data, is_certain):
    """All passes of a round, with any logits, probabilities, ids and row numbers."""
    seqs, inner, size = 3, 2, columns - 3
    rows = seqs * (inner + 2)
    shard = VocabShard(columns=columns, tile=columns, vocab_size=size, axis_name=None)
    logits = floats(data, (rows, columns))
    distribution = Distribution(*(floats(data, (rows,)) for _ in range(4)))
    probs = None if is_certain else floats(data, (seqs, inner + 1, columns))
    draft = Draft(integers(data, (seqs, inner + 1)), probs)
    is_any = np.random.default_rng(data.draw(SEEDS)).integers(0, 2, rows) > 0
    token = cpu.draw(
        shard,
        logits,
        distribution,
        draft,
        row=integers(data, (seqs,)),
        index=integers(data, (seqs,)),
        is_rejected=jnp.asarray(is_any[:seqs]),
        joint=floats(data, (seqs,)),
        uniform=floats(data, (seqs,)),
    )
    assert ((0 <= token) & (token < size)).all()
    numbers = integers(data, (rows,))
    found = cpu.statistics(
        shard, logits, floats(data, (rows,)), numbers, jnp.asarray(is_any)
    )
    assert ((0 <= found.best) & (found.best < size)).all()
    words = jax.lax.bitcast_convert_type(integers(data, (rows, 2)), jnp.uint32)
    _, best = cpu.gumbel_argmax(shard, logits, distribution, words)
    assert ((0 <= best) & (best < size)).all()
    for counts in (True, False):
        border, _ = cpu.search(
            shard,
            logits,
            distribution,
            floats(data, (rows,)),
            is_searched=jnp.asarray(is_any),
            counts=counts,
        )
        assert not np.isnan(border).any()
        limits = floats(data, (rows, 3))
        masses = cpu.mass_above(shard, logits, distribution, limits, counts=counts)
        assert not np.isnan(masses).any()
    probs_found = np.asarray(cpu.probabilities(shard, logits, distribution))
    assert not probs_found[:, size:].any() and not np.isnan(probs_found).any()
    if probs is not None:
        above = cpu.residual_mass(
            shard, logits, distribution, draft, floats(data, (seqs, inner))
        )
        assert (np.asarray(above) >= 0).all()


@pytest.mark.parametrize("temperature", [-0.0, -1.0])
def test_padding_has_no_weight_at_any_temperature(temperature):
    """Padding columns are -inf, and a temperature of -0 would turn them into +inf."""
    shard = VocabShard(columns=7, tile=7, vocab_size=4, axis_name=None)
    ones = jnp.ones(2)
    distribution = Distribution(temperature * ones, 0 * ones, -jnp.inf * ones, 0 * ones)
    logits, words = jnp.zeros((2, 7)), jnp.ones((2, 2), jnp.uint32)
    score, best = cpu.gumbel_argmax(shard, logits, distribution, words)
    assert (best < 4).all() and jnp.isfinite(score).all()
    logits = logits.at[:, 1].set(-jnp.inf)
    assert not np.asarray(cpu.probabilities(shard, logits, distribution))[:, 1].any()


@pytest.fixture(autouse=True, scope="module")
def mask_function():
    """Install a function that returns masks of zeros, as the operation needs one."""

    def answer(words: int, ids: Any, *others: Any) -> np.ndarray:
        return np.zeros((len(ids), len(others[-1]), words), np.uint32)

    before = list(native.masks._answers)
    native.masks.answer_with(answer)
    yield
    native.masks._answers[:] = before


# Operands, results and attributes that match: `dtype axis axis ...`.
DISTRIBUTION = ("f4 2", "f4 2", "f4 2")
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "attend": (
        ("f4 2 3 4 6", "f4 5 4 4 6", "f4 0", "i4 2 3", "i4 2", "? 2 3 3"),
        ("f4 2 3 4 6",),
        {"scale": np.float32(1), "soft_cap": np.float32(0), "window": np.int64(0)},
    ),
    "multiply": (
        ("f4 3 5", "f4 2 5 32", "f4 0"),
        ("f4 3 40",),
        {"is_rounded": False},
    ),
    "look_up": (("i4 3", "f4 2 5 32", "f4 0"), ("f4 3 5",), {"num_outputs": 40}),
    "statistics": (
        ("f4 2 9", "f4 2", "i4 2", "? 2", "i4 1"),
        ("f4 2", "i4 2", "f4 2", "f4 2"),
        {"vocab_size": 8},
    ),
    "mass_above": (
        ("f4 2 9", *DISTRIBUTION, "f4 2 3", "i4 1"),
        ("f4 2 3",),
        {"vocab_size": 8, "counts": True},
    ),
    "gumbel_argmax": (
        ("f4 2 9", *DISTRIBUTION, "u4 2 2", "i4 1"),
        ("f4 2", "i4 2"),
        {"vocab_size": 8},
    ),
    "search": (
        ("f4 2 9", *DISTRIBUTION, "f4 2", "f4 2", "? 2"),
        ("f4 2", "f4 2"),
        {"vocab_size": 8, "counts": False},
    ),
    "draw": (
        ("f4 2 9", *DISTRIBUTION, "f4 2", "i4 1", "f4 1 1 9", "i4 1", "i4 1", "? 1")
        + ("f4 1", "f4 1"),
        ("i4 1",),
        {"vocab_size": 8},
    ),
    "probabilities": (
        ("f4 2 9", *DISTRIBUTION, "f4 2", "i4 1"),
        ("f4 2 9",),
        {"vocab_size": 8},
    ),
    "token_masks": (
        ("i4 2", "i4 2", "i4 2 5", "i4 2 3", "i4 4"),
        ("u4 2 4 3",),
        {},
    ),
    "residual_mass": (
        ("f4 3 9", "f4 3", "f4 3", "f4 3", "f4 3", "f4 1 2 9", "f4 1 1", "i4 1"),
        ("f4 1 1",),
        {"vocab_size": 8},
    ),
    "feed_forward_block": (
        ("f4 3 5", "f4 5", "f4 0", "f4 1 5 32", "f4 0", "f4 1 8 32", "f4 0", "? 0"),
        ("f4 3 5",),
        {"hidden": 8, "block": 4, "is_gelu": True, "is_rounded": False}
        | {"epsilon": np.float32(1e-6), "offset": np.float32(1)},
    ),
    "attention_block": (
        ("f4 3 5", "f4 5", "f4 0", "f4 4", "f4 4")
        + ("f4 1 5 32", "f4 0", "f4 1 5 32", "f4 0")
        + ("f4 1 16 32", "f4 0", "f4 3 2", "f4 3 2", "i4 3", "? 3")
        + ("f4 5 4 4 4", "f4 0")
        + ("i4 1 3", "i4 1", "? 1 3 3"),
        ("f4 3 5", "f4 5 4 4 4", "f4 0"),
        {"num_queries": np.array([3]), "num_q_heads": 4, "window": 0}
        | {"scale": np.float32(1), "soft_cap": np.float32(0), "is_rounded": False}
        | {"epsilon": np.float32(1e-6), "offset": np.float32(1)},
    ),
}
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 31, 33, 64])


def run_form(
    name: str,
    arguments: list[tuple[str, ...]],
    results: list[tuple[str, ...]],
    attributes: dict[str, Any],
) -> None:
    """Call an operation directly, without the Python function that checks shapes."""
    numbers = {
        key: np.int64(value) if type(value) is int else value
        for key, value in attributes.items()
    }
    made = [
        jax.ShapeDtypeStruct(tuple(map(int, form[1:])), np.dtype(form[0]))
        for form in results
    ]
    given = [np.zeros(tuple(map(int, form[1:])), form[0]) for form in arguments]
    jax.block_until_ready(jax.ffi.ffi_call(f"jaxspec_{name}", made)(*given, **numbers))


@pytest.mark.parametrize("name", FORMS)
@fuzzed
@given(data=st.data())
def test_mismatched_operands_are_an_error_and_no_crash(name, data):
    """Change up to two sizes, axes or types of arrays, and perhaps an attribute.

    The arrays are operands and results.
    """
    arguments, results, attributes = FORMS[name]
    forms = [form.split() for form in (*arguments, *results)]
    for _ in range(data.draw(st.integers(0, 2))):
        form = forms[data.draw(st.integers(0, len(forms) - 1))]
        change = data.draw(st.sampled_from(["size", "axis", "type"]))
        if change == "size":
            form[data.draw(st.integers(1, len(form) - 1))] = str(data.draw(SIZES))
        elif change == "axis":
            form.append("1")
        else:
            form[0] = data.draw(st.sampled_from(["f4", "i4", "i1", "u1", "?", "f8"]))
    numbers = dict(attributes)
    counts = [key for key, value in attributes.items() if type(value) is int]
    if counts and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(counts))
        numbers[key] = data.draw(st.integers(-3, 70))
    if "num_queries" in numbers and data.draw(st.booleans()):
        numbers["num_queries"] = np.array(
            data.draw(st.lists(st.integers(-4, 4), max_size=2)), np.int64
        )
    parts = [tuple(form) for form in forms]
    try:
        run_form(name, parts[: len(arguments)], parts[len(arguments) :], numbers)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert "INVALID_ARGUMENT" in str(error), error


def test_matching_operands_are_no_error():
    """Without a change there is no error: errors above come from the changes."""
    for name, (arguments, results, attributes) in FORMS.items():
        given, made = (
            [tuple(form.split()) for form in forms] for forms in (arguments, results)
        )
        run_form(name, given, made, attributes)
    assert {f"jaxspec_{name}" for name in FORMS} == set(native.TARGETS)
