"""Rows of a tensor that a trimmed head keeps, read from wherever its weights are."""

import dataclasses
import hashlib

import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError, in_memory, trimming
from jaxspec_checkpoints import tensor as tensors
from jaxspec_checkpoints.quantization import Scheme, quantized
from jaxspec_checkpoints.trimming import rows_of

KEPT = [0, 3, 4, 5, 17, 40, 41, 99]
VALUES = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)


@pytest.fixture(name="whole", params=[32, 200, 10_000])
def _whole(request, monkeypatch):
    """Return a tensor of 100 rows that is read in blocks of one, six or all rows."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(trimming, "BLOCK_BYTES", request.param)
    return in_memory({"table": VALUES})["table"]


def test_rows_are_selected_by_number(whole):
    """No more is read at a time than a block, or one row."""
    reads = []

    def read(start, stop):
        reads.append(stop - start)
        return VALUES[start:stop]

    found = rows_of(dataclasses.replace(whole, read=read), KEPT)
    assert found.shape == (len(KEPT), 8)
    np.testing.assert_array_equal(found.whole(), VALUES[KEPT])
    # Damage is found in rows that are not selected.
    digest = hashlib.sha256(VALUES.tobytes()).hexdigest()
    sound = rows_of(dataclasses.replace(whole, sha256=digest), KEPT)
    np.testing.assert_array_equal(sound.whole(), VALUES[KEPT])
    damaged = rows_of(dataclasses.replace(whole, sha256="0" * 64), KEPT[:2])
    with pytest.raises(CheckpointError, match="damaged"):
        damaged.whole()
    for start, stop in [(0, 8), (2, 3), (3, 7), (7, 8)]:
        np.testing.assert_array_equal(found.read(start, stop), VALUES[KEPT[start:stop]])
    assert max(reads) <= max(1, trimming.BLOCK_BYTES // 32)


@pytest.mark.parametrize("group_size", [None, 4])
def test_rows_of_a_quantized_matrix_are_quantized_alike(whole, group_size):
    scheme = Scheme(kind="int8", group_size=group_size)
    matrix = quantized(whole, scheme)
    expected = matrix.whole()[KEPT]
    found = rows_of(quantized(whole, scheme), KEPT)
    np.testing.assert_array_equal(found.whole(), expected)
    again = quantized(rows_of(whole, KEPT), scheme)
    np.testing.assert_array_equal(again.values.whole(), matrix.values.whole()[KEPT])
    np.testing.assert_array_equal(again.scales.whole(), matrix.scales.whole()[KEPT])
