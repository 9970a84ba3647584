"""Alias of `jaxspec.metrics`, at vLLM's import path for the types of metrics."""

from jaxspec.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
