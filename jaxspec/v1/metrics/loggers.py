"""Alias of `jaxspec.engine.stat_loggers`, at vLLM's import path."""

from jaxspec.engine.stat_loggers import (
    AggregatedLoggingStatLogger,
    LoggingStatLogger,
    PrometheusStatLogger,
)

__all__ = ["AggregatedLoggingStatLogger", "LoggingStatLogger", "PrometheusStatLogger"]
