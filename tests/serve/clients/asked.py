"""Common inputs of the client scripts, and their output as a line of JSON.

To run one alone: `python tests/serve/clients/openai_calls.py URL chat`.
"""

# The scripts run in the clients' own environments.
# pyright: reportMissingImports=false

import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

KEY = "secret"
QUESTION = "Is it warm in Oslo?"
SYSTEM = "Be brief."
ASKED = [{"role": "user", "content": QUESTION}]
INSTRUCTED = [{"role": "system", "content": SYSTEM}, *ASKED]
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


def main(calls: dict[str, Callable[[str], Any]]) -> None:
    """Run the call that the command line names, and print its result as JSON."""
    url, call = sys.argv[1:]
    print(json.dumps(calls[call](f"{url}/v1")))
