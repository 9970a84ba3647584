"""Owns `UsageContext`, which scripts for vLLM name when they make an engine."""

from enum import StrEnum


class UsageContext(StrEnum):
    """Who made an engine. vLLM reports it; nothing is reported from here."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def is_usage_stats_enabled() -> bool:
    """Return whether usage is reported: never."""
    return False
