"""Defines the error of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written: says what was found and expected."""
