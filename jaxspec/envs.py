"""Says of vLLM's environment variables that none has any effect here."""


def is_set(name: str) -> bool:
    """Return whether a variable of vLLM's is taken from the environment: none is."""
    return False


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        f"{__name__} has no {name}: environment variables are not read. What they set "
        "in vLLM is an argument of LLM and EngineArgs, or a flag of the server."
    )
