"""The configuration of an engine: frozen dataclasses, checked when they are made.

`engine` holds all of it. Its parts: `model` (sizes of a network), `quantization` (forms
of matrices), `methods` (how drafts are proposed: one row each), `speculation` (the
speculative arguments), `lookups`
(drafts from matching text), `token_tree` (shapes of drafts), `trimming` (vocabulary of
a draft), `structured_outputs`, `kv_events`, `hosts` (several processes, one target).
"""

from jaxspec.config.engine import EngineConfig
from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.structured_outputs import StructuredOutputsConfig

__all__ = [
    "EngineConfig",
    "KvEventsConfig",
    "ModelConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]
