"""Development endpoints are off by default, and have the documented effects."""

import re
from concurrent.futures import ThreadPoolExecutor

from tests.support.fake_engines import letters, said
from tests.support.serving import COMPLETIONS, PROMPT, Client, error_of, server

BODY = {"prompt": PROMPT, "max_tokens": 80}


def test_sleep_needs_dev_mode(http: Client):
    for method, path in (
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
    ):
        error_of(http.request(method, path), 404, "NotFoundError")


def test_sleep_and_wake_up():
    with (
        server(server_dev_mode=True, delay_s=0.03) as http,
        ThreadPoolExecutor() as pool,
    ):

        def is_sleeping() -> bool:
            return http.get("/is_sleeping").json()["is_sleeping"]

        def change(path: str) -> None:
            response = http.post(path)
            assert (response.status_code, response.content) == (200, b"")

        for query in ("level=0", "level=x", "mode=keep"):
            name = query.partition("=")[0]
            assert http.refusal(f"/sleep?{query}", {})["param"] == name
        assert not is_sleeping()
        asked = pool.submit(http.ask, COMPLETIONS, **BODY)
        running = "vllm:num_requests_running{.*} 1.0"
        while not re.search(running, http.get("/metrics").text):
            assert not asked.done()
        change("/sleep?level=1")
        assert is_sleeping()
        (choice,) = asked.result()["choices"]
        assert choice["finish_reason"] == "abort"
        assert "is asleep" in http.refusal(COMPLETIONS, BODY)["message"]
        # The server is healthy, and its metrics report the sleep state.
        assert http.get("/health").status_code == 200
        state = 'vllm:engine_sleep_state{.*sleep_state="weights_offloaded".*} 1.0'
        assert re.search(state, http.get("/metrics").text)
        assert http.refusal("/wake_up?tags=all", {})["param"] == "tags"
        change("/wake_up?tags=kv_cache")
        assert is_sleeping()
        change("/wake_up?tags=weights&tags=kv_cache")
        assert not is_sleeping()
        answer = http.ask(COMPLETIONS, prompt=PROMPT, max_tokens=4)
        assert answer["choices"][0]["text"] == letters(said(4))
