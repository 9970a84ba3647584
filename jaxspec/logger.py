"""Owns `init_logger`, vLLM's function for making loggers."""

import logging
from typing import Any


class OnceLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that can log a message only once, like vLLM's."""

    def __init__(self, logger: logging.Logger):
        super().__init__(logger)
        self._logged: set[tuple[int, str, tuple[Any, ...]]] = set()

    def debug_once(self, message: str, *values: Any) -> None:
        self._log_once(logging.DEBUG, message, values)

    def info_once(self, message: str, *values: Any) -> None:
        self._log_once(logging.INFO, message, values)

    def warning_once(self, message: str, *values: Any) -> None:
        self._log_once(logging.WARNING, message, values)

    def _log_once(self, level: int, message: str, values: tuple[Any, ...]) -> None:
        key = level, message, tuple(map(str, values))
        if key not in self._logged:
            self._logged.add(key)
            self.log(level, message, *values)


def init_logger(name: str) -> OnceLogger:
    """Return the logger with a name; `logging` is not configured."""
    return OnceLogger(logging.getLogger(name))
