"""What scripts for vLLM import from a module of this name, and nothing else."""

import uuid


def random_uuid() -> str:
    """Return a new id for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex
