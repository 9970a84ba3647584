"""Owns `--plot`: what can be wrong with it, found before anything runs.

matplotlib is behind it and comes with an extra, so it is imported only for a picture
that was asked for.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from jaxspec.bench.report import check_writable
from jaxspec.errors import ConfigError, wrong_argument

SUFFIXES = (".pdf", ".png", ".svg")
FLAG = "--plot"
_PICTURE = "jaxspec.bench.figures.picture"


def check_plot(path: Path | None) -> None:
    """Find out before an hour of measuring that nothing can be drawn.

    Raises:
        ConfigError: The suffix names no form of picture, the folder is not there, or
            matplotlib is not.
    """
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        allowed = f"a file that ends in one of {', '.join(SUFFIXES)}"
        raise wrong_argument(ConfigError, FLAG, allowed, str(path))
    check_writable(path, FLAG)
    try:
        importlib.import_module(_PICTURE)
    except ImportError as error:
        raise ConfigError(
            f"{FLAG} needs the extra 'bench', which is not installed ({error}): run "
            'pip install -e ".[bench]" in the checkout, or leave the flag out.',
            parameter=FLAG,
            value=str(path),
        ) from error


def plot(result: Any, path: Path | None) -> None:
    """Draw a result into a file that `check_plot` has let pass.

    Args:
        result: What a subcommand writes as JSON; of `serve`, a list with every load.
    """
    if path is None:
        return
    picture = importlib.import_module(_PICTURE)
    picture.save(picture.picture(result), path)
    # The last line on stdout is the result.
    print(f"Drawn: {path}", file=sys.stderr)
