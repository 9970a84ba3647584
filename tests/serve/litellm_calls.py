"""Requests of the litellm test; prints the results as JSON.

To run it alone: `python tests/serve/litellm_calls.py URL MODEL`.
"""

# Runs in its own environment: see client_requirements.txt.
# pyright: reportMissingImports=false

import asyncio
import json
import sys
from typing import Any

import litellm

PROMPT = "$%&"


def ask(url: str, model: str) -> dict[str, Any]:
    """Send chats and completions: whole, streamed, asynchronous, two with errors."""
    access: Any = {"api_base": f"{url}/v1", "api_key": "secret", "max_retries": 0}
    access["max_tokens"] = 9
    chat = access | {"model": f"openai/{model}"}
    chat["messages"] = [{"role": "user", "content": PROMPT}]
    text = access | {"model": f"text-completion-openai/{model}", "prompt": PROMPT}
    whole = litellm.completion(**chat)
    chunks = list(litellm.completion(stream=True, **chat))
    later = asyncio.run(litellm.acompletion(**chat))
    return {
        "whole": whole.choices[0].message.content,
        "reason": whole.choices[0].finish_reason,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "asynchronous": later.choices[0].message.content,
        "completion": litellm.text_completion(**text).choices[0].text,
        "too_long": error_of(chat | {"max_tokens": 10**6}),
        "stranger": error_of(chat | {"api_key": "wrong"}),
    }


def error_of(chat: dict[str, Any]) -> str:
    """Return the name of the exception that litellm raises for the call."""
    try:
        litellm.completion(**chat)
    except (
        litellm.exceptions.APIError,
        litellm.BadRequestError,
        litellm.AuthenticationError,
    ) as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    print(json.dumps(ask(*sys.argv[1:])))
