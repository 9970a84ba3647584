"""Calls with instructor, a client for structured outputs."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

from typing import Any

import instructor
from asked import ASKED, KEY, Place, main
from openai import OpenAI


def create(url: str, mode: Any = instructor.Mode.TOOLS, **given: Any) -> Any:
    made = OpenAI(base_url=url, api_key=KEY, max_retries=0)
    client = instructor.from_openai(made, mode=mode)
    asked = {"model": "model", "messages": ASKED, "max_retries": 1}
    return client.chat.completions.create(**asked | {"response_model": None} | given)


def text(url: str, messages: list[Any]) -> str:
    return create(url, messages=messages).choices[0].message.content


def stream(url: str) -> list[str | None]:
    return [chunk.choices[0].delta.content for chunk in create(url, stream=True)]


def tools(url: str) -> list[list[Any]]:
    """Call a function that has the name of the class."""
    return [["Place", create(url, response_model=Place).model_dump()]]


def structured(url: str) -> Any:
    mode = instructor.Mode.JSON_SCHEMA
    return create(url, mode, response_model=Place).model_dump()


if __name__ == "__main__":
    main(text, stream, tools, structured)
