"""Layouts of quantized matrices in files: names, packing and zero points.

Three published layouts are read: those of compressed-tensors, AutoAWQ ("awq") and
AutoGPTQ ("gptq"). The first is also written: vLLM reads the result of `packed`.

Activations are never quantized here. For checkpoints with quantized activations the
weights are read, and the scales of activations are ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.layout import DTYPES
from jaxspec_checkpoints.quantization import (
    FP8,
    GGUF,
    INT4,
    INT8,
    METHODS,
    MixedScheme,
    QuantizedTensor,
    Scheme,
    derived,
    quantized,
    quantized_tensor,
)
from jaxspec_checkpoints.tensor import Tensor

COMPRESSED, AWQ, GPTQ = METHODS
# Safetensors' names of types that are not types of weights.
PACKED_TYPES = {
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
# AutoAWQ's order: for each number in a 32-bit word, the output that it belongs to.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Tensors about quantized activations, which are ignored.
_ASIDE = ("input_scale", "input_zero_point")
_PACK, _PLAIN_INTS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"


def scheme_of(config: Mapping[str, Any]) -> Scheme | MixedScheme | None:
    """Return the quantization that a `config.json` describes; None if there is none.

    Raises:
        CheckpointError: The quantization is not supported.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method == GGUF:
        return MixedScheme(types=tuple(given["tensor_types"].items()))
    if method not in METHODS:
        allowed = ", ".join(map(repr, METHODS))
        raise CheckpointError(
            f"config.json: the quant_method of quantization_config must be one of "
            f"{allowed}, got {method!r:.80}"
        )
    if method == COMPRESSED:
        return _compressed_scheme(given)
    bits, size = given.get("bits"), given.get("group_size", -1)
    if bits != 4 and (method, bits) != (GPTQ, 8):
        _refuse(method, "bits", "4", bits)
    if not isinstance(size, int) or (size < 1 and size != -1):
        _refuse(method, "group_size", "a size, or -1", size)
    if given.get("desc_act"):
        _refuse(method, "desc_act", "false (features in their order)", True)
    if method == AWQ and given.get("version", "gemm") != "gemm":
        _refuse(method, "version", "'gemm'", given["version"])
    skipped = given.get("modules_to_not_convert") or []
    if any(name not in ("lm_head", "embed_tokens") for name in skipped):
        _refuse(method, "modules_to_not_convert", "'lm_head' alone", skipped)
    is_symmetric = given.get("sym", True)
    if method == AWQ:
        is_symmetric = not given.get("zero_point", True)
    if bits == 8 and not is_symmetric:
        _refuse(method, "sym", "true for 8 bits", False)
    size = None if size == -1 else size
    if not is_symmetric:
        return _with_zeros(size, method)
    return Scheme(kind=INT4 if bits == 4 else INT8, group_size=size, method=method)


def _with_zeros(size: int | None, method: str) -> Scheme:
    """Return the scheme of 4-bit values with zero points.

    A group's zero point becomes a minimum, `-scale * zero`, and its values remain 0 to
    15. If all features of an output share a zero point, the values minus it, which need
    five bits, are stored as int8.
    """
    if size is None:
        return Scheme(kind=INT8, method=method)
    return Scheme(kind=INT4, group_size=size, has_minima=True, method=method)


