"""Log-probabilities read from a result vector."""

import numpy as np
import pytest

from jaxspec.program.token_logprobs import num_columns, read_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_numbers_are_read_and_the_rest_is_left(num_top: int):
    random = np.random.default_rng(num_top)
    own = random.normal(size=(2, 3)).astype(np.float32)
    rank = random.integers(1, 100, (2, 3), np.int32)
    top_ids = random.integers(0, 100, (2, 3, num_top), np.int32)
    top = random.normal(size=(2, 3, num_top)).astype(np.float32)
    columns = own.view(np.int32)[..., None], rank[..., None], top_ids
    table = np.concatenate([*columns, top.view(np.int32)], axis=-1)
    assert table.shape[-1] == num_columns(num_top)
    vector = np.concatenate([table.reshape(-1), np.array([8, 9], np.int32)])
    found, rest = read_logprobs(vector, (2, 3), num_top)
    for mine, theirs in zip(found, (own, rank, top_ids, top), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert rest.tolist() == [8, 9]
