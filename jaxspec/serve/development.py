"""Owns the development endpoints, which are vLLM's, off by default.

They need no API key: any client that reaches them can stop the model.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

import jaxspec
from jaxspec import envs
from jaxspec.errors import ArgumentError
from jaxspec.serve.serving import Serving

# Packages whose versions /server_info returns.
PACKAGES = ("jax", "jaxlib", "numpy")


@contextlib.contextmanager
def _errors_of_query() -> Iterator[None]:
    """Name the query in argument errors, as `query.level`, as vLLM does."""
    try:
        yield
    except ArgumentError as error:
        error.parameter = error.parameter and f"query.{error.parameter}"
        raise


def development_routes(serving: Serving) -> APIRouter:
    """Make the endpoints if they are enabled."""
    router, engine = APIRouter(), serving.engine
    if not serving.settings.server_dev_mode:
        return router

    @router.post("/sleep")
    async def sleep(level: int = 1, mode: str = "abort") -> dict[str, Any]:
        """Free the devices' memory; new requests wait until /wake_up."""
        with _errors_of_query():
            await engine.sleep(level, mode)
        return {"status": "sleeping", "level": level}

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[list[str] | None, Query()] = None,
    ) -> dict[str, Any]:
        """Restore the memory that /sleep freed; `tags` selects weights or kv_cache."""
        with _errors_of_query():
            is_awake = await engine.wake_up(tags or None)
        return {"status": "awake" if is_awake else "sleeping", "tags": tags or None}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        """Return whether any part is off the devices."""
        return {"is_sleeping": await engine.is_sleeping()}

    @router.post("/pause")
    async def pause(mode: str = "abort", clear_cache: bool = True) -> dict[str, Any]:
        """Stop generation until /resume, as `AsyncLLMEngine.pause_generation` does."""
        with _errors_of_query():
            await engine.pause_generation(mode=mode, clear_cache=clear_cache)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, Any]:
        """Continue after /pause."""
        await engine.resume_generation()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, Any]:
        """Return whether /pause has stopped generation."""
        return {"is_paused": await engine.is_paused()}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(
        reset_running_requests: bool = False, reset_external: bool = False
    ) -> dict[str, Any]:
        """Clear the prefix cache; `success` is false while pages are in use."""
        is_done = await engine.reset_prefix_cache(
            reset_running_requests, reset_external
        )
        return {"success": is_done}

    @router.get("/server_info")
    async def server_info(
        config_format: Literal["text", "json"] = "text",
    ) -> dict[str, Any]:
        """Return the engine's configuration and its environment, without secrets."""
        config: Any = repr(serving.config)
        if config_format == "json":
            config = json.loads(
                json.dumps(dataclasses.asdict(serving.config), default=str)
            )
        variables = [name for name in os.environ if envs.is_set(name)]
        return {
            "vllm_config": config,
            "vllm_env": {
                name: getattr(envs, name) for name in variables if "KEY" not in name
            },
            "system_env": {
                "os": platform.platform(),
                "python_version": platform.python_version(),
                "jaxspec_version": jaxspec.__version__,
                **{
                    f"{one}_version": importlib.metadata.version(one)
                    for one in PACKAGES
                },
            },
        }

    return router
