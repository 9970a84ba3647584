"""The networks; `families` lists them.

Reading order: `batch` (the input of a forward pass), `network` (the interface that the
program calls), `gemma`, made of `layers` that a `stack` runs, `params` and `weights`
(how parameters are declared, read and made), `matrices` and `quantized` (storage
formats of matrices), `trimmed` (a draft model's head with the rows of some tokens
only), `backend` (kernels and devices), `cpu`. `heads` are small networks on a target's
hidden states; `variables` presents parameters to Flax.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # Imported on first use, because it imports jax and flax. `Gemma2` is the name in
    # older scripts.
    if name not in ("Gemma", "Gemma2"):
        raise AttributeError(f"module 'jaxspec.models' has no attribute {name!r}")
    return importlib.import_module("jaxspec.models.gemma.module").Gemma
