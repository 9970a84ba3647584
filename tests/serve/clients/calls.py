"""Calls of clients in Python, each in its own environment; prints results as JSON.

To run one alone: `python tests/serve/clients/calls.py openai URL chat`.
"""

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

from pydantic import BaseModel

KEY = "secret"
QUESTION = "Is it warm in Oslo?"
MESSAGES = [{"role": "user", "content": QUESTION}]
INSTRUCTED = [{"role": "system", "content": "Be brief."}, *MESSAGES]
ASKED: dict[str, Any] = {"model": "model", "messages": MESSAGES}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


class Place(BaseModel):
    """A city and its temperature."""

    city: str
    degrees: int


class OpenAI:
    """openai's client; the others have the same methods."""

    def __init__(self, url: str):
        access: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": KEY}
        self.client = import_module("openai").OpenAI(max_retries=0, **access)

    def create(self, **given: Any) -> Any:
        return self.client.chat.completions.create(**ASKED | given)

    def text(self, messages: list[Any]) -> str:
        return self.create(messages=messages).choices[0].message.content

    def stream(self) -> list[str | None]:
        chunks = self.create(stream=True)
        return [chunk.choices[0].delta.content for chunk in chunks]

    def tools(self) -> list[list[Any]]:
        answer = self.create(tools=[TOOL], tool_choice="required")
        calls = [call.function for call in answer.choices[0].message.tool_calls]
        return [[call.name, json.loads(call.arguments)] for call in calls]

    def structured(self) -> Any:
        answer = self.client.chat.completions.parse(**ASKED, response_format=Place)
        return answer.choices[0].message.parsed.model_dump()


class Instructor(OpenAI):
    """Instructor, which calls a function that has the name of the class."""

    def create(self, mode: str = "TOOLS", **given: Any) -> Any:
        instructor: Any = import_module("instructor")
        client = instructor.from_openai(self.client, mode=instructor.Mode[mode])
        asked = ASKED | {"max_retries": 1, "response_model": None}
        return client.chat.completions.create(**asked | given)

    def tools(self) -> list[list[Any]]:
        return [["Place", self.create(response_model=Place).model_dump()]]

    def structured(self) -> Any:
        return self.create("JSON_SCHEMA", response_model=Place).model_dump()


class LiteLLM(OpenAI):
    """litellm, whose answers have the classes of openai's client."""

    def __init__(self, url: str):
        self.client = import_module("litellm")
        self.access: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": KEY}
        self.access["max_retries"] = 0
        self.chat = self.access | ASKED | {"model": "openai/model"}

    def create(self, **given: Any) -> Any:
        return self.client.completion(**self.chat | given)

    def structured(self) -> Any:
        answer = self.create(response_format=Place)
        return json.loads(answer.choices[0].message.content)

    def more(self) -> dict[str, Any]:
        """Send chats and a completion with a short prompt, and two with errors."""
        prompt, short = "$%&", {"max_tokens": 9}
        self.chat |= short | {"messages": [{"role": "user", "content": prompt}]}
        text = {"model": "text-completion-openai/model", "prompt": prompt}
        whole = self.create()
        later = asyncio.run(self.client.acompletion(**self.chat))
        completion = self.client.text_completion(**self.access | text | short)
        return {
            "whole": whole.choices[0].message.content,
            "asynchronous": later.choices[0].message.content,
            "streamed": "".join(part or "" for part in self.stream()),
            "completion": completion.choices[0].text,
            "reason": whole.choices[0].finish_reason,
            "tokens": whole.usage.completion_tokens,
            "too_long": self.error_of(max_tokens=10**6),
            "stranger": self.error_of(api_key="wrong"),
        }

    def error_of(self, **given: Any) -> str:
        """Return the name of the exception that litellm raises for the call."""
        errors = self.client.exceptions
        try:
            self.create(**given)
        except (errors.APIError, errors.BadRequestError, errors.AuthenticationError):
            return type(sys.exception()).__name__
        return "none"


