"""Chooses the implementation of an operation, once per operation and platform.

A choice that the caller names is never replaced by another one.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "tpu", "gpu")


@functools.cache
def _log_choice(operation: str, implementation: str) -> None:
    _log.info("%s: %s implementation", operation, implementation)


def choose(
    operation: str,
    available: Mapping[str, Callable[..., Any]],
    implementation: str | None,
) -> Callable[..., Any]:
    """Return the function that runs `operation`.

    Args:
        available: The implementations that exist, by name; always has `reference`.
        implementation: A name from `IMPLEMENTATIONS`, or None for the best available.

    Raises:
        ValueError: `implementation` is not a name from `IMPLEMENTATIONS`.
        NotImplementedError: the named implementation does not exist for the operation.
    """
    if implementation is None:
        implementation = "reference"
    elif implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} of {operation}: choose one of "
            f"{', '.join(IMPLEMENTATIONS)}, or None for the best available"
        )
    if implementation not in available:
        raise NotImplementedError(
            f"{operation} has no {implementation!r} implementation yet; "
            f"available: {', '.join(available)}"
        )
    _log_choice(operation, implementation)
    return available[implementation]
