"""Development endpoints, and SGLang's for the corpora of suffix drafts.

Development endpoints are off by default, and have the documented effects.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxspec import __version__
from tests.support.fake_engines import letters, said, with_suffix
from tests.support.serving import COMPLETIONS, PROMPT, Client, error_of, server

BODY = {"prompt": PROMPT, "max_tokens": 80}
PAUSED = 503, "ServiceUnavailableError"


def test_endpoints_need_dev_mode(http: Client):
    posts = "sleep wake_up reset_prefix_cache pause resume"
    for method, names in (
        ("POST", posts),
        ("GET", "is_sleeping server_info is_paused"),
    ):
        for name in names.split():
            error_of(http.request(method, f"/{name}"), 404, "NotFoundError")


def test_sleep_and_wake_up():
    with (
        server(server_dev_mode=True, delay_s=0.03) as http,
        ThreadPoolExecutor() as pool,
    ):

        def is_sleeping() -> bool:
            return http.get("/is_sleeping").json()["is_sleeping"]

        def change(path: str) -> dict[str, Any]:
            return http.post(path).raise_for_status().json()

        for query in ("level=0", "level=x", "mode=keep"):
            name = query.partition("=")[0]
            assert http.refusal(f"/sleep?{query}", {})["param"] == f"query.{name}"
        assert not is_sleeping()
        asked = pool.submit(http.ask, COMPLETIONS, **BODY)
        running = "vllm:num_requests_running{.*} 1.0"
        while not re.search(running, http.get("/metrics").text):
            assert not asked.done()
        assert change("/sleep?level=1") == {"status": "sleeping", "level": 1}
        assert is_sleeping()
        (choice,) = asked.result()["choices"]
        assert choice["finish_reason"] == "abort"
        late = pool.submit(http.ask, COMPLETIONS, prompt=PROMPT, max_tokens=4)
        waiting = "vllm:num_requests_waiting{.*} 1.0"
        while not re.search(waiting, http.get("/metrics").text):
            assert not late.done()
        # The server is healthy, and its metrics report the sleep state.
        assert http.get("/health").status_code == 200
        state = 'vllm:engine_sleep_state{.*sleep_state="weights_offloaded".*} 1.0'
        assert re.search(state, http.get("/metrics").text)
        assert http.refusal("/wake_up?tags=all", {})["param"] == "query.tags"
        partly = {"status": "sleeping", "tags": ["kv_cache"]}
        assert change("/wake_up?tags=kv_cache") == partly
        assert is_sleeping()
        assert not late.done(), "a request that arrives meanwhile waits, as in vLLM"
        assert change("/wake_up") == {"status": "awake", "tags": None}
        assert not is_sleeping()
        assert late.result()["choices"][0]["text"] == letters(said(4))


def test_generation_is_paused_and_resumed():
    with (
        server(server_dev_mode=True, delay_s=0.03) as http,
        ThreadPoolExecutor() as pool,
    ):

        def is_paused() -> bool:
            return http.get("/is_paused").json()["is_paused"]

        assert http.refusal("/pause?mode=now", {})["param"] == "query.mode"
        assert not is_paused()
        assert http.post("/pause").json() == {"status": "paused"}
        assert is_paused()
        assert "paused" in http.refusal(COMPLETIONS, BODY, *PAUSED)["message"]
        streamed = http.refusal(COMPLETIONS, BODY | {"stream": True}, *PAUSED)
        assert "paused" in streamed["message"]
        assert http.post("/resume").json() == {"status": "resumed"}
        assert http.post("/pause?mode=keep&clear_cache=false").status_code == 200
        asked = pool.submit(http.ask, COMPLETIONS, prompt=PROMPT, max_tokens=4)
        assert is_paused() and not asked.done()
        http.post("/resume")
        assert asked.result()["choices"][0]["text"] == letters(said(4))
        assert not is_paused()


def test_prefix_cache_is_reset():
    with server(server_dev_mode=True, enable_prompt_tokens_details=True) as http:

        def num_cached() -> int:
            usage = http.ask(COMPLETIONS, prompt=[2] * 40, max_tokens=1)["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        num_cached()
        before = num_cached()
        answer = http.post("/reset_prefix_cache?reset_running_requests=true")
        assert answer.json() == {"success": True}
        assert (before > 0, num_cached()) == (True, 0)


def test_server_info(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    with server(server_dev_mode=True, api_keys=("hush",)) as http:
        text = http.get("/server_info").json()
        parts = http.get("/server_info?config_format=json").json()
        assert "hush" not in f"{text} {parts}"
        longest = parts["vllm_config"]["max_model_len"]
        assert f"max_model_len={longest}" in text["vllm_config"]
        assert text["vllm_env"] == {"VLLM_BATCH_INVARIANT": False}
        assert text["system_env"]["jaxspec_version"] == __version__
        assert http.get("/server_info?config_format=xml").status_code == 400


ADD, REMOVE = "/add_external_corpus", "/remove_external_corpus"
LIST = "/list_external_corpora"


@pytest.fixture
def corpora() -> Iterator[Client]:
    with server({"change": with_suffix}) as http:
        yield http


def counts(http: Client) -> Any:
    listed = http.get(LIST).json()
    assert listed.pop("success") and listed.pop("message") == ""
    return listed["corpus_token_counts"]


def test_corpora_are_added_listed_and_removed(corpora: Client):
    runner: Any = corpora.site.engine.engine.runner
    asked = {"corpus_id": "a", "documents": [letters([2, 3]), letters([4])]}
    answer = corpora.ask(ADD, **asked)
    assert answer == {
        "success": True,
        "corpus_id": "a",
        "message": "Loaded corpus 'a' with 3 tokens.",
        "loaded_token_count": 3,
    }
    answer = corpora.ask(ADD, token_chunks=[[5, 6]], cache_salt="s")
    name = answer["corpus_id"]
    assert counts(corpora) == {"a": 3, name: 2}
    # One entry for each key of the two places with tokens before and after.
    assert (runner.corpora > 0).any(axis=2).sum() == 4
    assert corpora.ask(COMPLETIONS, prompt=PROMPT, max_tokens=2)
    assert corpora.ask(REMOVE, corpus_id="a")["success"]
    assert counts(corpora) == {name: 2}
    assert (runner.corpora > 0).any(axis=2).sum() == 2


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (ADD, {"corpus_id": "a", "file_path": "/etc/passwd"}, "file_path"),
        (ADD, {"corpus_id": "a"}, "documents"),
        (ADD, {"documents": ["a"], "token_chunks": [[2]]}, "documents"),
        (ADD, {"token_chunks": [[2] * 9]}, "documents"),
        (ADD, {"token_chunks": [[99]]}, "token_chunks"),
        (REMOVE, {"corpus_id": "none"}, "corpus_id"),
        (REMOVE, {}, "corpus_id"),
    ],
)
def test_invalid_requests_are_refused(corpora: Client, path: str, body: Any, name: str):
    assert corpora.refusal(path, body)["param"] == name
    assert counts(corpora) == {}


def test_refused_documents_are_not_tokenized(corpora: Client, monkeypatch):
    corpora.ask(ADD, corpus_id="a", documents=[PROMPT])
    monkeypatch.setattr(corpora.site.engine.engine.tokenizer, "encode", None)
    refused = corpora.refusal(ADD, {"corpus_id": "a", "documents": [PROMPT]})
    assert refused["param"] == "corpus_id"
    body = r'{"documents": [""], "cache_salt": "\ud800"}'
    headers = {"Content-Type": "application/json"}
    response = corpora.post(ADD, content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_other_methods_have_no_corpora(http: Client):
    refused = http.refusal(ADD, {"documents": [PROMPT]})
    assert "suffix_decoding_max_corpus_tokens" in refused["message"]
    assert counts(http) == {}
