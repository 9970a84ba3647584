"""A grammar makes the bundled pair call tools; drafts follow the grammar as well."""

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

import jaxspec.engine.loader
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.llm import LLM
from jaxspec.serve.app import make_app
from jaxspec.serve.settings import ServerSettings
from tests.support.engines import QuickGreedyRunner
from tests.support.serving import client_of

CITY = {
    "type": "object",
    "$defs": {"city": {"enum": ["Rom", "Oslo", "São Paulo"]}},
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "is_rough": {"type": "boolean"},
    },
    "required": ["city", "days", "is_rough"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "string", "pattern": "^UTC[+-][0-9]{1,2}$"}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": CITY, "time": ZONE}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES = [{"role": "user", "content": "How warm will it be in Oslo?"}]
# Each case is (tool_choice, parallel_tool_calls).
CHOICES: list[tuple[Any, bool]] = [("required", False), ("required", True)]
CHOICES += [
    ({"type": "function", "function": {"name": name}}, True) for name in SCHEMAS
]


async def ask(client: openai.AsyncOpenAI) -> list[tuple[Any, Any]]:
    """Request each answer whole and as a stream; all requests are concurrent."""

    async def one(choice: Any, is_parallel: bool, **more: Any) -> Any:
        create: Any = client.chat.completions.create
        answer = await create(
            model="model",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=is_parallel,
            temperature=0,
            max_tokens=130,
            extra_body={"include_metrics": True},
            **more,
        )
        return [chunk async for chunk in answer] if more else answer

    return await asyncio.gather(
        *(asyncio.gather(one(*choice), one(*choice, stream=True)) for choice in CHOICES)
    )


@pytest.mark.slow
def test_forced_tool_calls_match_the_schema(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxspec.engine.loader, "Runner", QuickGreedyRunner)
    llm = LLM(
        "jaxspec/tiny-gemma2",
        speculative_model="jaxspec/tiny-gemma2-draft",
        num_speculative_tokens=3,
        speculative_config={"controller": "fixed"},
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_logprobs=1,
        dtype="float32",
    )
    assert isinstance(llm.llm_engine, LLMEngine)
    engine = AsyncLLMEngine(llm.llm_engine)

    async def run() -> Any:
        app = make_app(engine, ServerSettings())
        url = "http://server"
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=url) as http:
            return await ask(client_of(http).with_options(timeout=300))

    try:
        found = asyncio.run(run())
    finally:
        engine.shutdown(10)
    accepted = 0
    for (choice, is_parallel), answers in zip(CHOICES, found, strict=True):
        whole, chunks = answers
        calls = calls_of(whole)
        assert calls == calls_in(chunks)
        (one,) = whole.choices
        is_whole = one.finish_reason != "length"
        for name, arguments in calls if is_whole else calls[:-1]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if choice == "required":
            assert one.finish_reason == "tool_calls" or is_parallel
        else:
            assert [name for name, _ in calls] == [choice["function"]["name"]]
            assert one.finish_reason == "stop"
        assert len(calls) == 1 or (is_parallel and calls)
        assert one.message.content is None
        drafts = whole.metrics["speculative_decoding"]
        accepted += drafts["num_accepted_draft_tokens"]
    assert accepted > 0


def calls_of(answer: Any) -> list[tuple[str, str]]:
    calls = answer.choices[0].message.tool_calls
    return [(one.function.name, one.function.arguments) for one in calls]


def calls_in(chunks: list[Any]) -> list[tuple[str, str]]:
    """Assemble tool calls from the deltas of a stream."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for choice in (one for chunk in chunks for one in chunk.choices):
        for call in choice.delta.tool_calls or ():
            if call.function.name is not None:
                names[call.index] = call.function.name
            joined = arguments.get(call.index, "") + call.function.arguments
            arguments[call.index] = joined
    return [(names[index], arguments[index]) for index in sorted(names)]
