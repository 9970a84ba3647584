"""The configuration of an engine: frozen dataclasses, checked when they are made.

`engine` holds all of it. Its parts: `model` (sizes of a network), `quantization`
(storage of weights in fewer bits), `methods` (the speculative methods), `speculation`
(the speculative arguments), `lookups` (drafts copied from earlier text), `token_tree`
(shapes of drafts), `trimming` (vocabulary of a draft), `structured_outputs`,
`kv_events`, `profiler`, `hosts` (several processes, one target).
"""

from jaxspec.config.engine import EngineConfig
from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.config.model import ModelConfig
from jaxspec.config.profiler import ProfilerConfig
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.structured_outputs import StructuredOutputsConfig

__all__ = [
    "EngineConfig",
    "KvEventsConfig",
    "ModelConfig",
    "ProfilerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]
