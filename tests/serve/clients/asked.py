"""What every client asks a server, and how it tells what came: in a line of JSON.

By hand: `python tests/serve/clients/openai_calls.py URL chat`.
"""

# In environments of the clients' own.
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
    """A city and how warm it is."""

    city: str
    degrees: int


def main(calls: dict[str, Callable[[str], Any]]) -> None:
    """Do what the command line says, and print what came."""
    url, call = sys.argv[1:]
    print(json.dumps(calls[call](f"{url}/v1")))
