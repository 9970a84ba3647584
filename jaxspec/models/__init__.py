"""The networks: `families` says which there are.

Reading order: `batch` (what a forward pass is given), `network` (what the program asks
of one), `gemma`, made of `layers` that a `stack` runs, `params` and `weights` (how
parameters are declared, read and made), `matrices` and `quantized` (the forms they lie
in), `trimmed` (a draft's head cut to some tokens), `backend` (kernels and devices),
`cpu`. `heads` are small networks on a target's hidden states; `variables` shows
parameters to Flax.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    # On first use: it reaches jax and flax. `Gemma2` is the name in older scripts.
    if name not in ("Gemma", "Gemma2"):
        raise AttributeError(f"module 'jaxspec.models' has no attribute {name!r}")
    return importlib.import_module("jaxspec.models.gemma.module").Gemma
