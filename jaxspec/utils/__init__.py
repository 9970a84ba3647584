"""The functions of vLLM's `utils` that scripts for vLLM import."""

import uuid


def random_uuid() -> str:
    """Return a new id for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex
