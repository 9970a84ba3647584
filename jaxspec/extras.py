"""Owns the error for a package that is missing because its extra is not installed.

The extras are in `pyproject.toml`. Their packages are imported when they are needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from jaxspec.errors import ConfigError

# Packages that are always installed: an import that fails in them is a bug.
_OURS = ("jaxspec", "jaxspec_checkpoints", "jaxspec_kernels")
# Packages that the server imports.
SERVE_PACKAGES = (
    "fastapi",
    "h11",
    "httpx",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "yaml",
)


class MissingExtraError(ConfigError, ImportError):
    """A feature needs packages of an extra that is not installed."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra to the installed version.

    pip finds jaxspec-decoding installed, also from a checkout, and installs only what
    the extra adds.
    """
    return f'pip install "jaxspec-decoding[{extra}]"'


@contextmanager
def needs_extra(
    extra: str,
    feature: str,
    *,
    hint: str = "",
    parameter: str | None = None,
    value: object = None,
) -> Iterator[None]:
    """Import packages of an extra within this context.

    Args:
        extra: Name of the extra.
        feature: What needs it, as the subject of the error.
        hint: Sentence after the command that installs the extra.
        parameter: Argument that asks for the feature, if it is one.
        value: Its value.

    Raises:
        MissingExtraError: A package cannot be imported.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        raise MissingExtraError(
            f"{feature} needs the extra `{extra}`, which is not installed ({error}). "
            f"Run: {install_command(extra)}{hint and '. ' + hint}",
            parameter=parameter,
            value=value,
        ) from error


def require_packages(extra: str, feature: str, packages: Sequence[str]) -> None:
    """Check that all packages of an extra are installed, without importing them.

    Raises:
        MissingExtraError: One is not.
    """
    missing = [name for name in packages if find_spec(name) is None]
    with needs_extra(extra, feature):
        if missing:
            raise ModuleNotFoundError(f"missing: {', '.join(missing)}")
