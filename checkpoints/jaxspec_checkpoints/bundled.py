"""The Gemma 2 pair that comes with the package."""

from pathlib import Path

_TINY = Path(__file__).parent / "tiny"


def bundled_target() -> Path:
    """Folder of the bundled target model."""
    return _TINY / "target"


def bundled_draft() -> Path:
    """Folder of the bundled draft model."""
    return _TINY / "draft"
