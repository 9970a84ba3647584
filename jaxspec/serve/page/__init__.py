"""Owns the pages at `/`, a chat that shows each token's origin, and `/docs`.

The other files of this folder are served unchanged. They contain no secrets, so loading
them needs no API key; the requests that the pages send to this server need one.
"""

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response

from jaxspec.serve.serving import Serving

_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    "page.js": "text/javascript",
    "lane.js": "text/javascript",
    "form.js": "text/javascript",
    "wire.js": "text/javascript",
}
_DOCS_TYPES = {
    "docs.html": "text/html",
    "docs.css": "text/css",
    "docs.js": "text/javascript",
}
_PATHS = {"index.html": "/", "docs.html": "/docs"}
# Content-Security-Policy: generated text that a page shows must not run scripts, load
# content or send data to other hosts.
_POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'"),
        *("img-src 'self'", "connect-src 'self'", "base-uri 'none'"),
        *("form-action 'none'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers must check for a newer file, so that they show no old one after an
    # update.
    "Cache-Control": "no-cache",
}


def page_routes(serving: Serving) -> APIRouter:
    """Make GET / and GET /docs, and the files of these pages."""
    router = APIRouter(include_in_schema=False)
    folder = files(__name__)
    types = _TYPES if serving.settings.disable_fastapi_docs else _TYPES | _DOCS_TYPES
    for name, media_type in types.items():
        path = _PATHS.get(name, f"/page/{name}")
        content = folder.joinpath(name).read_bytes()
        _add_file(router, path, content, media_type)

    @router.get("/page/server.json")
    async def server() -> dict[str, Any]:
        """Return the server's state, for the page to show."""
        engine = serving.engine
        choice, memory = engine.choice, engine.engine.memory
        return {
            "model": serving.settings.model_name,
            "max_draft_tokens": serving.config.max_draft_tokens,
            "num_drafts": choice.num_draft_tokens,
            "gain": choice.gain,
            "may_draft": choice.may_draft,
            "max_model_len": serving.config.max_model_len,
            "needs_key": bool(serving.settings.api_keys),
            "is_ready": engine.is_ready,
            "num_warming": engine.num_warming,
            "compiling": engine.compiling,
            "memory": None if memory is None else memory.as_dict(),
        }

    return router


def _add_file(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    async def show() -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    router.add_api_route(path, show, methods=["GET", "HEAD"])
