"""Owns the forms of a measured value, with vLLM's names and fields.

Names of metrics are those of vLLM, without the ending `_total` that Prometheus adds.
"""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Metric:
    """A name and the labels that tell its values apart."""

    name: str
    labels: dict[str, str]


@dataclass(kw_only=True)
class Counter(Metric):
    """A count since the engine started; it never falls."""

    value: int | float


@dataclass(kw_only=True)
class Vector(Metric):
    """Counts by position."""

    values: list[int]


@dataclass(kw_only=True)
class Gauge(Metric):
    """A value that rises and falls."""

    value: float


@dataclass(kw_only=True)
class Histogram(Metric):
    """How often a value was seen at all, and up to each bound.

    Attributes:
        sum: Of all values.
        buckets: By bound, "+Inf" the last: how many values were not above it.
    """

    count: int
    sum: float
    buckets: dict[str, int]
