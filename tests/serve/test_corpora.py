"""SGLang's endpoints add, remove and list the corpora of suffix drafts."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.config.methods import SUFFIX_DEFAULTS
from jaxspec.config.speculation import SpeculativeConfig
from tests.support.fake_engines import letters
from tests.support.serving import COMPLETIONS, PROMPT, Client, server

ADD, REMOVE = "/add_external_corpus", "/remove_external_corpus"
LIST = "/list_external_corpora"


def with_suffix(config: EngineConfig) -> EngineConfig:
    keys: dict[str, Any] = SUFFIX_DEFAULTS | {"suffix_decoding_max_corpus_tokens": 8}
    speculative = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=3,
        rejection_sample_method="coupled",
        **keys,
    )
    return dataclasses.replace(config, speculative=speculative, draft_model_config=None)


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


def test_other_methods_have_no_corpora(http: Client):
    refused = http.refusal(ADD, {"documents": [PROMPT]})
    assert "suffix_decoding_max_corpus_tokens" in refused["message"]
    assert counts(http) == {}


def test_corpora_need_an_api_key():
    with server(api_keys=("key",)) as http:
        for method, path in (("POST", ADD), ("POST", REMOVE), ("GET", LIST)):
            assert http.request(method, path).status_code == 401
