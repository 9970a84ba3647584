"""Quantized matrices: each form equals its dequantized values, on any mesh."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.model import ModelConfig
from jaxspec.engine.memory.device_descriptions import named_devices
from jaxspec.errors import ConfigError
from jaxspec.models import cpu
from jaxspec.models.gemma.network import param_specs
from jaxspec.models.matrices import DenseMatrix, Matrix
from jaxspec.models.quantized import (
    GroupedMatrix,
    Quantized,
    ScaledMatrix,
    choose_form,
    scales_sharding,
)
from jaxspec.models.weights import abstract_params, declare, load_params, random_params
from jaxspec.sharding import TARGET_MESH_AXES, make_mesh
from jaxspec_checkpoints import CheckpointError, in_memory
from jaxspec_checkpoints.quantization import (
    FP8,
    GGUF_SCHEMES,
    INT4,
    INT8,
    MixedScheme,
    QuantizedTensor,
    Scheme,
    dequantize,
    named_scheme,
    quantize,
    quantized,
    shared_scheme,
)
from tests.support.oracles import PagedModel, forms_of
from tests.support.weights import check_same_forms, make_config, make_tensors

FLOAT32 = jnp.dtype(jnp.float32)
# The tests' model has too few features for groups of 128.
SCHEMES = [
    Scheme(kind=INT8),
    Scheme(kind=INT4, group_size=16, has_embedding=True),
    Scheme(kind=FP8),
]
WITH_MINIMA = Scheme(kind=INT4, group_size=16, has_minima=True)
FORMS = [
    (ScaledMatrix, SCHEMES[0]),
    (ScaledMatrix, SCHEMES[2]),
    (ScaledMatrix, Scheme(kind=INT4)),
    (GroupedMatrix, SCHEMES[1]),
    (GroupedMatrix, Scheme(kind=INT8, group_size=16)),
    (cpu.QuantizedMatrix, SCHEMES[0]),
    (cpu.QuantizedMatrix, SCHEMES[1]),
    (GroupedMatrix, WITH_MINIMA),
    (cpu.QuantizedMatrix, WITH_MINIMA),
]

GGUF_LAYER = {
    **{"self_attn.q_proj": "Q4_0", "self_attn.k_proj": "Q4_0"},
    **{"self_attn.v_proj": "Q6_K", "self_attn.o_proj": "Q8_0"},
    **{"mlp.gate_proj": "F16", "mlp.up_proj": "Q8_0", "mlp.down_proj": "Q6_K"},
}
GGUF_OTHER_LAYER = {
    **{"self_attn.q_proj": "Q4_1", "self_attn.k_proj": "Q4_K"},
    **{"self_attn.v_proj": "Q5_0", "self_attn.o_proj": "Q4_K"},
    **{"mlp.gate_proj": "Q4_K", "mlp.up_proj": "Q4_K", "mlp.down_proj": "Q5_K"},
}


def test_values_are_rounded_to_the_nearest():
    rows = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
    rows[3] = 0
    for scheme, steps in ((SCHEMES[0], 127), (SCHEMES[1], 7)):
        values, scales = quantize(rows, scheme)
        assert values.dtype == scheme.value_type
        groups = rows.reshape(5, scheme.num_groups(32), -1)
        step = np.abs(groups).max(axis=2) / steps
        error = dequantize(values, scales).reshape(groups.shape) - groups
        assert (np.abs(error) <= 0.5001 * step[:, :, None]).all()
        # The largest value is exact, except for the rounding of the scale.
        assert (
            np.abs(values.astype(int)).reshape(groups.shape).max(axis=2)[:3].min()
            == steps
        )
    values, scales = quantize(rows, SCHEMES[2])
    found = dequantize(values, scales)
    small = np.abs(rows) < scales * 2.0**-6
    assert (
        np.abs(found - rows) <= np.where(small, scales * 2.0**-9, abs(rows) / 15)
    ).all()


def product(values: Any, scales: Any) -> tuple[jax.Array, np.ndarray]:
    """Return inputs, and their products with the dequantized matrix in float64."""
    expected = dequantize(values, scales)
    inputs = np.random.default_rng(2).normal(size=(5, expected.shape[1]))
    inputs = inputs.astype(np.float32)
    return jnp.asarray(inputs), inputs.astype(float) @ expected.T.astype(float)


def random_matrix(scheme: Scheme, shape: Any = (64, 64)) -> tuple[Any, Any]:
    return quantize(np.random.default_rng(1).normal(size=shape), scheme)


@pytest.mark.parametrize(("form", "scheme"), FORMS)
def test_every_form_equals_its_dequantized_values(form, scheme):
    values, scales = random_matrix(scheme, (70, 48))
    if scheme.has_minima:  # few bits, as in files: products of values are exact
        scales = scales.astype(np.float16).astype(np.float32)
    placement = jax.NamedSharding(make_mesh(1), jax.P(None, None))
    held = [jax.device_put(one, placement) for one in (values, scales)]
    one = form.of(Quantized(values=held[0], scales=held[1], dtype=FLOAT32))
    expected = dequantize(values, scales)
    assert (one.shape, one.dtype) == ((70, 48), FLOAT32)
    # XLA:CPU has no packed 4-bit arrays; panels have whole panels' rows.
    item = 0.5 if scheme.kind == INT4 and form is cpu.QuantizedMatrix else 1
    rows = 96 if form is cpu.QuantizedMatrix else 70
    scale_bytes = 8 if scheme.has_minima else 4
    assert one.nbytes == rows * (48 * item + scale_bytes * scheme.num_groups(48))
    index = jnp.array([3, 69, 500])
    np.testing.assert_allclose(one.rows(index), expected[[3, 69, 69]], rtol=1e-7)
    inputs, products = product(values, scales)
    np.testing.assert_allclose(one.multiply(inputs), products, atol=1e-4)
    # Engines compile programs before they call them, from shapes and placement.
    program = jax.jit(form.multiply).lower(one, inputs).compile()
    np.testing.assert_allclose(program(one, inputs), products, atol=1e-4)
    if form is cpu.QuantizedMatrix:
        np.testing.assert_array_equal(one.values, expected)


def abstract_groups(
    devices: str, kind: Any, *, shape: tuple[int, int] = (64, 64), spec: Any = None
) -> GroupedMatrix:
    """Return a matrix in groups of 16 on devices known by name only."""
    found = named_devices(devices)
    mesh = make_mesh(len(found), devices=found)
    placement = jax.NamedSharding(mesh, spec or jax.P(TARGET_MESH_AXES, None))
    values = jax.ShapeDtypeStruct(shape, kind, sharding=placement)
    scales = values.update(shape=(shape[0], shape[1] // 16), dtype=FLOAT32)
    return GroupedMatrix.of(Quantized(values=values, scales=scales, dtype=FLOAT32))


def test_groups_are_multiplied_by_a_kernel_on_gpus():
    for kind in ("int4", "uint4", "int8"):
        one = abstract_groups("h100", kind)
        assert (one.implementation, one.placement) == ("gpu", None)
        two = abstract_groups("h100-2", kind)
        assert two.implementation == "gpu"
        # Programs that were compiled for described devices run on real ones.
        other = abstract_groups("b200-2", kind)
        assert jax.tree.structure(two) == jax.tree.structure(other)
        assert abstract_groups("v5e-1", kind).implementation == "reference"
    assert abstract_groups("h100", "float8_e4m3fn").implementation == "reference"
    # Two devices have 33 outputs each, which do not fill whole bytes.
    odd = abstract_groups("h100-2", "int4", shape=(66, 64))
    assert odd.implementation == "reference"


def test_four_bits_with_a_scale_per_output_are_one_group_on_gpus():
    scheme = Scheme(kind=INT4)
    assert choose_form(scheme, "cuda") is choose_form(scheme, "gpu") is GroupedMatrix
    assert choose_form(scheme, "tpu") is choose_form(scheme, "cpu") is ScaledMatrix
    assert choose_form(Scheme(kind=INT8), "gpu") is ScaledMatrix


def test_a_group_is_split_if_devices_split_the_features():
    """Else each GPU would have the whole matrix."""
    values, scales = random_matrix(Scheme(kind=INT4))
    placement = jax.NamedSharding(make_mesh(2), jax.P(None, TARGET_MESH_AXES))
    by_output = scales_sharding(placement, 1)
    held = [jax.device_put(values, placement), jax.device_put(scales, by_output)]
    known = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding)
        for one in held
    ]
    placed, described = (
        GroupedMatrix.of(Quantized(values=one[0], scales=one[1], dtype=FLOAT32))
        for one in (held, known)
    )
    assert placed.values.sharding.shard_shape(placed.values.shape) == (1, 32, 64)
    inputs, products = product(values, scales)
    program = jax.jit(GroupedMatrix.multiply).lower(described, inputs).compile()
    np.testing.assert_allclose(program(placed, inputs), products, atol=1e-4)


@pytest.mark.parametrize("scheme", [SCHEMES[1], WITH_MINIMA])
@pytest.mark.parametrize("spec", [(TARGET_MESH_AXES, None), (None, TARGET_MESH_AXES)])
def test_kernels_of_several_devices_multiply_their_parts(scheme, spec):
    """Devices have a part of the outputs; or of the groups, whose products are added.

    The reference runs in place of the kernel.
    """
    values, scales = random_matrix(scheme)
    placement = jax.NamedSharding(make_mesh(2), jax.P(*spec))
    held = [jax.device_put(one, placement) for one in (values, scales)]
    split = GroupedMatrix.of(Quantized(values=held[0], scales=held[1], dtype=FLOAT32))
    kind = jnp.uint4 if scheme.has_minima else jnp.int4
    on_gpus = abstract_groups("h100-2", kind, spec=jax.P(*spec))
    split = replace(split, placement=on_gpus.placement)
    inputs, products = product(values, scales)
    multiply = jax.jit(lambda one, rows: one.multiply(rows))
    text = multiply.lower(split, inputs).compile().as_text()
    assert text is not None
    assert ("all-reduce" in text) == (spec[0] is None)
    np.testing.assert_allclose(multiply(split, inputs), products, atol=1e-4)


def config_of(scheme: Scheme | MixedScheme | None, **changes: Any) -> Any:
    return replace(make_config(**changes), quantization=scheme)


def numbers_of(scheme: Scheme, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the dequantized tensors of a quantized model."""
    found = {}
    for name, array in make_tensors(config).items():
        own = scheme
        if name == "model.embed_tokens.weight":
            own = scheme.of_embedding
        if array.ndim == 2 and own is not None:
            array = dequantize(*quantize(array, own))
        found[name] = array
    return found


