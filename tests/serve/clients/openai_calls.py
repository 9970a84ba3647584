"""Calls with openai's client for Python."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

import json
from typing import Any

from asked import ASKED, INSTRUCTED, KEY, TOOL, Place, main
from openai import OpenAI


def chats(url: str) -> Any:
    return OpenAI(base_url=url, api_key=KEY, max_retries=0).chat.completions


def text(url: str, messages: list[Any]) -> dict[str, Any]:
    answer = chats(url).create(model="model", messages=messages)
    return {"text": answer.choices[0].message.content}


def stream(url: str) -> dict[str, Any]:
    chunks = chats(url).create(model="model", messages=ASKED, stream=True)
    return {"text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks)}


def tools(url: str) -> dict[str, Any]:
    answer = chats(url).create(
        model="model", messages=ASKED, tools=[TOOL], tool_choice="required"
    )
    calls = [call.function for call in answer.choices[0].message.tool_calls]
    return {"calls": [[call.name, json.loads(call.arguments)] for call in calls]}


def structured(url: str) -> dict[str, Any]:
    answer = chats(url).parse(model="model", messages=ASKED, response_format=Place)
    return {"object": answer.choices[0].message.parsed.model_dump()}


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
