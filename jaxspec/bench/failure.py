"""Owns the error of a benchmark that has no result."""


class BenchError(Exception):
    """What was measured means nothing, or a server does not answer."""
