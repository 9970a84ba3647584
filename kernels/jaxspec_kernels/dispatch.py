"""Chooses the implementation of an operation from the platform it will run on.

Neither an implementation that the caller names nor that of the platform is ever
replaced by another one: an implementation raises an error for calls that it cannot run.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxspec_kernels import native

_log = logging.getLogger(__name__)

IMPLEMENTATIONS: tuple[str, ...] = ("reference", "cpu", "tpu", "gpu")

# Implementation by jax's name of the platform: GPUs are "gpu" if present, and "cuda" if
# programs are only compiled for them.
_OF_PLATFORM = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}


def implementation_for(platform: str) -> str:
    """Return the name of a platform's implementation.

    Args:
        platform: As in `device.platform`; for a program that is compiled for a mesh,
            the platform of the mesh's devices.

    Raises:
        NotImplementedError: There are no kernels for the platform.
    """
    if platform not in _OF_PLATFORM:
        raise NotImplementedError(
            f"no kernels for platform {platform!r}, only for "
            f"{', '.join(_OF_PLATFORM)}; implementation='reference' runs on every "
            "platform of XLA, but slowly"
        )
    implementation = _OF_PLATFORM[platform]
    if implementation == "cpu" and not native.is_available():
        return "reference"
    return implementation


@functools.cache
def _log_choice(operation: str, implementation: str) -> None:
    _log.info("%s: %s implementation", operation, implementation)


def resolve(operation: str, implementation: str | None) -> str:
    """Return the name of an implementation; None is that of jax's default backend.

    Raises:
        ValueError: `implementation` is not a name from `IMPLEMENTATIONS`.
        NotImplementedError: There are no kernels for the default backend.
    """
    if implementation is None:
        return implementation_for(jax.default_backend())
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} of {operation}: choose one of "
            f"{', '.join(IMPLEMENTATIONS)}, or None for that of the default backend"
        )
    return implementation


def choose(
    operation: str,
    available: Mapping[str, str],
    implementation: str | None,
    function: str | None = None,
) -> Callable[..., Any]:
    """Return the function that runs `operation`.

    The function has the operation's name, or the name `function`, and is in a module of
    the operation's folder. Only the chosen module is imported: importing Pallas is
    slow.

    Args:
        available: The module of each existing implementation; `reference` always
            exists, and is also the module of platforms that need no kernel.
        implementation: As in `resolve`.

    Raises:
        ValueError: `implementation` is not a name from `IMPLEMENTATIONS`.
        NotImplementedError: The operation has no such implementation.
    """
    implementation = resolve(operation, implementation)
    if implementation not in available:
        raise NotImplementedError(
            f"{operation} has no {implementation!r} implementation; "
            f"available: {', '.join(available)}"
        )
    name = available[implementation]
    _log_choice(operation, name)
    module = importlib.import_module(f"jaxspec_kernels.{operation}.{name}")
    return getattr(module, function or operation)
