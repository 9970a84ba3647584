"""The timings and draft counts of a request, at vLLM's import path."""

from jaxspec.outputs import RequestSpecDecodeMetrics, RequestStateStats

__all__ = ["RequestSpecDecodeMetrics", "RequestStateStats"]
