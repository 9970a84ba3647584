"""Calls with langchain-openai."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

from typing import Any

from asked import ASKED, KEY, TOOL, Place, main
from langchain_openai import ChatOpenAI


def model(url: str) -> Any:
    return ChatOpenAI(base_url=url, api_key=KEY, model="model", max_retries=0)


def text(url: str, messages: list[Any]) -> str:
    return model(url).invoke(messages).content


def stream(url: str) -> list[str | None]:
    return [part.content for part in model(url).stream(ASKED)]


def tools(url: str) -> list[list[Any]]:
    answer = model(url).bind_tools([TOOL], tool_choice="required").invoke(ASKED)
    return [[call["name"], call["args"]] for call in answer.tool_calls]


def structured(url: str) -> Any:
    return model(url).with_structured_output(Place).invoke(ASKED).model_dump()


if __name__ == "__main__":
    main(text, stream, tools, structured)
