"""Calls with instructor, a client for structured outputs."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

from typing import Any

import instructor
from asked import ASKED, INSTRUCTED, KEY, Place, main
from openai import OpenAI


def create(url: str, mode: Any, **given: Any) -> Any:
    made = OpenAI(base_url=url, api_key=KEY, max_retries=0)
    client = instructor.from_openai(made, mode=mode)
    asked = {"model": "model", "messages": ASKED, "max_retries": 1}
    return client.chat.completions.create(**asked | given)


def text(url: str, messages: list[Any]) -> dict[str, Any]:
    given = {"response_model": None, "messages": messages}
    answer = create(url, instructor.Mode.TOOLS, **given)
    return {"text": answer.choices[0].message.content}


def stream(url: str) -> dict[str, Any]:
    given = {"response_model": None, "stream": True}
    chunks = create(url, instructor.Mode.TOOLS, **given)
    return {"text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks)}


def tools(url: str) -> dict[str, Any]:
    """Call a function that has the name of the class."""
    found = create(url, instructor.Mode.TOOLS, response_model=Place)
    return {"calls": [["Place", found.model_dump()]]}


def structured(url: str) -> dict[str, Any]:
    found = create(url, instructor.Mode.JSON_SCHEMA, response_model=Place)
    return {"object": found.model_dump()}


if __name__ == "__main__":
    main(
        {
            "chat": lambda url: text(url, ASKED),
            "stream": stream,
            "system": lambda url: text(url, INSTRUCTED),
            "tools": tools,
            "structured": structured,
        }
    )
