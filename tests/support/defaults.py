"""Default engine arguments of tests."""

import dataclasses
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs

_REQUIRED = {
    item.name
    for item in dataclasses.fields(EngineConfig)
    if item.default is item.default_factory is dataclasses.MISSING
}

# Defaults of `EngineArgs`, but without a program cache and with prefix caching.
DEFAULTS: dict[str, Any] = {
    item.name: item.default
    for item in dataclasses.fields(EngineArgs)
    if item.name in _REQUIRED and item.default is not dataclasses.MISSING
} | dict(
    compilation_cache_dir=None,
    enable_prefix_caching=True,
)
