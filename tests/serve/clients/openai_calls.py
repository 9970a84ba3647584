"""Calls with openai's client for Python."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

import json
from typing import Any

from asked import ASKED, KEY, TOOL, Place, main
from openai import OpenAI


def create(url: str, **given: Any) -> Any:
    client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
    asked: Any = {"model": "model", "messages": ASKED} | given
    chats = client.chat.completions
    return (chats.parse if "response_format" in given else chats.create)(**asked)


def text(url: str, messages: list[Any]) -> str:
    return create(url, messages=messages).choices[0].message.content


def stream(url: str) -> list[str | None]:
    return [chunk.choices[0].delta.content for chunk in create(url, stream=True)]


def tools(url: str) -> list[list[Any]]:
    answer = create(url, tools=[TOOL], tool_choice="required")
    calls = [call.function for call in answer.choices[0].message.tool_calls]
    return [[call.name, json.loads(call.arguments)] for call in calls]


def structured(url: str) -> Any:
    return create(url, response_format=Place).choices[0].message.parsed.model_dump()


if __name__ == "__main__":
    main(text, stream, tools, structured)
