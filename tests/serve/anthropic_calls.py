"""Requests of the anthropic test; prints the results as JSON.

To run it alone: `python tests/serve/anthropic_calls.py URL MODEL`.
"""

# Runs in its own environment: see client_requirements.txt.
# pyright: reportMissingImports=false

import json
import sys
from typing import Any

import anthropic

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def ask(url: str, model: str) -> dict[str, Any]:
    """Send messages: whole, streamed, with a tool, counted, one with an error."""
    client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
    asked = {"model": model, "messages": [{"role": "user", "content": "Warm in Rom?"}]}
    create = client.messages.create
    whole = create(max_tokens=200, **asked)
    with client.messages.stream(max_tokens=200, **asked) as stream:
        streamed = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == whole.stop_reason
    choice = {"tools": [{"name": "weather", "input_schema": SCHEMA}]}
    choice |= {"tool_choice": {"type": "any"}}
    with client.messages.stream(max_tokens=200, **asked, **choice) as stream:
        called = stream.get_final_message().content
    try:
        create(max_tokens=0, **asked)
        refused = "none"
    except anthropic.APIError as error:
        refused = type(error).__name__
    return {
        "whole": whole.content[0].text,
        "reason": whole.stop_reason,
        "streamed": streamed,
        "counted": client.messages.count_tokens(**asked).input_tokens,
        "called": [(block.name, block.input) for block in called],
        "refused": refused,
    }


if __name__ == "__main__":
    print(json.dumps(ask(*sys.argv[1:])))
