"""The environment variables of vLLM that have an effect here; others are not read."""

import os

from jaxspec.errors import ConfigError, wrong_argument

VLLM_API_KEY: str | None
VLLM_BATCH_INVARIANT: bool
VLLM_SERVER_DEV_MODE: bool

_FLAGS = ("VLLM_BATCH_INVARIANT", "VLLM_SERVER_DEV_MODE")
_READ = ("VLLM_API_KEY", *_FLAGS)


def is_set(name: str) -> bool:
    """Return whether a variable is set in the environment and has an effect here."""
    return name in _READ and name in os.environ


def __getattr__(name: str) -> object:
    if name == "VLLM_API_KEY":
        return os.environ.get(name)
    if name in _FLAGS:
        value = os.environ.get(name, "0")
        if value not in ("0", "1"):
            raise wrong_argument(ConfigError, name, "0 or 1", value)
        return value == "1"
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        f"{__name__} has no {name}: of vLLM's environment variables only "
        f"{', '.join(_READ)} are read. For other settings use arguments of LLM "
        "and EngineArgs, or flags of the server."
    )
