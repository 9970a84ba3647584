"""Calls with langchain-openai."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

from typing import Any

from asked import ASKED, INSTRUCTED, KEY, TOOL, Place, main
from langchain_openai import ChatOpenAI


def model(url: str) -> Any:
    return ChatOpenAI(base_url=url, api_key=KEY, model="model", max_retries=0)


def tools(url: str) -> dict[str, Any]:
    answer = model(url).bind_tools([TOOL], tool_choice="required").invoke(ASKED)
    return {"calls": [[call["name"], call["args"]] for call in answer.tool_calls]}


def structured(url: str) -> dict[str, Any]:
    found = model(url).with_structured_output(Place).invoke(ASKED)
    return {"object": found.model_dump()}


if __name__ == "__main__":
    main(
        {
            "chat": lambda url: {"text": model(url).invoke(ASKED).content},
            "stream": lambda url: {
                "text": "".join(part.content for part in model(url).stream(ASKED))
            },
            "system": lambda url: {"text": model(url).invoke(INSTRUCTED).content},
            "tools": tools,
            "structured": structured,
        }
    )
