"""Calls with litellm; ../litellm_calls.py tests its errors."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

import json
from typing import Any

import litellm
from asked import ASKED, KEY, TOOL, Place, main


def create(url: str, **given: Any) -> Any:
    access = {"api_base": url, "api_key": KEY, "max_retries": 0}
    asked = {"model": "openai/model", "messages": ASKED}
    return litellm.completion(**access, **asked | given)


def text(url: str, messages: list[Any]) -> str:
    return create(url, messages=messages).choices[0].message.content


def stream(url: str) -> list[str | None]:
    return [chunk.choices[0].delta.content for chunk in create(url, stream=True)]


def tools(url: str) -> list[list[Any]]:
    answer = create(url, tools=[TOOL], tool_choice="required")
    calls = [call.function for call in answer.choices[0].message.tool_calls]
    return [[call.name, json.loads(call.arguments)] for call in calls]


def structured(url: str) -> Any:
    answer = create(url, response_format=Place)
    return json.loads(answer.choices[0].message.content)


if __name__ == "__main__":
    main(text, stream, tools, structured)