def logits_of(config: Any, tensors: Any, devices: int) -> np.ndarray:
    mesh = make_mesh(devices)
    params = load_params(config, in_memory(tensors), dtype=FLOAT32, mesh=mesh)
    return PagedModel(config, params).run(np.arange(3, 12))


@pytest.mark.parametrize(
    ("scheme", "devices", "is_scanned"),
    [
        *((scheme, 1, False) for scheme in SCHEMES),
        (SCHEMES[1], 4, True),
        *(pytest.param(one, 4, True, marks=pytest.mark.slow) for one in SCHEMES[::2]),
        *(pytest.param(one, 4, False, marks=pytest.mark.slow) for one in SCHEMES),
    ],
)
def test_quantized_model_equals_its_dequantized_model(scheme, devices, is_scanned):
    config = config_of(scheme)
    scanned = replace(config, scan_layers=is_scanned)
    found = logits_of(scanned, make_tensors(config), devices)
    plain = replace(config, quantization=None)
    expected = logits_of(plain, numbers_of(scheme, config), 1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - logits_of(plain, make_tensors(config), 1)).max() > 1e-3


# `make test` has each scheme once.
PLACEMENTS = [(1, False), (4, False), (4, True), (1, True)]


@pytest.mark.parametrize(
    ("devices", "is_scanned", "scheme"),
    [
        pytest.param(*placement, scheme, marks=[pytest.mark.slow] * (number != other))
        for number, placement in enumerate(PLACEMENTS)
        for other, scheme in enumerate(SCHEMES)
    ],
)
def test_placement_is_the_same_for_loaded_random_and_abstract(
    scheme, devices, is_scanned
):
    config = replace(config_of(scheme), scan_layers=is_scanned)
    tensors, mesh = make_tensors(config), make_mesh(devices)
    loaded, *_ = check_same_forms(config, tensors, mesh=mesh)
    layer = loaded["layers"]["1"]
    if devices > 1 and not is_scanned:
        out = layer["feed_forward"]["down_proj"]  # input features are split
        spec = out.values.sharding.spec
        if scheme.group_size is not None:
            assert spec[0] == out.scales.sharding.spec[0] == ("model", "replica")
        q_proj = layer["attention"]["q_proj"]  # outputs are split
        assert q_proj.scales.sharding.spec[-1] == ("model", "replica")
    embedding = loaded["embedding"]
    assert isinstance(embedding, Matrix)
    plain = (DenseMatrix, cpu.NativeMatrix, cpu.HalfMatrix)
    assert (type(embedding) in plain) != scheme.has_embedding


