"""Owns the types of metrics, with vLLM's names and fields.

Names of metrics are those of vLLM, without the suffix `_total` that Prometheus adds.
"""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Metric:
    """A metric.

    Attributes:
        name: Begins with "vllm:" or "jaxspec:".
        labels: Labels by name, such as `model_name` and `engine`.
    """

    name: str
    labels: dict[str, str]


@dataclass(kw_only=True)
class Counter(Metric):
    """A count since the engine started; it never falls.

    Attributes:
        value: The count, or a sum of seconds.
    """

    value: int | float


@dataclass(kw_only=True)
class Vector(Metric):
    """Counts by position.

    Attributes:
        values: Entry i is the count of draft position i.
    """

    values: list[int]


@dataclass(kw_only=True)
class Gauge(Metric):
    """A value that rises and falls.

    Attributes:
        value: The current value.
    """

    value: float


@dataclass(kw_only=True)
class Histogram(Metric):
    """A histogram of observed values.

    Attributes:
        count: Number of values.
        sum: Sum of all values.
        buckets: By upper bound, the last of which is "+Inf": number of values that are
            not above it.
    """

    count: int
    sum: float
    buckets: dict[str, int]
