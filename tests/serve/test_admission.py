"""Limits on the number of waiting requests, beyond which others are refused."""

import asyncio
from typing import Any

import httpx
import pytest

from jaxspec.serve.admission import MAX_RETRY_S, Admission
from jaxspec.serve.errors import OverloadedError
from jaxspec.serve.settings import ServerSettings
from tests.support.serving import COMPLETIONS, PROMPT, error_of, serve_http


def admission(**limits: Any) -> Admission:
    return Admission(ServerSettings(**limits), max_num_seqs=2)


def test_refuses_texts_over_queue_limit():
    door = admission(max_num_queued_reqs=1)
    with door.admit(["a"], [5], 2), door.admit(["b"], [5], 1):
        assert set(door.request_ids) == {"a", "b"}
        with pytest.raises(
            OverloadedError, match="2 texts would wait, but at most 1 are allowed"
        ):
            door.admit(["c"], [5], 1).__enter__()
        assert door.num_requests == 2
    with door.admit(["c"], [5], 3):
        assert door.num_requests == 1
    with pytest.raises(OverloadedError), door.admit(["d"], [5], 4):
        pass
    assert door.num_refused == {"queued_reqs": 2, "queued_tokens": 0, "connections": 0}
    assert door.num_requests == 0


def test_refuses_tokens_over_queue_limit():
    door = admission(max_num_queued_tokens=10, max_num_queued_reqs=None)
    with door.admit(["a", "b"], [500, 500], 1), door.admit(["c"], [10], 1):
        with pytest.raises(OverloadedError, match="11 prompt tokens"):
            door.admit(["d"], [1], 1).__enter__()
    with door.admit(["d"], [10**6], 1):
        pass  # a request that need not wait is admitted at any length
    assert door.num_refused == {"queued_reqs": 0, "queued_tokens": 1, "connections": 0}


def test_error_releases_places():
    door = admission(max_num_queued_reqs=0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), door.admit(["a"], [5], 2):
            raise ZeroDivisionError


def test_retry_after_is_bounded():
    door = admission(max_num_queued_reqs=1000)
    with door.admit(["a"], [5], 1002):
        with pytest.raises(OverloadedError) as refused:
            door.admit(["b"], [5], 1).__enter__()
        assert refused.value.retry_after_s == MAX_RETRY_S


@pytest.mark.parametrize("is_stream", [False, True])
def test_refuses_excess_and_serves_admitted(is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "max_tokens": 20, "stream": is_stream}
        asked = [client.post(COMPLETIONS, json=body) for _ in range(10)]
        answers = await asyncio.gather(*asked)
        refused = [one for one in answers if one.status_code != 200]
        assert len(refused) == 10 - 3 - 2
        for one in refused:
            error_of(one, 503, "ServiceUnavailableError")
            assert int(one.headers["retry-after"]) >= 1
        metrics = (await client.get("/metrics")).text
        name = "vllm:admission_rejections_total"
        labels = 'engine="0",model_name="target",reason="queued_reqs"'
        assert f"{name}{{{labels}}} 5.0" in metrics

    serve_http(ask, settings={"max_num_queued_reqs": 2}, delay_s=0.02)
