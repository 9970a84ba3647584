"""Published quantized checkpoints are dequantized to the same numbers as by torch.

Files are packed here word by word, as the libraries describe it, and dequantized in
torch from the numbers before they were packed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jaxspec.errors import ConfigError
from jaxspec.models.families import config_from_folder
from jaxspec.models.weights import load_params
from jaxspec.sharding import make_mesh
from jaxspec_checkpoints import CheckpointError, open_checkpoint
from jaxspec_checkpoints.__main__ import main
from jaxspec_checkpoints.packing import scheme_of
from jaxspec_checkpoints.quantization import (
    QuantizedTensor,
    Scheme,
    dequantize,
    named_scheme,
    quantize,
)
from jaxspec_checkpoints.report import describe
from jaxspec_checkpoints.writing import write_checkpoint
from tests.checkpoints.models import tiny_config, tiny_tensors

GROUP = 32
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=128)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
CONFIG = tiny_config("2b", **SIZES)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = tuple[dict[str, torch.Tensor], torch.Tensor]
IN_GROUPS = dict(num_bits=4, strategy="group", group_size=GROUP)
AWQ = dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True)
GPTQ = dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=True)
FP8 = torch.float8_e4m3fn


def into_words(
    values: torch.Tensor, bits: int, order: Sequence[int] | None = None
) -> torch.Tensor:
    """Pack columns into 32-bit words, the first column of a word in its lowest bits."""
    count = 32 // bits
    order = order or range(count)
    words = torch.zeros(values.shape[0], values.shape[1] // count, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place in range(count):
            one = values[:, word * count + order[place]].to(torch.int64)
            words[:, word] |= (one & (1 << bits) - 1) << bits * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def whole_numbers(shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, dtype=torch.int32)


def scales_of(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) / 50 + 0.001).to(torch.float16)


def spread(groups: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Repeat each group's number for the group's features; return float32."""
    return groups.float().repeat_interleave(shape[1] // groups.shape[1], dim=1)


def packed(
    shape: tuple[int, int],
    *,
    bits: int,
    size: int | None = None,
    has_zeros: bool = False,
) -> Parts:
    half = 1 << bits - 1
    values = whole_numbers(shape, -half, half - 1)
    form = shape[0], shape[1] // (size or shape[1])
    scales, zeros = scales_of(*form).to(torch.bfloat16), torch.zeros(form)
    parts = {
        "weight_packed": into_words(values + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    if has_zeros:
        zeros = whole_numbers(form, -half, half - 1)
        words = into_words((zeros + half).T, bits).T.contiguous()
        parts["weight_zero_point"] = words
    return parts, (values - spread(zeros, shape)) * spread(scales, shape)


def in_bytes(
    shape: tuple[int, int], *, kind: torch.dtype, is_tensor: bool = False
) -> Parts:
    values = (torch.randn(shape) * 40).to(kind)
    if kind == torch.int8:
        values = whole_numbers(shape, -128, 127).to(kind)
    scales = scales_of(1) if is_tensor else scales_of(shape[0], 1)
    parts = {"weight": values, "weight_scale": scales}
    if is_tensor:
        parts["input_scale"] = torch.tensor(0.5)
    return parts, values.float() * scales.float()


def awq(shape: tuple[int, int]) -> Parts:
    values, form = whole_numbers(shape, 0, 15), (shape[0], shape[1] // GROUP)
    zeros, scales = whole_numbers(form, 0, 15), scales_of(*form)
    parts = {
        "qweight": into_words(values.T, 4, AWQ_ORDER),
        "qzeros": into_words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return parts, (values - spread(zeros, shape)) * spread(scales, shape)


def gptq(
    shape: tuple[int, int],
    *,
    bits: int = 4,
    size: int | None = GROUP,
    lacks: int = 1,
    is_symmetric: bool = True,
) -> Parts:
    most = (1 << bits) - 1
    form = shape[0], shape[1] // (size or shape[1])
    zeros = torch.full(form, 1 << bits - 1, dtype=torch.int32)
    if not is_symmetric:
        zeros = whole_numbers(form, 1, most)
    values, scales = whole_numbers(shape, 0, most), scales_of(*form)
    parts = {
        "qweight": into_words(values, bits).T.contiguous(),
        "qzeros": into_words((zeros - lacks).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(shape[1]) // (size or shape[1])).to(torch.int32),
    }
    return parts, (values - spread(zeros, shape)) * spread(scales, shape)


def of_compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Return a quantization of compressed-tensors, per channel unless in groups."""
    weights = dict(symmetric=True, num_bits=8, type="int", strategy="channel") | weights
    return dict(
        quant_method="compressed-tensors",
        format=form,
        ignore=["lm_head"],
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weights)),
    )


PACKED = of_compressed("pack-quantized", **IN_GROUPS)


def scheme(kind: str, group_size: int | None = None, **more: Any) -> Scheme:
    return Scheme(kind=kind, group_size=group_size, **more)  # pyright: ignore[reportArgumentType]


in_groups = partial(packed, bits=4, size=GROUP)
# Quantizations of config.json, how matrices are packed, and the scheme that is read.
FORMS: dict[str, tuple[dict[str, Any], Any, Scheme]] = {
    "w8a16": (of_compressed("pack-quantized"), partial(packed, bits=8), scheme("int8")),
    "w4a16": (PACKED, in_groups, scheme("int4", GROUP)),
    "w4a16 with zero points": (
        of_compressed("pack-quantized", **IN_GROUPS, symmetric=False),
        partial(in_groups, has_zeros=True),
        scheme("int4", GROUP, has_minima=True),
    ),
    "w4a16 per channel with zero points": (
        of_compressed("pack-quantized", num_bits=4, symmetric=False),
        partial(packed, bits=4, has_zeros=True),
        scheme("int8"),
    ),
    "w8a8": (
        of_compressed("int-quantized"),
        partial(in_bytes, kind=torch.int8),
        scheme("int8"),
    ),
    "FP8": (
        of_compressed("float-quantized", type="float"),
        *(partial(in_bytes, kind=FP8), scheme("fp8")),
    ),
    "FP8 of whole tensors": (
        of_compressed("float-quantized", type="float", strategy="tensor"),
        *(partial(in_bytes, kind=FP8, is_tensor=True), scheme("fp8")),
    ),
    "awq": (AWQ, awq, scheme("int4", GROUP, has_minima=True)),
    "gptq": (GPTQ, gptq, scheme("int4", GROUP)),
    "gptq with zero points": (
        GPTQ | dict(sym=False, checkpoint_format="gptq_v2"),
        partial(gptq, is_symmetric=False, lacks=0),
        scheme("int4", GROUP, has_minima=True),
    ),
    "gptq of 8 bits": (
        GPTQ | dict(bits=8, group_size=-1),
        *(partial(gptq, bits=8, size=None), scheme("int8")),
    ),
}


def write(
    folder: Path, given: dict[str, Any], make: Callable[[Any], Parts]
) -> dict[str, np.ndarray]:
    """Return a folder with a quantized model, and its dequantized numbers."""
    torch.manual_seed(0)
    folder.mkdir()
    files: dict[str, torch.Tensor] = {}
    expected = {}
    for name, array in tiny_tensors(CONFIG).items():
        if ".layers." in name and array.ndim == 2:
            parts, numbers = make(array.shape)
            module = name.removesuffix(".weight")
            files |= {f"{module}.{part}": one for part, one in parts.items()}
            expected[name] = numbers.numpy()
        else:
            files[name] = torch.from_numpy(array)
            expected[name] = array
    save_file(files, folder / "model.safetensors")
    content = CONFIG | dict(quantization_config=given, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(content))
    return expected


@pytest.mark.parametrize("name", FORMS)
def test_published_matrices_equal_those_dequantized_in_torch(name, tmp_path):
    given, make, scheme = FORMS[name]
    scheme = replace(scheme, method=given["quant_method"])
    expected = write(tmp_path / "model", given, make)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert scheme_of(checkpoint.config) == scheme
    assert scheme.describe() in describe(checkpoint)
    num_quantized = 0
    for tensor, numbers in expected.items():
        found = checkpoint.tensors[tensor]
        np.testing.assert_array_equal(found.whole(), numbers)
        if isinstance(found, QuantizedTensor):
            num_quantized += 1
            np.testing.assert_array_equal(found.read(3, 9), numbers[3:9])
    assert num_quantized == 7
    config = config_from_folder(tmp_path / "model")
    assert config.quantization == scheme
    options: Any = dict(dtype=jnp.dtype("float32"), mesh=make_mesh(1))
    params = load_params(config, checkpoint.tensors, **options)
    q_proj = params["layers"]["0"]["attention"]["q_proj"]
    expected_q = expected["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q_proj.rows(jnp.arange(len(expected_q))), expected_q)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(quant_method="bitsandbytes"), "got 'bitsandbytes'"),
        (AWQ | dict(bits=3), "bits of a checkpoint quantized by awq must be 4, got 3"),
        (AWQ | dict(version="gemv"), "must be 'gemm', got 'gemv'"),
        (GPTQ | dict(desc_act=True), "desc_act"),
        (of_compressed("marlin-24", **IN_GROUPS), "got 'marlin-24 of 4 bits'"),
        (of_compressed("pack-quantized", **IN_GROUPS, actorder="group"), "actorder"),
        (PACKED | dict(ignore=["re:.*0"]), "ignore"),
        (GPTQ | dict(group_size=48), "matrices of 64"),
    ],
)
def test_other_schemes_are_refused_before_anything_is_read(given, text, tmp_path):
    content = json.dumps(CONFIG | dict(quantization_config=given))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        config_from_folder(tmp_path)


def test_error_names_the_tensor_that_contradicts_the_config(tmp_path):
    given, make, _ = FORMS["w4a16"]

    def opened(name: str, other: Callable[[Any], Parts]) -> Any:
        write(tmp_path / name, given, other)
        return open_checkpoint(tmp_path / name)

    def lacking(shape: Any) -> Parts:
        parts, numbers = make(shape)
        del parts["weight_scale"]
        return parts, numbers

    def plain(shape: Any) -> Parts:
        return {"weight": torch.zeros(shape)}, torch.zeros(1)

    for name, other, message in (
        ("lacking", lacking, "no tensor 'model.layers.0.*weight_scale"),
        ("plain", plain, "is not quantized, but config.json says"),
        ("coarse", partial(packed, bits=4), r"needs \(64, 4\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            opened(name, other)
    zeros = opened("zeros", partial(in_groups, has_zeros=True))
    with pytest.raises(CheckpointError, match="which int4 cannot hold"):
        zeros.tensors["model.layers.0.self_attn.q_proj.weight"].whole()


def test_permuted_features_are_refused(tmp_path):
    """Permuted features are refused even if config.json does not mention them."""
    given, make, _ = FORMS["w4a16"]

    def ordered(order: torch.Tensor) -> Any:
        def make_one(shape: Any) -> Parts:
            parts, numbers = make(shape)
            return parts | {"weight_g_idx": order[: shape[1]].clone()}, numbers

        return make_one

    groups = (torch.arange(4096) // GROUP).to(torch.int32)
    for name, order in (("unset", torch.full_like(groups, -1)), ("plain", groups)):
        write(tmp_path / name, given, ordered(order))
        open_checkpoint(tmp_path / name)
    write(tmp_path / "own", given, ordered(groups.roll(1)))
    with pytest.raises(CheckpointError, match="weight_g_idx' reorders the features"):
        open_checkpoint(tmp_path / "own")


@pytest.mark.parametrize(
    ("kind", "to"), [("int8", "orbax"), ("int4", "hf"), ("fp8", "hf"), ("fp8", "orbax")]
)
def test_converted_model_is_read_back(kind, to, tmp_path, monkeypatch):
    plain = tmp_path / "plain"
    config = tiny_config("2b", **SIZES | dict(hidden_size=128, head_dim=32))
    plain.mkdir()
    arrays = tiny_tensors(config)
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_file(given, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config | dict(torch_dtype="float32")))
    made = tmp_path / "made"
    command = ["convert", str(plain), str(made), "--to", to, "--quantize", kind]
    assert main(command) == 0
    checkpoint, scheme = open_checkpoint(made), named_scheme(kind)
    assert scheme_of(checkpoint.config) == replace(scheme, method="compressed-tensors")
    for name, array in arrays.items():
        expected = array
        if ".layers." in name and array.ndim == 2:
            expected = dequantize(*quantize(array, scheme))
        np.testing.assert_array_equal(checkpoint.tensors[name].whole(), expected)
    assert checkpoint.num_parameters == sum(map(np.size, arrays.values()))
    assert checkpoint.num_bytes < 0.6 * sum(array.nbytes for array in arrays.values())
    # Dequantize again, for readers without support.
    write_checkpoint(checkpoint, tmp_path / "again", to="hf", progress=False)
    again = open_checkpoint(tmp_path / "again")
    assert "quantization_config" not in again.config
    name = "model.layers.0.mlp.down_proj.weight"
    expected = dequantize(*quantize(arrays[name], scheme))
    np.testing.assert_array_equal(again.tensors[name].whole(), expected)


def test_impossible_conversion_is_refused(tmp_path):
    write(tmp_path / "model", *FORMS["awq"][:2])
    quantized = open_checkpoint(tmp_path / "model")
    for options, message in (
        (dict(to="hf"), "is quantized already"),
        (dict(to="kaggle"), "no place for scales"),
        (dict(to="hf", dtype="float32"), "both set the type of the"),
    ):
        options: Any = options | dict(quantization="int8", progress=False)
        with pytest.raises(CheckpointError, match=message):
            write_checkpoint(quantized, tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()