def test_random_model_is_the_same_on_any_mesh_and_plain_in_training():
    config = config_of(SCHEMES[0])
    q_proj, same = (
        random_params(config, seed=3, dtype=FLOAT32, mesh=make_mesh(count))["layers"][
            "0"
        ]["attention"]["q_proj"]
        for count in (1, 2)
    )
    numbers = dequantize(np.asarray(same.values), np.asarray(same.scales)[:, None])
    np.testing.assert_array_equal(q_proj.values, numbers)
    options: Any = dict(dtype=FLOAT32, mesh=make_mesh(1), is_trained=True)
    params = load_params(config, in_memory(make_tensors(config)), **options)
    trained = params["layers"]["0"]["attention"]["q_proj"]
    assert not isinstance(trained, ScaledMatrix | cpu.QuantizedMatrix)


def test_scales_are_read_with_values_or_alone():
    rows = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
    tensor = in_memory({"a": rows})["a"]
    reads = []

    def read(start: int, stop: int) -> np.ndarray:
        reads.append((start, stop))
        return tensor.read(start, stop)

    made = quantized(replace(tensor, read=read), SCHEMES[1])
    assert isinstance(made, QuantizedTensor)
    values, scales = quantize(rows, SCHEMES[1])
    np.testing.assert_array_equal(made.scales.read(2, 4), scales[2:4])
    assert reads == [(2, 4)]
    np.testing.assert_array_equal(made.values.whole(), values)
    np.testing.assert_array_equal(made.scales.whole(), scales)
    assert reads == [(2, 4), (0, 9)]
    np.testing.assert_array_equal(made.whole(), dequantize(values, scales))
    assert made.held_bytes == 9 * 32 // 2 + 9 * 2 * 4
    assert made.num_bytes == 9 * 32 * 4
    np.testing.assert_array_equal(made.head(2).whole(), made.whole()[:2])
    damaged = replace(tensor, sha256="0" * 64)
    with pytest.raises(CheckpointError, match="is damaged"):
        quantized(damaged, SCHEMES[0]).values.whole()


