"""Calls with llama-index."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

from typing import Any

from asked import ASKED, KEY, QUESTION, Place, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(url: str) -> Any:
    is_able = {"is_chat_model": True, "is_function_calling_model": True}
    access = {"api_base": url, "api_key": KEY, "max_retries": 0}
    return OpenAILike(model="model", context_window=1024, **access, **is_able)


def said(messages: list[dict[str, str]]) -> list[Any]:
    return [ChatMessage(**message) for message in messages]


def text(url: str, messages: list[Any]) -> str:
    return model(url).chat(said(messages)).message.content


def stream(url: str) -> list[str | None]:
    return [part.delta for part in model(url).stream_chat(said(ASKED))]


def weather(city: str) -> str:
    """Return the temperature."""
    return f"warm in {city}"


def tools(url: str) -> list[list[Any]]:
    tool, llm = FunctionTool.from_defaults(fn=weather), model(url)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    return [[call.tool_name, call.tool_kwargs] for call in calls]


def structured(url: str) -> Any:
    """Request a call of a function that has the name of the class."""
    return model(url).as_structured_llm(Place).chat(said(ASKED)).raw.model_dump()


if __name__ == "__main__":
    main(text, stream, tools, structured)
