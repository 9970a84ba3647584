"""Reads token maps: the tokens that a draft may propose, most frequent first.

A map is a JSON file, in a draft's folder or elsewhere. The first N of its token ids are
kept, so that one file serves every size N. Independent of networks.

References: Zhao et al. 2025, arXiv:2502.14856 (FR-Spec).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand, readable
from jaxspec_checkpoints.quantization import QuantizedTensor, quantized_tensor
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

# Key of the token ids, if the map is a JSON object with further entries.
IDS = "token_ids"


def read_token_map(path: str | Path, vocab_size: int) -> list[int]:
    """Read the ids of a map, in order.

    Args:
        vocab_size: Size of the vocabulary; ids must be below it.

    Raises:
        CheckpointError: The file is malformed, or names a token twice or an unknown
            one.
    """
    path = expand(path)
    with readable(path):
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file")
        if path.suffix in (".pt", ".bin", ".pth"):
            raise CheckpointError(
                f"{path} is a pickle, which could run any code when loaded: write "
                "its ids as a JSON list, most frequent first"
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (RecursionError, ValueError) as error:
            raise CheckpointError(f"{path} must be readable JSON: {error}") from error
    ids = content.get(IDS) if isinstance(content, dict) else content
    are_ids = isinstance(ids, list) and all(type(one) is int for one in ids)
    if not are_ids or not ids:
        raise CheckpointError(
            f"{path} must hold a JSON list of token ids, or an object with one as "
            f"{IDS!r}, most frequent first; got {content!r:.80}"
        )
    wrong = [one for one in ids if not 0 <= one < vocab_size]
    if wrong:
        raise CheckpointError(
            f"{path} has token id {wrong[0]}, but ids go from 0 to "
            f"vocab_size={vocab_size} - 1"
        )
    if len(set(ids)) < len(ids):
        known: set[int] = set()
        twice = next(one for one in ids if one in known or known.add(one))
        raise CheckpointError(f"{path} has token id {twice} twice")
    return ids


@dataclass(frozen=True, kw_only=True)
class _Rows(Tensor):
    origin: Tensor
    ids: np.ndarray

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        # Read all of the source, so that its hash is checked.
        for start, rows in self.origin.blocks():
            first, stop = np.searchsorted(self.ids, (start, start + len(rows)))
            if first < stop:
                yield int(first), rows[self.ids[first:stop] - start]


def rows_of(tensor: Tensor, ids: Sequence[int]) -> Tensor:
    """Select rows of a matrix, in ascending order of their numbers."""
    chosen = np.asarray(ids, np.int64)
    assert len(chosen) and (np.diff(chosen) > 0).all(), "rows are not ascending"
    assert chosen[0] >= 0 and chosen[-1] < tensor.shape[0], "there are no such rows"
    if isinstance(tensor, QuantizedTensor):
        values, scales = rows_of(tensor.values, ids), rows_of(tensor.scales, ids)
        return quantized_tensor(values, scales)
    step = max(1, BLOCK_BYTES * tensor.shape[0] // max(1, tensor.num_bytes))

    def read(start: int, stop: int) -> np.ndarray:
        found, wanted = [], chosen[start:stop]
        while len(wanted):
            # Number of the selected ids in this block of rows.
            count = int(np.searchsorted(wanted, wanted[0] + step))
            some, wanted = wanted[:count], wanted[count:]
            rows = tensor.read(int(some[0]), int(some[-1]) + 1)
            found.append(rows[some - some[0]])
        return np.concatenate(found)

    return _Rows(
        shape=(len(chosen), *tensor.shape[1:]),
        dtype=tensor.dtype,
        source=tensor.source,
        read=read,
        origin=tensor,
        ids=chosen,
    )