def test_groups_that_do_not_divide_are_rejected():
    with pytest.raises(ConfigError, match="matrices of 48"):
        config_of(named_scheme(INT4))
    assert param_specs(config_of(named_scheme(INT8)))
    with pytest.raises(CheckpointError, match="groups of 128 do not divide the 48"):
        tensor = in_memory({"a": np.zeros((2, 48), np.float32)})["a"]
        quantized(tensor, named_scheme(INT4))


MIXED = MixedScheme(
    types=(
        ("model.embed_tokens.weight", "Q6_K"),
        *(
            (f"model.layers.{layer}.{name}.weight", kind)
            for layer, kinds in enumerate((GGUF_LAYER, GGUF_OTHER_LAYER))
            for name, kind in kinds.items()
        ),
    )
)


@pytest.mark.parametrize(
    ("devices", "is_scanned"),
    [(1, False), pytest.param(4, False, marks=pytest.mark.slow), (4, True)],
)
def test_mixed_types_keep_every_tensors_values(devices, is_scanned):
    sizes: Any = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    config = replace(config_of(MIXED, **sizes), scan_layers=is_scanned)
    tensors: Any = in_memory(make_tensors(config))
    for name, kind in MIXED.types:
        if kind in GGUF_SCHEMES:
            tensors[name] = quantized(tensors[name], GGUF_SCHEMES[kind])
    options: Any = dict(dtype=FLOAT32, mesh=make_mesh(devices))
    params = load_params(config, tensors, **options)
    assert forms_of(params) == forms_of(abstract_params(config, **options))
    found = PagedModel(config, params).run(np.arange(3, 12))
    plain = replace(config, quantization=None, scan_layers=False)
    dense = {name: tensor.whole() for name, tensor in tensors.items()}
    np.testing.assert_allclose(found, logits_of(plain, dense, 1), atol=1e-4)


