"""Gemma 2 and 3: `config`, `network`, `module` (in Flax), `turns` (of chats)."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Imported on first use, as it imports jax and flax, which reading configs does
    # not need.
    if name != "Gemma":
        raise AttributeError(f"module 'jaxspec.models.gemma' has no attribute {name!r}")
    return importlib.import_module("jaxspec.models.gemma.module").Gemma
