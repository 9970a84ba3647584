"""Owns the one error of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written: what was found, and what was expected."""
