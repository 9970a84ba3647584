"""Defines the types of GGUF tensors, and dequantizes their blocks.

A quantized row is a sequence of blocks of equal size. Every function here takes blocks
as uint8 [block, byte] and returns one row per block. The order of the float32
operations is that of `gguf.dequantize`, so results are equal to the last bit.

Source: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

# Values, int8 [block, element], and scales, float32 [block, group]; or both scales and
# minima, [block, group, 2].
Split = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

# The numbers that the 4-bit values 0 to 15 of IQ4_NL and IQ4_XS represent.
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.int8,
)


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """How a type stores its elements.

    Attributes:
        name: Name of the type, as ggml spells it.
        num_elements: Elements per block.
        num_bytes: Bytes per block.
        dtype: Type of the dequantized numbers: float32 for every quantized type.
        dequantize: Turns blocks into numbers; None for plain floats.
        split: Turns blocks into integers and scales whose products are the numbers,
            after adding minima if there are any; None for plain floats.
    """

    name: str
    num_elements: int = 1
    num_bytes: int
    dtype: np.dtype = np.dtype(np.float32)
    dequantize: Callable[[np.ndarray], np.ndarray] | None = None
    split: Split | None = None


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at byte `start` of each block, as float32 [block, 1]."""
    pair = np.ascontiguousarray(blocks[:, start : start + 2])
    return pair.view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return low halves of all bytes, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: np.ndarray) -> np.ndarray:
    """Return bits of a little-endian word, lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _pairs(packed: np.ndarray) -> np.ndarray:
    """Return two-bit fields: position 128 a + 32 s + l is in byte 32 a + l."""
    words = packed.reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return ((words >> shifts) & 3).reshape(-1, 256)


def _signed(values: np.ndarray, zero: int) -> np.ndarray:
    """Subtract the value that represents 0 from unsigned values; int8."""
    return values.view(np.int8) - np.int8(zero)


def _products(scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply every group of values by its scale, [block, element]."""
    groups = values.reshape(*scales.shape, -1).astype(np.float32)
    groups *= scales[:, :, None]
    return groups.reshape(values.shape)


def _split_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _signed(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0)


def _split_q5_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _signed(values, 16), _half(blocks, 0)


def _split_q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0)


def _split_q3_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    masks, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    # A set bit is a value's third bit; bit 4 a + s of byte l is of 128 a + 32 s + l.
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((masks[:, None, :] >> shifts) & 1).reshape(-1, 256)
    values = _signed(_pairs(low) | high << 2, 4)
    # Sixteen scales of 6 bits: four of each, then two of each in the last four bytes.
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    tops = ((packed[:, None, 8:] >> shifts) & 3).reshape(-1, 16)
    scales = _signed(_nibbles(packed[:, :8]) | tops << 4, 32)
    return values, _half(blocks, 108) * scales.astype(np.float32)


def _split_q6_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    values = _signed(low | _pairs(blocks[:, 128:192]) << 4, 32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return values, _half(blocks, 208) * scales.astype(np.float32)


def _split_q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    minima = _with_minima(_half(blocks, 0), _half(blocks, 2))
    return _nibbles(blocks[:, 4:]).view(np.int8), minima


def _split_q5_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return values.view(np.int8), _with_minima(_half(blocks, 0), _half(blocks, 2))


def _split_q2_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return _pairs(blocks[:, 16:80]).view(np.int8), _with_minima(scales, -minima)


def _split_q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _group_nibbles(blocks[:, 16:]).view(np.int8), _eight_scales(blocks)


def _split_q5_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    tops = ((blocks[:, None, 16:48] >> shifts) & 1).reshape(-1, 256)
    values = _group_nibbles(blocks[:, 48:]) | tops << 4
    return values.view(np.int8), _eight_scales(blocks)


def _group_nibbles(packed: np.ndarray) -> np.ndarray:
    """Return nibbles of 128 bytes: per 32 bytes the low ones, then the high ones."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 256)


def _eight_scales(blocks: np.ndarray) -> np.ndarray:
    """Return scales and minima of Q4_K and Q5_K: of 6 bits each, in 12 bytes."""
    first, second, last = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate([first & 63, last & 15 | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, last >> 4 | (second >> 6) << 4], axis=1)
    return _with_minima(
        _half(blocks, 0) * scales.astype(np.float32),
        -(_half(blocks, 2) * minima.astype(np.float32)),
    )


def _with_minima(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    return np.stack([scales, minima], axis=2)


def _split_iq4_nl(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _IQ4_VALUES[_nibbles(blocks[:, 2:])], _half(blocks, 0)


def _split_iq4_xs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).reshape(-1, 8)
    scales = _half(blocks, 0) * _signed(low | high << 4, 32).astype(np.float32)
    nibbles = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256)
    return _IQ4_VALUES[nibbles], scales


def _of_split(split: Split) -> Callable[[np.ndarray], np.ndarray]:
    def dequantize(blocks: np.ndarray) -> np.ndarray:
        values, scales = split(blocks)
        if scales.ndim == 2:
            return _products(scales, values)
        numbers = _products(scales[:, :, 0], values)
        groups = numbers.reshape(*scales.shape[:2], -1)
        groups += scales[:, :, 1:]
        return numbers

    return dequantize


def _scaled(name: str, num_elements: int, num_bytes: int, split: Split) -> BlockType:
    return BlockType(
        name=name,
        num_elements=num_elements,
        num_bytes=num_bytes,
        dequantize=_of_split(split),
        split=split,
    )


# Types by their number in a file.
TYPES = {
    0: BlockType(name="F32", num_bytes=4),
    1: BlockType(name="F16", num_bytes=2, dtype=np.dtype(np.float16)),
    2: _scaled("Q4_0", 32, 18, _split_q4_0),
    3: _scaled("Q4_1", 32, 20, _split_q4_1),
    6: _scaled("Q5_0", 32, 22, _split_q5_0),
    7: _scaled("Q5_1", 32, 24, _split_q5_1),
    8: _scaled("Q8_0", 32, 34, _split_q8_0),
    10: _scaled("Q2_K", 256, 84, _split_q2_k),
    11: _scaled("Q3_K", 256, 110, _split_q3_k),
    12: _scaled("Q4_K", 256, 144, _split_q4_k),
    13: _scaled("Q5_K", 256, 176, _split_q5_k),
    14: _scaled("Q6_K", 256, 210, _split_q6_k),
    20: _scaled("IQ4_NL", 32, 18, _split_iq4_nl),
    23: _scaled("IQ4_XS", 256, 136, _split_iq4_xs),
    30: BlockType(name="BF16", num_bytes=2, dtype=np.dtype(ml_dtypes.bfloat16)),
}
# Types that are not supported; their names are for error messages.
OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S"},
    **{22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}
