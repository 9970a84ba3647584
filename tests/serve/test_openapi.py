"""Valid and invalid requests, generated from the server's OpenAPI schema."""

import dataclasses
import json
import re
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.loops import MODEL
from tests.support.serving import CHAT, COMPLETIONS, Client, server, site_of

# Deterministic: every run generates the same requests.
GIVEN: dict[str, Any] = dict(
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list[Any](HealthCheck),
)
RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
# A generated body usually has some field out of range, so each field is also sent
# alone.
ALONE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once"},
    CHAT: {"messages": [{"role": "user", "content": "Once"}]},
    "/v1/responses": {"input": "Once"},
}


class Requester:
    """Sends generated requests, and counts the statuses of their responses.

    Attributes:
        statuses: Counts of statuses by endpoint.
        faults: Requests that were answered with a 5xx status.
    """

    def __init__(self, client: httpx.Client):
        self._client = client
        self.statuses: dict[str, Counter[int]] = {}
        self.faults: list[str] = []

    def ask(self, case: Any) -> None:
        self._record(case, case.call(timeout=30).status_code, case.as_curl_command())
        path = case.operation.path
        if path in ALONE and isinstance(case.body, dict):
            for name, value in case.body.items():
                body = json.dumps(ALONE[path] | {"max_tokens": 4, name: value})
                headers = {"content-type": "application/json"}
                response = self._client.post(path, content=body, headers=headers)
                self._record(case, response.status_code, f"{path} {body}")

    def _record(self, case: Any, status: int, request: str) -> None:
        self.statuses.setdefault(case.operation.label, Counter())[status] += 1
        if status >= 500:
            self.faults.append(f"{status}: {request}")


# Hypothesis warns when the global state of `random` has changed while a strategy drew.
# The server's threads run in this process and may have changed it.
@pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module inside strategies"
    ":hypothesis.errors.HypothesisDeprecationWarning"
)
# Number of generated requests per endpoint and mode.
@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_no_request_gets_5xx(count: int):
    tokenizer = Tokenizer.from_folder(bundled_target())
    model = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size)
    changes = {"model_config": model, "draft_model_config": model}
    with (
        site_of(changes, tokenizer=tokenizer) as site,
        httpx.Client(base_url=site.url, timeout=30) as client,
    ):
        asking = Requester(client)
        schema = schemathesis.openapi.from_url(f"{site.url}openapi.json")
        for result in schema.get_all_operations():
            operation: Any = result.ok()  # pyright: ignore[reportAttributeAccessIssue]
            # A request without a body cannot be invalid.
            has_body = "requestBody" in operation.definition.raw
            for mode in (RIGHT, WRONG) if has_body else (RIGHT,):
                cases = operation.as_strategy(generation_mode=mode)
                settings(max_examples=count, **GIVEN)(given(cases)(asking.ask))()
    assert not asking.faults, "\n".join(asking.faults)
    for path in ALONE:
        found = asking.statuses[f"POST {path}"]
        assert min(found[200], found[400]) > 0, asking.statuses


def test_docs_load_nothing_from_other_hosts(http: Client):
    answer = http.get("/docs")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    linked = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    assert "page/docs.js" in linked
    for path in linked:
        found = http.get(f"/{path}").raise_for_status()
        assert not re.search(r"https?://(?!www\.w3\.org)", found.text)
    with server(disable_fastapi_docs=True) as without:
        for path in ("/docs", "/page/docs.js"):
            assert without.get(path).status_code == 404
