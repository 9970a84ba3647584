"""Calls with llama-index."""

# This script runs in its own environment.
# pyright: reportMissingImports=false

from typing import Any

from asked import ASKED, INSTRUCTED, KEY, QUESTION, Place, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(url: str) -> Any:
    return OpenAILike(
        model="model",
        api_base=url,
        api_key=KEY,
        context_window=1024,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )


def said(messages: list[dict[str, str]]) -> list[Any]:
    return [ChatMessage(**message) for message in messages]


def weather(city: str) -> str:
    """Return the temperature."""
    return f"warm in {city}"


def tools(url: str) -> dict[str, Any]:
    tool, llm = FunctionTool.from_defaults(fn=weather), model(url)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    return {"calls": [[call.tool_name, call.tool_kwargs] for call in calls]}


def structured(url: str) -> dict[str, Any]:
    """Request a call of a function that has the name of the class."""
    answer = model(url).as_structured_llm(Place).chat(said(ASKED))
    return {"object": answer.raw.model_dump()}


if __name__ == "__main__":
    main(
        {
            "chat": lambda url: {"text": model(url).chat(said(ASKED)).message.content},
            "stream": lambda url: {
                "text": "".join(
                    part.delta or "" for part in model(url).stream_chat(said(ASKED))
                )
            },
            "system": lambda url: {
                "text": model(url).chat(said(INSTRUCTED)).message.content
            },
            "tools": tools,
            "structured": structured,
        }
    )
