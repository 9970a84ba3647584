"""Puts the bundled models at the names of other models, as folders."""

import os
from pathlib import Path

# Made by the runner: the bundled pair, with a chat template.
MODELS = Path(os.environ["STAND_IN_MODELS"])


def prepare(name: str, is_draft: bool = False) -> str:
    """Let a model's name be a folder, relative to the working directory."""
    path = Path(name)
    if not path.is_absolute() and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(MODELS / ("draft" if is_draft else "target"))
    return name
