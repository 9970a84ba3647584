"""vLLM's loggers of statistics, as values of `stat_loggers`.

An engine logs its statistics itself, unless `disable_log_stats` is set, and a server
has `/metrics`: the classes choose nothing.
"""

from collections.abc import Sequence

from jaxspec.errors import UnsupportedError


class LoggingStatLogger:
    """Logs the statistics of one engine."""


class AggregatedLoggingStatLogger(LoggingStatLogger):
    """Logs the statistics of all engines of a process."""


class PrometheusStatLogger:
    """Keeps the statistics that `get_metrics` and `/metrics` return."""


def check_stat_loggers(given: Sequence[type] | None) -> None:
    """Check that an engine does what the loggers would do.

    Raises:
        UnsupportedError: A logger is the caller's own.
    """
    for logger in given or ():
        if logger not in (
            LoggingStatLogger,
            AggregatedLoggingStatLogger,
            PrometheusStatLogger,
        ):
            raise UnsupportedError(
                f"stat_loggers has {logger!r}: custom loggers are not supported. Read "
                "get_metrics() or a server's /metrics instead.",
                parameter="stat_loggers",
                value=logger,
            )
