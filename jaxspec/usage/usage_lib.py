"""Owns `UsageContext`, which scripts for vLLM pass when they create an engine."""

from enum import StrEnum


class UsageContext(StrEnum):
    """What created an engine, for vLLM's usage reports; jaxspec sends none."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """Return whether usage is reported: never."""
    return False
