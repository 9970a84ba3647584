"""The Gemma 2 pair that comes with the package, and heads for its target."""

from pathlib import Path

from jaxspec_checkpoints.heads import EAGLE3, MEDUSA

_TINY = Path(__file__).parent / "tiny"
# Kinds of the heads that are bundled.
BUNDLED_KINDS = (EAGLE3, MEDUSA)


def bundled_target() -> Path:
    """Folder of the bundled target model."""
    return _TINY / "target"


def bundled_draft() -> Path:
    """Folder of the bundled draft model."""
    return _TINY / "draft"


def bundled_head(kind: str) -> Path:
    """Folder of the bundled target's head of one of `BUNDLED_KINDS`."""
    assert kind in BUNDLED_KINDS, kind
    return _TINY / kind
