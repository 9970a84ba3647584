"""The endpoints for health, version, load, models and the tokenizer."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

import jaxspec
from jaxspec.config.engine import SpeculativeConfig
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.errors import EngineDeadError
from jaxspec.serve.app import make_app
from jaxspec.serve.server_info import synthetic_parts
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import NoTokenizer, Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.fake_engines import letters, said, serve
from tests.support.loops import make_config
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Gate,
    TurnsTokenizer,
    error_of,
    post,
    serve_http,
)


def test_health_until_engine_dies():
    async def use(engine: AsyncLLMEngine) -> None:
        app: Any = make_app(engine, ServerSettings())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x"
        ) as client:
            asked = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
            for method, path in asked:
                response = await client.request(method, path)
                assert (response.status_code, response.content) == (200, b"")

            def broken(*_: object) -> None:
                raise RuntimeError("boom")

            runner: Any = engine.engine.runner
            runner.launch = broken
            while not engine.errored:
                response = await client.post(COMPLETIONS, json={"prompt": PROMPT})
                error_of(response, 500, "InternalServerError")
            for method, path in asked:
                assert (await client.request(method, path)).status_code == 503
            response = await client.post(COMPLETIONS, json={"prompt": PROMPT})
            error_of(response, 500, "InternalServerError")
            assert (await client.get("/metrics")).status_code == 200

    with pytest.raises(EngineDeadError):
        serve(use)


def test_health_is_503_during_first_compile():
    async def use(engine: AsyncLLMEngine) -> None:
        engine.engine.tokenizer = TurnsTokenizer(16)
        gate = Gate(engine.engine)
        engine.engine.start_warm_up()
        num_programs = engine.num_warming
        assert num_programs > 2
        app: Any = make_app(engine, ServerSettings())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as one:
            body = {"prompt": PROMPT, "max_tokens": 4}
            asked = asyncio.ensure_future(one.post(COMPLETIONS, json=body))
            for path in ("/health", "/ping"):
                response = await one.get(path)
                assert response.status_code == 503
                assert response.json() == {"status": "warming", "warming": num_programs}
                assert int(response.headers["Retry-After"]) > 0
            for path in ("/v1/models", "/version", "/", "/load"):
                assert (await one.get(path)).status_code == 200
            server = (await one.get("/page/server.json")).json()
            assert (server["is_ready"], server["num_warming"]) == (False, num_programs)
            assert server["compiling"].endswith("_sampled")
            scrape = (await one.get("/metrics")).text
            assert re.search(rf"^jaxspec:warming{{.*}} {num_programs}.0$", scrape, re.M)
            assert not asked.done()
            gate.let()
            response = await asked
            assert response.json()["choices"][0]["text"] == letters(said(4))
            assert (await one.get("/health")).status_code == 200
            assert engine.num_warming >= num_programs - 1
            gate.open()
            engine.engine.wait_for_programs()
            server = (await one.get("/page/server.json")).json()
            assert (server["is_ready"], server["compiling"]) == (True, None)
            assert re.search("^jaxspec:warming{.*} 0.0$", await _metrics(one), re.M)

    serve(use)


async def _metrics(client: httpx.AsyncClient) -> str:
    return (await client.get("/metrics")).text


def test_engine_that_loses_drafts_warms_up_again():
    async def use(engine: AsyncLLMEngine) -> None:
        engine.engine.tokenizer = TurnsTokenizer(16)
        gate = Gate(engine.engine)
        engine.engine.start_warm_up()
        gate.open()
        engine.engine.wait_for_programs()
        runner: Any = engine.engine.runner
        launch, compiler = runner.launch, runner.compiler
        num_made = compiler.num_made
        failures = iter([True])

        def broken(*arguments: Any) -> Any:
            if next(failures, False):
                raise RuntimeError("boom")
            return launch(*arguments)

        runner.launch = broken
        runner.leave_out_drafts = compiler.clear
        app: Any = make_app(engine, ServerSettings())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as one:
            found = await post(one, COMPLETIONS, prompt=PROMPT, max_tokens=4)
            assert found["choices"][0]["text"] == letters(said(4))
            engine.engine.wait_for_programs()
            assert compiler.num_made >= 2 * num_made
            assert (await one.get("/health")).status_code == 200

    serve(use)


def test_models():
    async def ask(client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [one["id"] for one in listed["data"]] == ["a/b", "c"]
        assert {one["max_model_len"] for one in listed["data"]} == {96}
        assert (await client.get("/v1/models/a/b")).json()["id"] == "a/b"
        error_of(await client.get("/v1/models/a"), 404, "NotFoundError")

    serve_http(ask, settings={"served_model_names": ("a/b", "c")})


def test_models_report_synthetic_parts():
    async def ask(client: httpx.AsyncClient) -> None:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["random_weights"] is True
        assert "synthetic_acceptance" not in card

    serve_http(ask, load_format="dummy")
    forced = SpeculativeConfig(
        model="draft",
        num_speculative_tokens=3,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=2.0,
    )
    config = make_config(speculative=forced)
    assert synthetic_parts(config) == {"synthetic_acceptance": True}
    assert synthetic_parts(make_config()) == {}


def test_text_is_refused_without_tokenizer():
    async def use(engine: AsyncLLMEngine) -> None:
        engine.engine.tokenizer = NoTokenizer("it was left out")
        app: Any = make_app(engine, ServerSettings())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as one:
            for path, body in [
                ("/tokenize", {"prompt": PROMPT}),
                ("/tokenize", {"messages": MESSAGES}),
                ("/detokenize", {"tokens": [2, 3]}),
                (COMPLETIONS, {"prompt": PROMPT}),
                (CHAT, {"messages": MESSAGES}),
            ]:
                response = await one.post(path, json=body)
                error_of(response, 400, "BadRequestError")
                assert "it was left out" in response.text
            found = await post(one, COMPLETIONS, prompt=[2, 3, 4], max_tokens=2)
            assert found["usage"]["completion_tokens"] == 2

    serve(use)


def test_load_can_be_disabled():
    async def ask(client: httpx.AsyncClient) -> None:
        error_of(await client.get("/load"), 404, "NotFoundError")

    serve_http(ask, settings={"enable_server_load_tracking": False})


def test_version_and_load():
    async def ask(client: httpx.AsyncClient) -> None:
        version = (await client.get("/version")).json()
        assert version == {"version": jaxspec.__version__}
        assert (await client.get("/load")).json() == {"server_load": 0}
        body = {"prompt": [PROMPT] * 2, "max_tokens": 90, "ignore_eos": True}
        loads = []

        async def watch() -> None:
            while not answering.done():
                loads.append((await client.get("/load")).json()["server_load"])
                await asyncio.sleep(0.005)

        answering = asyncio.ensure_future(client.post(COMPLETIONS, json=body))
        await watch()
        assert answering.result().status_code == 200, answering.result().text
        assert max(loads) == 2

    serve_http(ask, delay_s=0.01)


def test_tokenize_and_detokenize():
    async def ask(client: httpx.AsyncClient) -> None:
        found = await post(client, "/tokenize", prompt=PROMPT, model="model")
        assert found == {
            "count": 3,
            "max_model_len": 96,
            "tokens": [2, 3, 4],
            "token_strs": None,
        }
        found = await post(client, "/tokenize", messages=MESSAGES)
        assert found["tokens"] == [2, 3, 4]
        found = await post(client, "/detokenize", tokens=[2, 3, 4])
        assert found == {"prompt": PROMPT}
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "#", "messages": MESSAGES}),
            ("/tokenize", {"messages": []}),
            ("/detokenize", {"tokens": [16]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": ["#"]}),
        ]:
            error_of(await client.post(path, json=body), 400, "BadRequestError")
        other = {"prompt": "#", "model": "other"}
        error_of(await client.post("/tokenize", json=other), 404, "NotFoundError")

    serve_http(ask)


def test_tokenizer_info():
    folder = bundled_target()
    tokenizer = Tokenizer.from_folder(folder, "{{ messages[0].content }}")

    async def use(engine: AsyncLLMEngine) -> None:
        statuses = []
        for given, is_on in ((TurnsTokenizer(16), False), (tokenizer, True)):
            engine.engine.tokenizer = given
            settings = ServerSettings(enable_tokenizer_info_endpoint=is_on)
            transport = httpx.ASGITransport(make_app(engine, settings))
            url = "http://x"
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                answer = await client.get("/tokenizer_info")
                statuses.append(answer.status_code)
        info = answer.json()
        given = json.loads((folder / "tokenizer_config.json").read_text())
        assert info.pop("chat_template") == "{{ messages[0].content }}"
        given.pop("chat_template", None)
        assert info == {"tokenizer_class": "GemmaTokenizer"} | given
        assert statuses == [404, 200]

    serve(use, tokenizer=str(folder))
