"""Invalid settings of the server are rejected."""

from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.serve.settings import ServerSettings


@pytest.mark.parametrize(
    "given",
    [
        {"served_model_names": ()},
        {"served_model_names": ("",)},
        {"api_keys": ("",)},
        {"api_keys": ("good", "")},
        {"allowed_origins": "http://page"},
        {"enable_request_id_headers": 1},
        {"per_request_spec_decode_metrics": "all"},
        {"max_body_bytes": 0},
        {"timeout_read_body": 0},
        {"timeout_read_body": float("inf")},
        {"max_num_queued_reqs": -1},
        {"max_num_queued_tokens": 1.5},
        {"max_request_s": 0},
        {"enable_auto_tool_choice": 1},
        {"tool_call_parser": "hermes"},
        {"tool_parser_plugin": "nowhere.py"},
    ],
)
def test_rejects_invalid_setting(given: dict[str, Any]):
    (name,) = given
    with pytest.raises(ConfigError, match=name.removesuffix("s")):
        ServerSettings(**given)
