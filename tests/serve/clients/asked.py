"""Common inputs of the client scripts, and their output as a line of JSON.

To run one alone: `python tests/serve/clients/openai_calls.py URL chat`.
"""

# The scripts run in the clients' own environments.
# pyright: reportMissingImports=false

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

KEY = "secret"
QUESTION = "Is it warm in Oslo?"
ASKED = [{"role": "user", "content": QUESTION}]
INSTRUCTED = [{"role": "system", "content": "Be brief."}, *ASKED]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


class Place(BaseModel):
    """A city and its temperature."""

    city: str
    degrees: int


def main(
    text: Callable[[str, Any], Any],
    stream: Callable[[str], Iterable[str | None]],
    tools: Callable[[str], list[list[Any]]],
    structured: Callable[[str], Any],
) -> None:
    """Run the call that the command line names, and print its result as JSON."""
    url, call = sys.argv[1:]
    url += "/v1"
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "chat": lambda: {"text": text(url, ASKED)},
        "system": lambda: {"text": text(url, INSTRUCTED)},
        "stream": lambda: {"text": "".join(part or "" for part in stream(url))},
        "tools": lambda: {"calls": tools(url)},
        "structured": lambda: {"object": structured(url)},
    }
    print(json.dumps(calls[call]()))
