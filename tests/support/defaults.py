"""What an engine's configuration has where a test says nothing of an argument."""

import dataclasses
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs

_REQUIRED = {
    item.name
    for item in dataclasses.fields(EngineConfig)
    if item.default is item.default_factory is dataclasses.MISSING
}

# Those of users, but that nothing is kept and prefixes are found.
DEFAULTS: dict[str, Any] = {
    item.name: item.default
    for item in dataclasses.fields(EngineArgs)
    if item.name in _REQUIRED and item.default is not dataclasses.MISSING
} | dict(compilation_cache_dir=None, enable_prefix_caching=True)
