"""Real clients: openai, litellm, curl, and two load generators."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.client_programs import CLIENTS, needs_clients, run
from tests.support.fake_engines import letters, said
from tests.support.serving import (
    COMPLETIONS,
    PROMPT,
    Site,
    events_of,
    site_of,
)
from tests.support.tool_chats import Stage

HERE = Path(__file__).parent
VLLM = os.environ.get("JAXSPEC_VLLM_PYTHON")
ENGINE = {"max_num_seqs": 64, "num_pages": 64 * 24, "max_num_batched_tokens": 512}
KEYS = ("secret",)
NUM_STREAMS = 64
# `vllm bench serve` runs from a module, because the command needs a package named vllm,
# and the package for CPUs has another name.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with site_of(ENGINE, api_keys=KEYS) as made:
        yield made


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage(api_keys=KEYS)
    yield made
    made.end()


def test_openai(site: Site):
    url, asked = f"{site.url}v1", {"model": "model", "prompt": PROMPT, "max_tokens": 9}
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        create: Any = client.completions.create
        first, second = create(n=2, logprobs=1, **asked).choices
        assert first.text == second.text == letters(said(9))
        assert len(second.logprobs.tokens) == 9
        chunks = create(stream=True, **asked)
        assert "".join(chunk.choices[0].text for chunk in chunks) == letters(said(9))


def code_of_server_page(site: Site, client: str) -> str:
    """Return the block of docs/server.md that uses a client, for this server."""
    page = (HERE.parents[1] / "docs" / "server.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (one for one in blocks if f"from {client} import" in one)
    for shown, used in (("http://127.0.0.1:8000", site.url[:-1]), ("none", "secret")):
        assert shown in code
        code = code.replace(shown, used)
    return code


@pytest.mark.parametrize(
    ("client", "python"),
    [
        ("openai", sys.executable),
        pytest.param("anthropic", CLIENTS / "python", marks=needs_clients),
    ],
)
def test_code_of_server_page_runs(stage: Stage, client: str, python: Any):
    stage.script.say("Very warm.")
    code = code_of_server_page(stage, client)
    assert run([python, "-c", code], {}).rstrip("\n") == "Very warm."


# litellm sends its requests with openai's client, which a quick test uses.
@pytest.mark.slow
@needs_clients
def test_litellm(site: Site):
    # Otherwise litellm would fetch a price list from the network.
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    calls = [HERE / "clients" / "calls.py", "litellm", site.url[:-1], "more"]
    found = json.loads(run([CLIENTS / "python", *calls], environment).splitlines()[-1])
    same = ("whole", "streamed", "asynchronous", "completion")
    assert [found[name] for name in same] == [letters(said(9))] * 4
    assert (found["reason"], found["tokens"]) == ("length", 9)
    assert found["too_long"] in ("BadRequestError", "ContextWindowExceededError")
    assert found["stranger"] == "AuthenticationError"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(site: Site):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 9, "stream": True})
    words = ["curl", "-sSN", "--max-time", "60", "-H", "authorization: Bearer secret"]
    url = site.url[:-1] + COMPLETIONS
    json_head = ["-H", "content-type: application/json"]
    events = events_of(run([*words, url, *json_head, "-d", body], {}))
    assert "".join(e["choices"][0]["text"] for e in events) == letters(said(9))
    head = run([*words, "-i", url, *json_head, "-d", "{]"], {})
    assert head.startswith("HTTP/1.1 400")
    stranger = run([*words[:4], "-w", "%{http_code}", url, "-d", body], {})
    assert stranger.endswith("401")


@pytest.mark.slow
@needs_clients
def test_locust_streams():
    words: list[Any] = [CLIENTS / "locust", "-f", HERE / "locust_streams.py"]
    words += ["--headless", "-u", NUM_STREAMS, "-r", NUM_STREAMS, "-t", "16s"]
    words += ["--stop-timeout", "20s", "--json", "--loglevel", "ERROR"]
    with site_of(ENGINE) as site:
        # The device is so slow that it is the bottleneck, not this machine.
        site.delay_s = 0.15
        environment = {"JAXSPEC_MODEL": "model"}
        (found,) = json.loads(run([*words, "-H", site.url[:-1]], environment))
        served = num_ended(site)
    assert found["num_failures"] == 0
    assert found["num_requests"] >= 2 * NUM_STREAMS
    assert served == found["num_requests"]


def num_ended(site: Site) -> int:
    """Return the number of requests that ended with finish reason "length"."""
    text = httpx.get(f"{site.url}metrics").text
    (count,) = re.findall(
        r'^vllm:request_success_total{.*"length".*} (\S+)$', text, re.M
    )
    return int(float(count))


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="JAXSPEC_VLLM_PYTHON is not set")
def test_vllm_bench_serve(tmp_path: Path):
    """The client's section on speculative decoding shows values of our metrics."""
    tiny = Path(__file__).parents[2] / "checkpoints" / "jaxspec_checkpoints" / "tiny"
    words: list[Any] = [VLLM, "-c", VLLM_BENCH_SERVE]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f"{json.dumps({'prompt': PROMPT})}\n" * 32, encoding="utf-8")
    words += ["--dataset-name", "custom", "--dataset-path", prompts]
    words += ["--custom-output-len", 16, "--skip-chat-template", "--ignore-eos"]
    words += ["--num-prompts", 32, "--model", "model"]
    words += ["--tokenizer", tiny / "target", "--save-result"]
    words += ["--result-dir", tmp_path]
    with site_of(ENGINE) as site:
        printed = run(
            [*words, "--base-url", site.url[:-1]], {"HF_HUB_OFFLINE": "1"}, 300
        )
    assert "Speculative Decoding" in printed
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["completed"] == 32
    assert 0 < found["spec_decode_acceptance_rate"] <= 100
