"""Owns the header that tells a proxy how busy the engine is: ORCA's, as vLLM sends it.

A request asks for it with a header of its own, which names the form.
"""

import json
from collections.abc import Mapping

from jaxspec.engine.metrics import Load

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"


def load_header(load: Load, form: str) -> Mapping[str, str]:
    """Return the header in a form: "text" or "json"; none in any other."""
    values = {
        "kv_cache_usage_perc": float(load.kv_usage),
        "num_requests_waiting": float(load.num_waiting),
    }
    match form.lower():
        case "text":
            named = [f"named_metrics.{name}={one}" for name, one in values.items()]
            return {TOLD: f"TEXT {', '.join(named)}"}
        case "json":
            return {TOLD: f"JSON {json.dumps({'named_metrics': values})}"}
    return {}
