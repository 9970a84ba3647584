"""Gemma 2: `config`, `network`, `module` (the network in Flax), `turns` (of chats)."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # On first use: it reaches jax and flax, which the readers of configs do without.
    if name != "Gemma2":
        raise AttributeError(f"module 'jaxspec.models.gemma' has no attribute {name!r}")
    return importlib.import_module("jaxspec.models.gemma.module").Gemma2
