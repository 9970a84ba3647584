"""A user of `locust`: reads one stream after the other to its end.

    locust -f tests/serve/clients/locust_streams.py --headless -u 64 -r 64 -t 10s -H URL

A stream that breaks off, or has another number of tokens than requested, counts as
failed, and locust then exits with status 1. JAXSPEC_MODEL names the model.
"""

# Runs in its own environment: see client_requirements.txt.
# pyright: reportMissingImports=false

import json
import os

from locust import HttpUser, task

MAX_TOKENS = 32


class Streamer(HttpUser):
    """Reads a stream to its end, then requests the next."""

    @task
    def read(self) -> None:
        body = {
            "model": os.environ["JAXSPEC_MODEL"],
            "prompt": "$%&",
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = self.client.post(
            "/v1/completions", json=body, stream=True, catch_response=True
        )
        with asked as response:
            lines = [line.decode() for line in response.iter_lines() if line]
            if response.status_code != 200 or not lines:
                response.failure(f"status {response.status_code}, {len(lines)} lines")
            elif lines[-1] != "data: [DONE]":
                response.failure("no [DONE]")
            else:
                usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
                if usage["completion_tokens"] != MAX_TOKENS:
                    response.failure(f"{usage['completion_tokens']} tokens")
