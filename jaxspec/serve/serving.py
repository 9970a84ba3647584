"""Owns what all endpoints share: the engine, the settings, who may come in."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator
from typing import Any, no_type_check

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.errors import EngineDeadError
from jaxspec.inputs import TokensPrompt
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.admission import Admission
from jaxspec.serve.errors import ModelNotFoundError, TimeLimitError
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.response_store import Background, ResponseStore
from jaxspec.serve.settings import ServerSettings
from jaxspec.serve.streaming import merge


class Serving:
    """The engine as endpoints use it."""

    def __init__(self, engine: AsyncLLMEngine, settings: ServerSettings):
        self.engine, self.settings = engine, settings
        # Neither changes while the engine's thread runs.
        self.config, self.tokenizer = engine.engine.config, engine.engine.tokenizer
        self.prompts = Prompts(self.config, self.tokenizer, settings)
        self.admission = Admission(settings, self.config.max_num_seqs)
        self.responses = ResponseStore(
            settings.response_store, settings.max_response_store_bytes
        )
        self.background = Background()
        # Clients choose ids of requests, and may choose one twice.
        self._number = itertools.count()

    def check_model(self, name: str | None) -> None:
        """Check that a request is for the model there is; None is.

        Raises:
            ModelNotFoundError: It is for another.
        """
        if name is not None and name not in self.settings.served_model_names:
            raise ModelNotFoundError(f"The model `{name}` does not exist.")

    def check_alive(self) -> None:
        """Check that the engine has not ended.

        Raises:
            EngineDeadError: It has.
        """
        if self.engine.errored or not self.engine.is_running:
            raise EngineDeadError

    @no_type_check  # asynchronous generators are not checked
    async def outputs(
        self,
        request_id: str,
        prompts: list[TokensPrompt],
        params: SamplingParams,
        priority: int,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Continue prompts, and yield what comes of each with its number.

        Leaving early aborts all of it.

        Raises:
            OverloadedError: Too many requests wait already.
            TimeLimitError: It took too long.
        """
        ids = [f"{request_id}-{next(self._number)}" for _ in prompts]
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        limit_s = self.settings.max_request_s
        with self.admission.admit(ids, lengths, params.n):
            streams = [
                self.engine.generate(prompt, params, one, priority=priority)
                for prompt, one in zip(prompts, ids, strict=True)
            ]
            async with contextlib.aclosing(merge(streams)) as merged:
                if limit_s is not None:
                    merged = _limited(merged, limit_s)
                async for numbered in merged:
                    yield numbered


@no_type_check  # asynchronous generators are not checked
async def _limited(
    outputs: AsyncGenerator[Any, None], limit_s: float
) -> AsyncGenerator[Any, None]:
    end = asyncio.get_running_loop().time() + limit_s
    while True:
        try:
            async with asyncio.timeout_at(end):
                output = await anext(outputs, None)
        except TimeoutError as error:
            raise TimeLimitError(
                f"The request took longer than {limit_s:g} s, the most that this "
                "server allows (--max-request-s)."
            ) from error
        if output is None:
            return
        yield output


def new_id() -> str:
    """Return an id that no other request has."""
    return uuid.uuid4().hex
