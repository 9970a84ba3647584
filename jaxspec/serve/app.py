"""Owns the application: all endpoints behind all checks, over one engine."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import jaxspec
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.serve.corpora import corpus_routes
from jaxspec.serve.development import development_routes
from jaxspec.serve.errors import add_error_handlers
from jaxspec.serve.generation import generation_routes
from jaxspec.serve.metrics import CountRequests, HttpMetrics, metric_routes
from jaxspec.serve.middleware import (
    AnthropicErrors,
    ApiKeys,
    BodyLimit,
    BodyTimeout,
    RequestIds,
    RootPath,
)
from jaxspec.serve.page import page_routes
from jaxspec.serve.server_info import health_routes, model_routes, token_routes
from jaxspec.serve.serving import Serving
from jaxspec.serve.settings import ServerSettings


def make_app(
    engine: AsyncLLMEngine,
    settings: ServerSettings,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """Make the application; it neither starts nor shuts down the engine.

    Its `state.serving` is the `Serving` that the endpoints share.

    Args:
        lifespan: Context manager of startup and shutdown, passed to FastAPI as
            `lifespan`.
    """
    has_docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="jaxspec",
        version=jaxspec.__version__,
        docs_url=None,  # our own page loads nothing from other hosts: see `page`
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        lifespan=lifespan,
    )
    serving = app.state.serving = Serving(engine, settings)
    counts = HttpMetrics()
    for router in (
        generation_routes(serving),
        model_routes(serving),
        token_routes(serving),
        health_routes(serving),
        corpus_routes(serving),
        development_routes(serving),
        metric_routes(serving, counts),
        page_routes(serving),
    ):
        app.include_router(router)
    add_error_handlers(app)
    # The middleware added last handles a request first.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    if settings.enable_request_id_headers:
        app.add_middleware(RequestIds)
    app.add_middleware(CountRequests, counts=counts)
    app.add_middleware(
        BodyTimeout,
        timeout_s=settings.timeout_read_body,
        admission=serving.admission,
    )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(RootPath)
    return app
