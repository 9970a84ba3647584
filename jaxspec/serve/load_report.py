"""Owns the header that reports the engine's load to a proxy: ORCA's, as in vLLM.

A request asks for it with a header that names the format.
"""

import json
from collections.abc import Mapping

from jaxspec.engine.metrics import Load

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


def load_header(load: Load, form: str) -> Mapping[str, str]:
    """Return the header in the format "text" or "json"; none for any other."""
    values = {
        "kv_cache_usage_perc": float(load.kv_usage),
        "num_requests_waiting": float(load.num_waiting),
    }
    match form.lower():
        case "text":
            named = [f"named_metrics.{name}={one}" for name, one in values.items()]
            return {RESPONSE_HEADER: f"TEXT {', '.join(named)}"}
        case "json":
            return {RESPONSE_HEADER: f"JSON {json.dumps({'named_metrics': values})}"}
    return {}
