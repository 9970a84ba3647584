"""Chats with tools, and a server whose model generates scripted texts."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.fake_device import FakeRunner, extend
from tests.support.fake_engines import assert_idle
from tests.support.loops import MODEL, make_config
from tests.support.serving import Client, Site, openai_of

TOKENIZER = Tokenizer.from_folder(bundled_target())
MESSAGES = [{"role": "user", "content": "Is it warm in Rom?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", CITY), tool("time")]
NAMED = {"type": "function", "function": {"name": "weather"}}
ROME = {"name": "weather", "parameters": {"city": 'Rom "Est" é'}}
OSLO = {"name": "weather", "parameters": {"city": "Oslo"}}
NOW = {"name": "time", "parameters": {}}
AUTO = {"enable_auto_tool_choice": True}


def said(*calls: dict[str, Any]) -> str:
    return json.dumps(list(calls), ensure_ascii=False)


class Script:
    """Generates a given text after any prompt, then ends it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # Index of the next token of the scripted text, by the hash of the tokens before
        # it.
        self._said: dict[int, int] = {}

    def say(self, text: str) -> int:
        """Set the text to generate; return its number of tokens, with the end token."""
        self._tokens = [*TOKENIZER.encode(text, False), TOKENIZER.eos_token_id]
        self._said.clear()
        return len(self._tokens)

    def __call__(self, seed: tuple[int, int], position: int, prefix: int) -> int:
        at = self._said.get(prefix, 0)
        token = self._tokens[at]
        self._said[extend(prefix, token)] = min(at + 1, len(self._tokens) - 1)
        return token


class Stage(Site):
    """A server whose model generates scripted texts, with OpenAI's client for it."""

    def __init__(self, **settings: Any) -> None:
        longest = dict(vocab_size=TOKENIZER.vocab_size, max_position_embeddings=1024)
        model = dataclasses.replace(MODEL, **longest)
        models = dict(model_config=model, draft_model_config=model)
        config = make_config(**models, max_model_len=1024, page_size=16, num_pages=256)
        self.script = Script()
        runner = FakeRunner(config, self.script)
        engine = LLMEngine(config, runner=runner, tokenizer=TOKENIZER)
        self.engine = AsyncLLMEngine(engine)
        self.delay_s, self._port = 0.0, 0
        self.start(**settings)
        self.http = Client(self)
        self.chats: Any = openai_of(self.http).chat.completions
        self.responses: Any = openai_of(self.http).responses

    def end(self) -> None:
        self.http.close()
        self.stop()
        self.engine.shutdown(10)
        assert_idle(self.engine.engine)

    @contextlib.contextmanager
    def restarted(self, **settings: Any) -> Iterator[None]:
        """Run the server with further settings."""
        self.stop()
        self.start(**AUTO, **settings)
        yield
        self.stop()
        self.start(**AUTO)
