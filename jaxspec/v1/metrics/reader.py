"""Alias of `jaxspec.metrics`, where vLLM has the forms of its metrics."""

from jaxspec.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
