"""Owns the development endpoints, off by default.

They need no API key: any client that reaches them can stop the model.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from jaxspec.serve.serving import Serving


def development_routes(serving: Serving) -> APIRouter:
    """Make /sleep, /wake_up and /is_sleeping if they are enabled."""
    router, engine = APIRouter(), serving.engine
    if not serving.settings.server_dev_mode:
        return router

    @router.post("/sleep")
    async def sleep(level: int = 1, mode: str = "abort") -> Response:
        """Free the devices' memory; requests are refused until /wake_up."""
        await engine.sleep(level, mode)
        return Response()

    @router.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Restore the memory that /sleep freed; `tags` selects weights or kv_cache."""
        await engine.wake_up(tags or None)
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, Any]:
        """Return whether any part is off the devices."""
        return {"is_sleeping": await engine.is_sleeping()}

    return router
