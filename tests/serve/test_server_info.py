"""The endpoints for health, version, load, models and the tokenizer; load headers."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import jaxspec
from jaxspec.config.engine import SpeculativeConfig
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.metrics import Load
from jaxspec.errors import EngineDeadError
from jaxspec.serve.app import make_app
from jaxspec.serve.load_report import load_header
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
    Client,
    Gate,
    error_of,
    server,
)

HEALTH = (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))


def test_health_until_engine_dies():
    async def use(engine: AsyncLLMEngine) -> None:
        app: Any = make_app(engine, ServerSettings())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            for method, path in HEALTH:
                response = await http.request(method, path)
                assert (response.status_code, response.content) == (200, b"")
            runner: Any = engine.engine.runner
            runner.launch = None
            while not engine.errored:
                response = await http.post(COMPLETIONS, json={"prompt": PROMPT})
                error_of(response, 500, "InternalServerError")
            for method, path in HEALTH:
                assert (await http.request(method, path)).status_code == 503
            response = await http.post(COMPLETIONS, json={"prompt": PROMPT})
            error_of(response, 500, "InternalServerError")
            assert (await http.get("/metrics")).status_code == 200

    with pytest.raises(EngineDeadError):
        serve(use)


def test_health_is_503_during_first_compile():
    with server() as http, ThreadPoolExecutor() as pool:
        engine = http.site.engine
        gate = Gate(engine.engine)
        engine.engine.start_warm_up()
        num_programs = engine.num_warming
        assert num_programs > 2
        asked = pool.submit(http.ask, COMPLETIONS, prompt=PROMPT, max_tokens=4)
        for path in ("/health", "/ping"):
            response = http.get(path)
            assert response.status_code == 503
            assert response.json() == {"status": "warming", "warming": num_programs}
            assert int(response.headers["Retry-After"]) > 0
        for path in ("/v1/models", "/version", "/", "/load"):
            assert http.get(path).status_code == 200
        page = http.get("/page/server.json").json()
        assert (page["is_ready"], page["num_warming"]) == (False, num_programs)
        assert page["compiling"].endswith("_sampled")
        metric = "^jaxspec:warming{.*}"
        scrape = http.get("/metrics").text
        assert re.search(f"{metric} {num_programs}.0$", scrape, re.M)
        assert not asked.done()
        gate.let()
        assert asked.result()["choices"][0]["text"] == letters(said(4))
        assert http.get("/health").status_code == 200
        assert engine.num_warming >= num_programs - 1
        gate.open()
        engine.engine.wait_for_programs()
        page = http.get("/page/server.json").json()
        assert (page["is_ready"], page["compiling"]) == (True, None)
        assert re.search(f"{metric} 0.0$", http.get("/metrics").text, re.M)


def test_engine_that_loses_drafts_warms_up_again():
    with server() as http:
        engine = http.site.engine.engine
        gate = Gate(engine)
        engine.start_warm_up()
        gate.open()
        engine.wait_for_programs()
        runner: Any = engine.runner
        launch, compiler = runner.launch, runner.compiler
        plain = {shape for shape in compiler.made if not shape.is_draft_prefill}
        failures = iter([True])

        def broken(*arguments: Any) -> Any:
            if next(failures, False):
                raise RuntimeError("boom")
            return launch(*arguments)

        runner.launch = broken
        runner.leave_out_drafts = compiler.clear
        found = http.ask(COMPLETIONS, prompt=PROMPT, max_tokens=4)
        assert found["choices"][0]["text"] == letters(said(4))
        engine.wait_for_programs()
        assert plain <= {*compiler.made}
        assert not any(shape.is_draft_prefill for shape in compiler.made)
        assert http.get("/health").status_code == 200


def test_models_are_listed():
    settings = {"enable_server_load_tracking": False}
    with server(
        {"load_format": "dummy"}, served_model_names=("a/b", "c"), **settings
    ) as http:
        listed = http.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [one["id"] for one in listed["data"]] == ["a/b", "c"]
        for card in listed["data"]:
            assert (card["max_model_len"], card["random_weights"]) == (96, True)
            assert "synthetic_acceptance" not in card
        assert http.get("/v1/models/a/b").json()["id"] == "a/b"
        for missing in ("/v1/models/a", "/load"):
            error_of(http.get(missing), 404, "NotFoundError")
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
    with server(tokenizer=NoTokenizer("it was left out")) as http:
        for path, body in [
            ("/tokenize", {"prompt": PROMPT}),
            ("/tokenize", {"messages": MESSAGES}),
            ("/detokenize", {"tokens": [2, 3]}),
            (COMPLETIONS, {"prompt": PROMPT}),
            (CHAT, {"messages": MESSAGES}),
        ]:
            assert "it was left out" in http.refusal(path, body)["message"]
        found = http.ask(COMPLETIONS, prompt=[2, 3, 4], max_tokens=2)
        assert found["usage"]["completion_tokens"] == 2


def test_version_and_load_are_reported(slow_http: Client):
    version = {"version": jaxspec.__version__}
    assert slow_http.get("/version").json() == version
    assert slow_http.get("/load").json() == {"server_load": 0}
    body = {"prompt": [PROMPT] * 2, "max_tokens": 90, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(slow_http.ask, COMPLETIONS, **body)
        loads = []
        while not asked.done():
            loads.append(slow_http.get("/load").json()["server_load"])
            time.sleep(0.005)
        asked.result()
    assert max(loads) == 2


def test_text_is_tokenized_and_detokenized(http: Client):
    found = http.ask("/tokenize", prompt=PROMPT, model="model")
    sizes = {"count": 3, "max_model_len": 96}
    assert found == sizes | {"tokens": [2, 3, 4], "token_strs": None}
    assert http.ask("/tokenize", messages=MESSAGES)["tokens"] == [2, 3, 4]
    assert http.ask("/detokenize", tokens=[2, 3, 4]) == {"prompt": PROMPT}
    for body in ({"prompt": "#", "messages": MESSAGES}, {"messages": []}):
        http.refusal("/tokenize", body)
    other = {"prompt": "#", "model": "other"}
    http.refusal("/tokenize", other, 404, "NotFoundError")


def test_tokenizer_info_needs_its_flag(http: Client):
    error_of(http.get("/tokenizer_info"), 404, "NotFoundError")
    folder, template = bundled_target(), "{{ messages[0].content }}"
    tokenizer = Tokenizer.from_folder(folder, template)
    engine = {"tokenizer": str(folder)}
    with server(
        engine, tokenizer=tokenizer, enable_tokenizer_info_endpoint=True
    ) as http:
        info = http.get("/tokenizer_info").json()
    given = json.loads((folder / "tokenizer_config.json").read_text())
    expected = {"tokenizer_class": "GemmaTokenizer"} | given
    assert info == expected | {"chat_template": template}


HEADER = "endpoint-load-metrics"
VALUES = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}


def test_load_is_written_in_each_format():
    load = Load(kv_usage=0.25, num_waiting=3)
    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, "
    text += "named_metrics.num_requests_waiting=3.0"
    assert load_header(load, "TEXT") == load_header(load, "text") == {HEADER: text}
    kind, _, content = load_header(load, "json")[HEADER].partition(" ")
    assert (kind, json.loads(content)) == ("JSON", {"named_metrics": VALUES})
    assert load_header(load, "xml") == {}


def test_header_is_sent_on_request(http: Client):
    requests: dict[str, Any] = {COMPLETIONS: {"prompt": PROMPT}}
    requests[CHAT] = {"messages": MESSAGES}
    for path, body in requests.items():
        for is_stream in (False, True):
            body["stream"] = is_stream
            headers = {f"{HEADER}-format": "TEXT"}
            response = http.post(path, json=body, headers=headers).raise_for_status()
            if is_stream:
                assert "content-length" not in response.headers
                assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers[HEADER].startswith("TEXT named_metrics.kv_cache")
            assert HEADER not in http.post(path, json=body).headers


def test_pages_load_nothing_from_other_hosts(http: Client):
    for page in ("/", "/docs"):
        answer = http.get(page)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        linked = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
        assert len(linked) >= 3 or "page/docs.js" in linked
        found = [http.get(f"/{path}").raise_for_status().text for path in linked]
        for text in (answer.text, *found):
            assert not re.search(r"https?://(?!www\.w3\.org)", text)
    with server(disable_fastapi_docs=True) as without:
        for path in ("/docs", "/page/docs.js"):
            assert without.get(path).status_code == 404