class Anthropic:
    def __init__(self, url: str):
        kind = import_module("anthropic").Anthropic
        self.client = kind(base_url=url, api_key=KEY, max_retries=0)

    def more(self) -> dict[str, Any]:
        """Send messages: whole, streamed, with a tool, counted, one with an error."""
        messages = self.client.messages
        asked = ASKED | {"max_tokens": 200}
        whole = messages.create(**asked)
        with messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
            assert stream.get_final_message().stop_reason == whole.stop_reason
        choice = {"tools": [{"name": "weather", "input_schema": CITY}]}
        choice |= {"tool_choice": {"type": "any"}}
        with messages.stream(**asked, **choice) as stream:
            called = stream.get_final_message().content
        try:
            messages.create(**ASKED, max_tokens=0)
            refused = "none"
        except import_module("anthropic").APIError as error:
            refused = type(error).__name__
        return {
            "whole": whole.content[0].text,
            "reason": whole.stop_reason,
            "streamed": streamed,
            "counted": messages.count_tokens(**ASKED).input_tokens,
            "called": [(block.name, block.input) for block in called],
            "refused": refused,
        }


class LangChain:
    def __init__(self, url: str):
        access: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": KEY}
        kind = import_module("langchain_openai").ChatOpenAI
        self.model = kind(model="model", max_retries=0, **access)

    def text(self, messages: list[Any]) -> str:
        return self.model.invoke(messages).content

    def stream(self) -> list[str | None]:
        return [part.content for part in self.model.stream(MESSAGES)]

    def tools(self) -> list[list[Any]]:
        bound = self.model.bind_tools([TOOL], tool_choice="required")
        calls = bound.invoke(MESSAGES).tool_calls
        return [[call["name"], call["args"]] for call in calls]

    def structured(self) -> Any:
        return self.model.with_structured_output(Place).invoke(MESSAGES).model_dump()


def weather(city: str) -> str:
    """Return the temperature."""
    return f"warm in {city}"


class LlamaIndex:
    def __init__(self, url: str):
        able = {"is_chat_model": True, "is_function_calling_model": True}
        access = {"api_base": f"{url}/v1", "api_key": KEY, "max_retries": 0}
        kind = import_module("llama_index.llms.openai_like").OpenAILike
        self.model = kind(model="model", context_window=1024, **access, **able)

    def said(self, messages: list[dict[str, str]]) -> list[Any]:
        kind = import_module("llama_index.core.llms").ChatMessage
        return [kind(**message) for message in messages]

    def text(self, messages: list[Any]) -> str:
        return self.model.chat(self.said(messages)).message.content

    def stream(self) -> list[str | None]:
        return [part.delta for part in self.model.stream_chat(self.said(MESSAGES))]

    def tools(self) -> list[list[Any]]:
        kind: Any = import_module("llama_index.core.tools").FunctionTool
        tool = kind.from_defaults(fn=weather)
        asked = {"user_msg": QUESTION, "tool_required": True}
        answer = self.model.chat_with_tools([tool], **asked)
        calls = self.model.get_tool_calls_from_response(answer)
        return [[call.tool_name, call.tool_kwargs] for call in calls]

    def structured(self) -> Any:
        """Request a call of a function that has the name of the class."""
        model = self.model.as_structured_llm(Place)
        return model.chat(self.said(MESSAGES)).raw.model_dump()


CLIENTS = {
    "openai": OpenAI,
    "langchain": LangChain,
    "llama-index": LlamaIndex,
    "instructor": Instructor,
    "litellm": LiteLLM,
    "anthropic": Anthropic,
}


def main(name: str, url: str, call: str) -> None:
    client: Any = CLIENTS[name](url)
    calls: dict[str, Any] = {
        "chat": lambda: {"text": client.text(MESSAGES)},
        "system": lambda: {"text": client.text(INSTRUCTED)},
        "stream": lambda: {"text": "".join(part or "" for part in client.stream())},
        "tools": lambda: {"calls": client.tools()},
        "structured": lambda: {"object": client.structured()},
        "more": lambda: client.more(),
    }
    print(json.dumps(calls[call]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