def _compressed_scheme(given: Mapping[str, Any]) -> Scheme:
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        _refuse(COMPRESSED, "config_groups", "one group of all layers", groups)
    [group] = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("targets") != ["Linear"]:
        _refuse(COMPRESSED, "config_groups", "weights of ['Linear']", groups)
    ignored = given.get("ignore") or []
    if any(name not in ("lm_head", "model.embed_tokens") for name in ignored):
        _refuse(COMPRESSED, "ignore", "['lm_head']", ignored)
    if given.get("kv_cache_scheme") is not None:
        _refuse(COMPRESSED, "kv_cache_scheme", "null", given["kv_cache_scheme"])
    form, bits = group.get("format") or given.get("format"), weights.get("num_bits")
    kinds: dict[Any, str] = {
        (_PACK, "int", 4): INT4,
        (_PACK, "int", 8): INT8,
        (_PLAIN_INTS, "int", 8): INT8,
        (_FLOATS, "float", 8): FP8,
    }
    kind = kinds.get((form, weights.get("type", "int"), bits))
    if kind is None:
        allowed = ", ".join(f"{form} of {bits} bits" for form, _, bits in kinds)
        _refuse(COMPRESSED, "format", allowed, f"{form} of {bits} bits")
    if weights.get("actorder") == "group":
        _refuse(COMPRESSED, "actorder", "null or 'weight'", "group")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "group" if size not in (None, -1) else "tensor"
    if strategy not in ("tensor", "channel", "group"):
        _refuse(COMPRESSED, "strategy", "tensor, channel or group", strategy)
    if strategy != "group":
        size = None
    elif not isinstance(size, int) or size < 1:
        _refuse(COMPRESSED, "group_size", "a size", size)
    if not weights.get("symmetric", True):
        if kind != INT4:
            _refuse(COMPRESSED, "symmetric", "true for 8 bits", False)
        return _with_zeros(size, COMPRESSED)
    return Scheme(kind=kind, group_size=size, method=COMPRESSED)


def _refuse(method: str, name: str, allowed: str, value: Any) -> NoReturn:
    raise CheckpointError(
        f"config.json: {name} of a checkpoint quantized by {method} must be {allowed}, "
        f"got {value!r:.120}"
    )


def unpack(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a file's tensors by canonical name; quantized ones as `QuantizedTensor`.

    Reads only shapes and group indices.

    Raises:
        CheckpointError: Parts of a matrix are missing or do not fit each other, or a
            matrix of a layer is not quantized.
    """
    scheme = scheme_of(config)
    if scheme is None:
        return dict(tensors)
    if isinstance(scheme, MixedScheme):
        raise CheckpointError(
            "config.json: quantization_config has quant_method 'gguf', but the "
            "weights are not in a GGUF file: remove quantization_config"
        )
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    read = {COMPRESSED: _compressed, AWQ: _awq, GPTQ: _gptq}[scheme.method or ""]
    found: dict[str, Tensor] = {}
    last = _Last()
    for module, parts in modules.items():
        plain = parts.get("weight")
        is_float = plain is not None and plain.dtype.name in DTYPES
        if is_float and "weight_scale" not in parts:
            assert plain is not None
            if ".layers." in module and len(plain.shape) == 2:
                raise CheckpointError(
                    f"tensor '{module}.weight' is not quantized, but config.json "
                    f"says that all layers are ({plain.source})"
                )
            found |= {f"{module}.{part}": one for part, one in parts.items()}
            continue
        needed = _Parts(module, {k: v for k, v in parts.items() if k not in _ASIDE})
        made = read(needed, scheme, config["quantization_config"], last)
        needed.check_empty()
        found[f"{module}.weight"] = made
    return found


class _Parts:
    """The file's tensors that describe one matrix; each must be used exactly once."""

    def __init__(self, module: str, tensors: dict[str, Tensor]):
        self.module, self._tensors = module, tensors

    def take(self, name: str) -> Tensor:
        """Remove and return a tensor; raise `CheckpointError` if it is missing."""
        if name not in self._tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor '{self.module}.{name}'; found for the "
                f"same matrix: {', '.join(sorted(self._tensors)) or 'none'}"
            )
        return self._tensors.pop(name)

    def maybe(self, name: str) -> Tensor | None:
        return self._tensors.pop(name, None)

    def check_empty(self) -> None:
        """Raise `CheckpointError` if there are tensors that no matrix uses."""
        for name, tensor in self._tensors.items():
            raise CheckpointError(
                f"tensor '{self.module}.{name}' is not part of a quantized matrix "
                f"({tensor.source})"
            )


class _Last:
    """Caches the matrix that was unpacked last, because callers read it by rows."""

    def __init__(self):
        self._key: object = None
        self._value: Any = None

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        if key != self._key:
            self._key = self._value = None  # free the old one first
            self._key, self._value = key, make()
        return self._value


