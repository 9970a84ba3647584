"""Owns the endpoints of health, version, load, models and the tokenizer."""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

import jaxspec
from jaxspec.config.engine import EngineConfig, read_json
from jaxspec.engine.async_llm_engine import LONG_CHARACTERS
from jaxspec.errors import EngineDeadError, RequestError, check_token_id
from jaxspec.serve.errors import ModelNotFoundError
from jaxspec.serve.requests.protocol import DetokenizeBody, TokenizeBody
from jaxspec.serve.serving import Serving, new_id
from jaxspec.text.tokenizer import NoTokenizer
from jaxspec_checkpoints import model_files

# Seconds of the Retry-After header that is sent while the first program is compiled,
# which takes seconds to minutes.
RETRY_AFTER_S = 1


def health_routes(serving: Serving) -> APIRouter:
    """Make the endpoints for load balancers: /health, /ping, /load, /version."""
    router = APIRouter()

    async def health() -> Response:
        """Return 200; 503 until the first program is compiled or if the engine died."""
        try:
            serving.check_alive()
        except EngineDeadError:
            return Response(status_code=503)
        engine = serving.engine
        if not engine.is_ready:
            content = {"status": "warming", "warming": engine.num_warming}
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return JSONResponse(content, status_code=503, headers=headers)
        return Response(status_code=200)

    # One route per method: the methods of a common route would share one operation id
    # in /openapi.json.
    for path, method in (("/health", "GET"), ("/ping", "GET"), ("/ping", "POST")):
        router.add_api_route(path, health, methods=[method])

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of jaxspec."""
        return {"version": jaxspec.__version__}

    if not serving.settings.enable_server_load_tracking:
        return router

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of running prompts."""
        return {"server_load": serving.admission.num_requests}

    return router


def synthetic_parts(config: EngineConfig) -> dict[str, bool]:
    """Return whether weights or acceptance are synthetic: texts then mean nothing."""
    parts = {
        "synthetic_acceptance": config.is_synthetic,
        "random_weights": config.load_format == "dummy",
    }
    return {name: True for name, is_synthetic in parts.items() if is_synthetic}


def model_routes(serving: Serving) -> APIRouter:
    """Make GET /v1/models."""
    router = APIRouter()
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        allowed = ("create_engine", "fine_tuning", "search_indices")
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "jaxspec",
            "root": serving.config.served_model_name,
            "parent": None,
            "max_model_len": serving.config.max_model_len,
            **synthetic_parts(serving.config),
            "permission": [
                {
                    "id": f"modelperm-{new_id()}",
                    "object": "model_permission",
                    "created": created,
                    **{f"allow_{name}": False for name in allowed},
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_view": True,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the served names of the model."""
        names = serving.settings.served_model_names
        return {"object": "list", "data": [card(name) for name in names]}

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        """Return the entry of one name."""
        if name not in serving.settings.served_model_names:
            raise ModelNotFoundError(f"The model `{name}` does not exist.")
        return card(name)

    return router


def token_routes(serving: Serving) -> APIRouter:
    """Make POST /tokenize and /detokenize and, if enabled, GET /tokenizer_info."""
    router = APIRouter()
    tokenizer, config = serving.tokenizer, serving.config

    def encode(body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            message = "Give either a prompt or messages."
            raise RequestError(message, parameter="prompt")
        if body.messages is not None:
            return serving.prompts.write(body.messages, body)[1]
        assert body.prompt is not None
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Return the token ids of a prompt or of a conversation."""
        serving.check_body(body)
        given = body.messages if body.prompt is None else body.prompt
        is_long = len(str(given)) > LONG_CHARACTERS
        token_ids = await serving.engine.run_in_thread(
            partial(encode, body), is_long=is_long
        )
        pieces = None
        if body.return_token_strs:
            pieces = tokenizer.convert_ids_to_tokens(token_ids)
        return {
            "count": len(token_ids),
            "max_model_len": config.max_model_len,
            "tokens": token_ids,
            "token_strs": pieces,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """Return the text of token ids."""
        serving.check_body(body)
        if isinstance(tokenizer, NoTokenizer):
            raise tokenizer.missing("Decoding", body.tokens)
        for token in body.tokens:
            vocab_size = config.model_config.vocab_size
            check_token_id(RequestError, "tokens", token, vocab_size)
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
        return {"prompt": text}

    if not serving.settings.enable_tokenizer_info_endpoint:
        return router

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Return the tokenizer's configuration and chat template."""
        if isinstance(tokenizer, NoTokenizer):
            raise tokenizer.missing("/tokenizer_info", None)
        path = model_files(config.tokenizer).get("tokenizer_config.json")
        info = {"tokenizer_class": "GemmaTokenizer"} | (read_json(path) if path else {})
        if tokenizer.chat_template is not None:
            info["chat_template"] = tokenizer.chat_template.text
        return info

    return router
