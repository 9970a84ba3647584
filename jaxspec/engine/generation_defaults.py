"""Owns the sampling parameters that a model's files recommend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config import read_generation_config

_OUR_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def recommended_sampling(
    folder: Path | None, override: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Translate a folder's recommended sampling to the names of SamplingParams.

    Args:
        folder: With a `generation_config.json`; None recommends nothing.
        override: Entries of such a file that replace the folder's.
    """
    stored = {} if folder is None else dict(read_generation_config(folder))
    stored |= override or {}
    return {
        ours: stored[theirs]
        for theirs, ours in _OUR_NAMES.items()
        if stored.get(theirs) is not None
    }
