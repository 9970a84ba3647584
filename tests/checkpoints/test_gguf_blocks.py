"""Every GGUF type is dequantized to the same numbers as by llama.cpp's library."""

import gguf
import numpy as np
import pytest

from jaxspec_checkpoints.gguf.blocks import OTHER_TYPES, TYPES, BlockType
from jaxspec_checkpoints.quantization import GGUF_SCHEMES, INT4, dequantize

Q = gguf.GGMLQuantizationType
QUANTIZED = {n: kind for n, kind in TYPES.items() if kind.dequantize is not None}


def random_blocks(kind: BlockType, count: int) -> np.ndarray:
    """Return blocks of random bytes: any value and scale, infinities and NaN too."""
    random = np.random.default_rng(sum(kind.name.encode()))
    return random.integers(0, 256, (count, kind.num_bytes), np.uint8)


@pytest.mark.parametrize("number", TYPES, ids=lambda number: TYPES[number].name)
def test_names_and_sizes_are_those_of_ggml(number):
    kind = TYPES[number]
    assert Q(number).name == kind.name
    sizes = gguf.GGML_QUANT_SIZES[Q(number)]
    assert sizes == (kind.num_elements, kind.num_bytes)


def test_other_types_are_not_read_or_not_split():
    theirs = {kind.value: kind.name for kind in Q}
    assert {n: OTHER_TYPES.get(n, name) for n, name in theirs.items()} == theirs
    assert not OTHER_TYPES.keys() & TYPES.keys()
    assert len(OTHER_TYPES) >= 20
    split = {kind.name for kind in TYPES.values() if kind.split is not None}
    assert split == set(GGUF_SCHEMES)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TYPES[number].name)
def test_numbers_are_equal_to_the_last_bit(number):
    kind = QUANTIZED[number]
    assert kind.dequantize is not None
    blocks = random_blocks(kind, 2000)
    found = kind.dequantize(blocks)
    expected = gguf.dequantize(blocks, Q(number))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    # Compare bits, which distinguish -0.0 from 0.0, except for NaN, whose sign may
    # differ.
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(
        np.signbit(found)[is_number], np.signbit(expected)[is_number]
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", GGUF_SCHEMES)
def test_integers_times_scales_equal_the_dequantized_numbers(name):
    [(number, kind)] = [item for item in TYPES.items() if item[1].name == name]
    assert kind.split is not None
    blocks = random_blocks(kind, 1000)
    values, scales = kind.split(blocks)
    assert values.dtype == np.int8 and scales.dtype == np.float32
    scheme = GGUF_SCHEMES[name]
    assert values.shape[1] // scales.shape[1] == scheme.group_size
    assert (scales.ndim == 3) == scheme.has_minima
    expected = gguf.dequantize(blocks, Q(number))
    np.testing.assert_array_equal(dequantize(values, scales), expected)
    if scheme.kind == INT4:
        least, largest = (0, 15) if scheme.has_minima else (-8, 7)
        assert least <= values.min() and values.max() <= largest
        np.testing.assert_array_equal(values.astype(scheme.value_type), values)