def test_each_matrix_has_its_tensors_scheme():
    assert MIXED.describe() == (
        "F16 unpacked, Q4_0 as int4 in groups of 32, "
        "Q4_1, Q4_K as int4 in groups of 32 with minima, "
        "Q5_0, Q8_0 as int8 in groups of 32, "
        "Q5_K as int8 in groups of 32 with minima, Q6_K as int8 in groups of 16 (gguf)"
    )
    config = config_of(MIXED, num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    given: Any = dict(dtype=FLOAT32, mesh=make_mesh(1), mesh_axes=TARGET_MESH_AXES)
    specs = declare(config, **given)
    schemes = {"/".join(path): spec.scheme for path, spec in specs.items()}
    assert schemes["embedding"] == Scheme(kind=INT8, group_size=16)
    assert schemes["layers/0/attention/q_proj"] == Scheme(kind=INT4, group_size=32)
    # One matrix has keys in Q4_0 and values in Q6_K, so both are stored as int8.
    assert schemes["layers/0/attention/kv_proj"] == Scheme(kind=INT8, group_size=16)
    minima: Any = dict(group_size=32, has_minima=True)
    assert schemes["layers/1/attention/q_proj"] == Scheme(kind=INT4, **minima)
    # Keys in Q4_K and values in Q5_0, whose minima are 0.
    assert schemes["layers/1/attention/kv_proj"] == Scheme(kind=INT8, **minima)
    assert schemes["layers/1/feed_forward/gate_up_proj"] == Scheme(kind=INT4, **minima)
    assert schemes["layers/0/feed_forward/gate_up_proj"] is None  # gate is F16
    assert schemes["layers/0/input_norm"] is None
    scanned = declare(replace(config, scan_layers=True), **given)
    assert scanned[("layers", "0", "feed_forward", "down_proj")].scheme is not None


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q4_1"), ("Q2_K", "Q3_K"), ("Q4_0", "Q6_K")]
)
def test_values_widen_to_the_scheme_that_types_share(kinds):
    """The scheme has minima if one of the types has."""
    shared = shared_scheme([GGUF_SCHEMES[kind] for kind in kinds])
    assert shared is not None and shared.kind == INT8
    assert shared.has_minima == (kinds != ("Q4_0", "Q6_K"))
    rows = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    for kind in kinds:
        made = quantized(in_memory({"a": rows})["a"], GGUF_SCHEMES[kind])
        wider = quantized(made, shared)
        assert isinstance(wider, QuantizedTensor) and wider.values.dtype == np.int8
        assert wider.scales.shape[:2] == (6, 64 // (shared.group_size or 0))
        assert wider.scales.shape[2:] == ((2,) if shared.has_minima else ())
        np.testing.assert_array_equal(wider.whole(), made.whole())
        np.testing.assert_array_equal(wider.head(2).whole(), made.whole()[:2])
        scales = wider.scales.whole()
        np.testing.assert_array_equal(wider.scales.read(1, 3), scales[1:3])
