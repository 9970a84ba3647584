"""The configuration of an engine: frozen dataclasses, checked when they are made.

`engine` holds all of it. Its parts: `model` (sizes of a network), `quantization`
(storage of weights in fewer bits), `methods` (the speculative methods), `speculation`
(the speculative arguments), `lookups` (drafts copied from earlier text), `token_tree`
(shapes of drafts), `trimming` (vocabulary of a draft), `structured_outputs`,
`kv_events`, `profiler`, `hosts` (several processes, one target).
"""

import importlib
from typing import Any

# The modules of the public names, which are imported on first use: they import numpy,
# which takes 0.3 s, and `jaxspec` itself needs only `structured_outputs`.
_MODULES = {
    "EngineConfig": "engine",
    "KvEventsConfig": "kv_events",
    "ModelConfig": "model",
    "ProfilerConfig": "profiler",
    "SpeculativeConfig": "speculation",
    "StructuredOutputsConfig": "structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
