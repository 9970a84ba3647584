"""Defines the error of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message says what was expected."""