def unpacked_words(
    words: np.ndarray, bits: int, order: tuple[int, ...] | None = None
) -> np.ndarray:
    """Split the 32-bit words of each row into unsigned numbers, lowest bits first.

    Args:
        order: Index in the result of each number of a word.
    """
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    if order is not None:
        shifts = shifts[np.argsort(order)]
    parts = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return parts.astype(np.uint8).reshape(len(words), -1)


def packed_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Undo `unpacked_words`; zeros fill the last word."""
    count = 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % count)))
    parts = values.astype(np.uint32).reshape(len(values), -1, count)
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(parts << shifts, axis=2).view(np.int32)


def _compressed(
    parts: _Parts, scheme: Scheme, given: Mapping[str, Any], last: _Last
) -> QuantizedTensor:
    """Read the layout of https://github.com/vllm-project/compressed-tensors."""
    [group] = given["config_groups"].values()
    bits = group["weights"]["num_bits"]
    if (group.get("format") or given.get("format")) != _PACK:
        values = parts.take("weight")
        if values.dtype != scheme.value_type:
            raise CheckpointError(
                f"tensor '{parts.module}.weight' has type {values.dtype.name}, "
                f"config.json says {scheme.value_type.name} ({values.source})"
            )
        _check_zeros(parts)
        return quantized_tensor(values, _scales(parts, scheme, values.shape))
    words, form = parts.take("weight_packed"), parts.take("weight_shape")
    shape = tuple(int(size) for size in form.whole())
    most = words.shape[1] * (32 // bits)
    if len(shape) != 2 or shape[0] != words.shape[0] or shape[1] > most:
        raise CheckpointError(
            f"tensor '{parts.module}.weight_packed' of shape {words.shape} cannot hold "
            f"a matrix of {shape} ({words.source})"
        )
    _check_order(parts, "weight_g_idx", scheme, shape[1])
    zeros, offset = parts.maybe("weight_zero_point"), 1 << (bits - 1)
    num_groups = scheme.num_groups(shape[1])

    def zeros_of(start: int, stop: int) -> np.ndarray:
        if zeros is None:
            return np.full((stop - start, num_groups), offset, np.int16)
        every = unpacked_words(np.ascontiguousarray(zeros.whole().T), bits).T
        return every[start:stop].astype(np.int16)

    def make(start: int, rows: np.ndarray) -> np.ndarray:
        found = unpacked_words(rows, bits)[:, : shape[1]].astype(np.int16)
        if not scheme.has_minima:
            found = found.reshape(len(rows), num_groups, -1)
            found = found - zeros_of(start, start + len(rows))[:, :, None]
        return _narrowed(found.reshape(len(rows), -1), scheme, words)

    values = derived(words, make, shape=shape, dtype=scheme.value_type)
    scales = _scales(parts, scheme, shape)
    if scheme.has_minima:
        scales = derived(
            scales,
            lambda start, rows: _with_minima(rows, zeros_of(start, start + len(rows))),
            shape=(*scales.shape, 2),
            dtype=np.float32,
        )
    return quantized_tensor(values, scales)


def _with_minima(scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Return float32 [out, group, 2] scales and minima.

    `scale * value + minimum` equals `scale * (value - zero)` exactly if the file's
    scales have 16 bits, because the products then fit in a float32.
    """
    return np.stack([scales, -scales * zeros.astype(np.float32)], axis=2)


def _narrowed(values: np.ndarray, scheme: Scheme, origin: Tensor) -> np.ndarray:
    """Return integers in the scheme's type; raise if one of them does not fit."""
    least, most = (-8, 7) if scheme.kind == INT4 else (-128, 127)
    if scheme.has_minima:
        least, most = 0, 15
    if values.size and not least <= values.min() <= values.max() <= most:
        raise CheckpointError(
            f"{origin.source} has values from {values.min()} to {values.max()}, which "
            f"{scheme.kind} cannot hold: the zero points are not those that "
            "config.json describes"
        )
    return values.astype(scheme.value_type)


def _check_order(parts: _Parts, name: str, scheme: Scheme, num_features: int) -> None:
    """Reject a matrix with reordered features; -1 everywhere means no order."""
    order = parts.maybe(name)
    if order is None:
        return
    ids, size = order.whole(), scheme.group_size or num_features
    if (ids == -1).all() or np.array_equal(ids, np.arange(num_features) // size):
        return
    raise CheckpointError(
        f"tensor '{parts.module}.{name}' reorders the features of groups (desc_act), "
        f"which is not supported ({order.source})"
    )


def _check_zeros(parts: _Parts) -> None:
    zeros = parts.maybe("weight_zero_point")
    if zeros is not None and zeros.whole().astype(np.float32).any():
        raise CheckpointError(
            f"tensor '{parts.module}.weight_zero_point' is not zero: only packed "
            f"matrices may have zero points ({zeros.source})"
        )


def _scales(parts: _Parts, scheme: Scheme, shape: tuple[int, ...]) -> Tensor:
    """Return [out, group] scales in float32; a single one applies to all outputs."""
    given = parts.take("weight_scale")
    form = shape[0], scheme.num_groups(shape[1])
    is_one = int(np.prod(given.shape, dtype=np.int64)) == 1 and form != (1, 1)
    if not is_one and given.shape != form:
        raise CheckpointError(
            f"tensor '{parts.module}.weight_scale' has shape {given.shape}, a matrix "
            f"of {shape} needs {form} ({given.source})"
        )

    if not is_one:
        return derived(
            given,
            lambda start, rows: rows.astype(np.float32),
            shape=form,
            dtype=np.float32,
        )

    def read(start: int, stop: int) -> np.ndarray:
        one = given.read(0, 1).astype(np.float32).reshape(1, 1)
        return np.broadcast_to(one, (stop - start, form[1])).copy()

    return Tensor(
        shape=form, dtype=np.dtype(np.float32), source=given.source, read=read
    )


def _awq(
    parts: _Parts, scheme: Scheme, given: Mapping[str, Any], last: _Last
) -> QuantizedTensor:
    """Read AutoAWQ's [features, outputs / 8] words, with outputs in its own order."""
    words, scales = parts.take("qweight"), parts.take("scales")
    zeros = parts.maybe("qzeros")
    shape = words.shape[1] * 8, words.shape[0]

    def values_of() -> np.ndarray:
        return unpacked_words(words.whole(), 4, _AWQ_ORDER)

    def zeros_of() -> np.ndarray:
        if zeros is None:
            return np.full(scales.shape, 8, np.uint8)
        return unpacked_words(zeros.whole(), 4, _AWQ_ORDER)

    return _transposed(parts, scheme, shape, words, scales, values_of, zeros_of, last)


def _gptq(
    parts: _Parts, scheme: Scheme, given: Mapping[str, Any], last: _Last
) -> QuantizedTensor:
    """Read AutoGPTQ's [features / 8, outputs] words; zero points are stored minus 1."""
    words, scales, zeros = (
        parts.take(name) for name in ("qweight", "scales", "qzeros")
    )
    bits = given["bits"]
    shape = words.shape[1], words.shape[0] * (32 // bits)
    _check_order(parts, "g_idx", scheme, shape[1])
    is_newer = given.get("checkpoint_format") == "gptq_v2"

    def values_of() -> np.ndarray:
        return unpacked_words(np.ascontiguousarray(words.whole().T), bits).T

    def zeros_of() -> np.ndarray:
        found = unpacked_words(zeros.whole(), bits).astype(np.int16)
        return found if is_newer else found + 1 & (1 << bits) - 1

    return _transposed(parts, scheme, shape, words, scales, values_of, zeros_of, last)


def _less(values: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Subtract [group, out] zero points from [feature, out] values."""
    groups = values.astype(np.int16).reshape(len(zeros), -1, values.shape[1])
    return (groups - zeros.astype(np.int16)[:, None]).reshape(values.shape)


def _transposed(
    parts: _Parts,
    scheme: Scheme,
    shape: tuple[int, int],
    words: Tensor,
    scales: Tensor,
    values_of: Callable[[], np.ndarray],
    zeros_of: Callable[[], np.ndarray],
    last: _Last,
) -> QuantizedTensor:
    """Describe a matrix of a file in which features are rows.

    Args:
        values_of: Returns unsigned values, [feature, out].
        zeros_of: Returns zero points, [group, out].
    """
    form = shape[0], scheme.num_groups(shape[1])
    if scales.shape != form[::-1]:
        raise CheckpointError(
            f"tensor '{parts.module}.scales' has shape {scales.shape}, a matrix of "
            f"{shape} needs {form[::-1]} ({scales.source})"
        )

    def whole() -> np.ndarray:
        found = values_of()
        if not scheme.has_minima:
            found = _less(found, zeros_of())
        return np.ascontiguousarray(_narrowed(found, scheme, words).T)

    def read(start: int, stop: int) -> np.ndarray:
        return last.get(parts.module, whole)[start:stop]

    def read_scales(start: int, stop: int) -> np.ndarray:
        found = scales.whole().T[start:stop].astype(np.float32)
        if scheme.has_minima:
            found = _with_minima(found, zeros_of().T[start:stop])
        return found

    values = Tensor(
        shape=shape, dtype=scheme.value_type, source=words.source, read=read
    )
    return quantized_tensor(
        values,
        Tensor(
            shape=scheme.scales_shape(shape),
            dtype=np.dtype(np.float32),
            source=scales.source,
            read=read_scales,
        ),
    )


def packed(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], scheme: Scheme
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `config.json` and the tensors of the quantized model.

    In the layout of compressed-tensors; matrices are quantized while they are read.

    Raises:
        CheckpointError: The model is quantized already, or groups do not divide a
            matrix.
    """
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            "the model is quantized already: convert the unquantized original instead"
        )
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".layers." not in name or len(tensor.shape) != 2:
            found[name] = tensor
            continue
        own, base = quantized(tensor, scheme), name.removesuffix("weight")
        if scheme.kind == FP8:
            found |= {name: own.values, f"{base}weight_scale": own.scales}
            continue
        bits = 4 if scheme.kind == INT4 else 8
        found[f"{base}weight_packed"] = _words(own.values, bits)
        found[f"{base}weight_scale"] = own.scales
        form = np.array(tensor.shape, np.int64)
        found[f"{base}weight_shape"] = Tensor(
            shape=(2,),
            dtype=form.dtype,
            source=f"{tensor.source} (shape)",
            read=lambda start, stop, form=form: form[start:stop],
        )
    return dict(config) | {"quantization_config": _config_entry(scheme)}, found


def _words(values: Tensor, bits: int) -> Tensor:
    """Pack values into 32-bit words, row by row, as unsigned numbers."""
    num_rows, features = values.shape

    def make(start: int, rows: np.ndarray) -> np.ndarray:
        return packed_words(rows.astype(np.int16) + (1 << (bits - 1)), bits)

    return derived(
        values, make, shape=(num_rows, -(-features * bits // 32)), dtype=np.int32
    )


def _config_entry(scheme: Scheme) -> dict[str, Any]:
    weights = dict(
        num_bits=4 if scheme.kind == INT4 else 8,
        type="float" if scheme.kind == FP8 else "int",
        symmetric=True,
        strategy="channel" if scheme.group_size is None else "group",
        group_size=scheme.group_size,
        dynamic=False,
    )
    group = dict(
        targets=["Linear"],
        weights=weights,
        input_activations=None,
        output_activations=None,
    )
    return dict(
        quant_method=COMPRESSED,
        format=_FLOATS if scheme.kind == FP8 else _PACK,
        quantization_status="compressed",
        ignore=["lm_head"],
        kv_cache_scheme=None,
        config_groups=dict(group_0=group),
    )
