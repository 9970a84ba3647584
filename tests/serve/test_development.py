"""Development endpoints are off by default, and have the documented effects."""

import asyncio
import re

import httpx

from tests.support.fake_engines import letters, said
from tests.support.serving import COMPLETIONS, PROMPT, error_of, serve_http


def test_sleep_needs_dev_mode():
    paths = (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"))

    async def missing(client: httpx.AsyncClient) -> None:
        for method, path in paths:
            error_of(await client.request(method, path), 404, "NotFoundError")

    async def ask(client: httpx.AsyncClient) -> None:
        async def is_sleeping() -> bool:
            return (await client.get("/is_sleeping")).json()["is_sleeping"]

        async def change(path: str) -> None:
            response = await client.post(path)
            assert (response.status_code, response.content) == (200, b"")

        assert not await is_sleeping()
        for query, name in (
            ("level=0", "level"),
            ("level=x", "level"),
            ("mode=keep", "mode"),
        ):
            response = await client.post(f"/sleep?{query}")
            assert error_of(response, 400, "BadRequestError")["param"] == name
        assert not await is_sleeping()
        body = {"prompt": PROMPT, "max_tokens": 80}
        asked = asyncio.ensure_future(client.post(COMPLETIONS, json=body))
        running = "vllm:num_requests_running{.*} 1.0"
        while not re.search(running, (await client.get("/metrics")).text):
            await asyncio.sleep(0.001)
        await change("/sleep?level=1")
        assert await is_sleeping()
        (choice,) = (await asked).json()["choices"]
        assert choice["finish_reason"] == "abort"
        refused = await client.post(COMPLETIONS, json=body)
        assert "sleeps" in error_of(refused, 400, "BadRequestError")["message"]
        # The server is healthy, and its metrics report the sleep state.
        assert (await client.get("/health")).status_code == 200
        state = 'vllm:engine_sleep_state{.*sleep_state="weights_offloaded".*} 1.0'
        assert re.search(state, (await client.get("/metrics")).text)
        wrong = await client.post("/wake_up?tags=all")
        assert error_of(wrong, 400, "BadRequestError")["param"] == "tags"
        await change("/wake_up?tags=kv_cache")
        assert await is_sleeping()
        await change("/wake_up?tags=weights&tags=kv_cache")
        assert not await is_sleeping()
        body["max_tokens"] = 4
        response = (await client.post(COMPLETIONS, json=body)).json()
        assert response["choices"][0]["text"] == letters(said(4))

    serve_http(missing)
    serve_http(ask, settings={"server_dev_mode": True}, delay_s=0.01)
