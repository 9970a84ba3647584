"""Real clients: libraries in their own environments, curl, and load generators.

Each library requests a chat, a stream, a tool call, a structured output, and a chat
with a system message. The two benchmark tools make fewer requests: lm-eval chats with a
system message, and guidellm streams. Environments are cached in
`.pytest_cache/clients`; clients that cannot be installed are skipped.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from jaxspec_checkpoints import bundled_target
from tests.support.client_programs import CLIENTS, needs_clients, run
from tests.support.fake_engines import letters, said
from tests.support.programs import ROOT
from tests.support.serving import COMPLETIONS, PROMPT, Site, events_of, site_of
from tests.support.tool_chats import Stage

HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".pytest_cache" / "clients"
INSTALL_S = 600
# Otherwise litellm would fetch a price list from the network.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}

WORDS = "It is warm."
PLACE = {"city": "Oslo", "degrees": 21}
WEATHER = {"name": "weather", "parameters": {"city": "Oslo"}}
CALL_PLACE = json.dumps([{"name": "Place", "parameters": PLACE}])
# By name of the call: the text that the model generates, and the client's expected
# result.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (WORDS, {"text": WORDS}),
    "stream": (WORDS, {"text": WORDS}),
    "system": (WORDS, {"text": WORDS}),
    "tools": (json.dumps([WEATHER]), {"calls": [["weather", {"city": "Oslo"}]]}),
    "structured": (json.dumps(PLACE), {"object": PLACE}),
}


class Client(NamedTuple):
    """A client's packages, and its differences from `CALLS`.

    Attributes:
        requirements: Packages for pip or npm.
        own: Entries that replace those of `CALLS`.
        script: Script for Node; other clients are in calls.py.
    """

    requirements: tuple[str, ...]
    own: dict[str, tuple[str, dict[str, Any]]] = {}
    script: str | None = None


INSTALLED = {
    "openai": Client(("openai>=2",)),
    "openai-npm": Client(("openai@^6",), script="openai_calls.mjs"),
    "ai-npm": Client(
        ("ai@^5", "@ai-sdk/openai-compatible@^1", "zod@^3.25"), script="ai_calls.mjs"
    ),
    "langchain": Client(("langchain-openai>=1",)),
    "llama-index": Client(
        ("llama-index-llms-openai-like>=0.5",),
        {"structured": (CALL_PLACE, {"object": PLACE})},
    ),
    "instructor": Client(
        ("instructor>=1.10",), {"tools": (CALL_PLACE, {"calls": [["Place", PLACE]]})}
    ),
    # litellm imports mcp for tools, but does not require it.
    "litellm": Client(("litellm>=1.80", "mcp")),
}


class Stand(Stage):
    """A stage that records the prompts of its model, after the chat template."""

    def __init__(self) -> None:
        super().__init__(api_keys=("secret",), enable_auto_tool_choice=True)
        self.prompts: list[str] = []
        prompts: Any = self.app.state.serving.prompts
        write = prompts.write

        def noted(*arguments: Any) -> Any:
            text, token_ids = write(*arguments)
            self.prompts.append(text)
            return text, token_ids

        prompts.write = noted


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.end()


def install(name: str, requirements: tuple[str, ...], *, is_npm: bool) -> Path:
    """Create a client's environment, or reuse the existing one; return its folder."""
    folder = ENVIRONMENTS / name
    done = folder / "installed.txt"
    wanted = "\n".join((sys.version, *requirements))
    if done.exists() and done.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if is_npm:
        if shutil.which("npm") is None:
            pytest.skip("no npm here")
        (folder / "package.json").write_text("{}")
        set_up(["npm", "install", "--no-audit", "--no-fund", *requirements], folder)
    else:
        set_up([sys.executable, "-m", "venv", "."], folder)
        set_up(["bin/python", "-m", "pip", "install", "-q", *requirements], folder)
    done.write_text(wanted)
    return folder


def set_up(words: list[str], folder: Path) -> None:
    """Run a step of an installation; skip the test if it fails."""
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{' '.join(words)}: more than {INSTALL_S} s")
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
        pytest.skip(f"{' '.join(words)}: {' '.join(reason)}")


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", INSTALLED)
def test_client(stand: Stand, name: str, call: str):
    client = INSTALLED[name]
    folder = install(name, client.requirements, is_npm=client.script is not None)
    said, expected = client.own.get(call, CALLS[call])
    stand.script.say(said)
    words: list[Any] = [folder / "bin" / "python", HERE / "calls.py", name]
    if client.script is not None:
        # Node searches for modules next to the script.
        words = ["node", shutil.copy(HERE / client.script, folder)]
    printed = run([*words, stand.url[:-1], call], OFFLINE)
    assert json.loads(printed.splitlines()[-1]) == expected
    prompt = stand.prompts[-1]
    assert "Is it warm in Oslo?" in prompt
    assert ("Be brief." in prompt) == (call == "system")


TASK = """
task: warm
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 32}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_lm_eval(stand: Stand, tmp_path: Path):
    folder = install("lm-eval", ("lm-eval[api]>=0.4.9",), is_npm=False)
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"Is it {word}?", "answer": WORDS} for word in ("hot", "warm")]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "warm.yaml").write_text(TASK.format(data=data))
    stand.script.say(WORDS)
    options = f"model=model,base_url={stand.url}v1/chat/completions,num_concurrent=1"
    words: list[Any] = [folder / "bin" / "lm_eval", "--model", "local-chat-completions"]
    words += ["--model_args", options, "--apply_chat_template", "--tasks", "warm"]
    words += ["--include_path", tmp_path, "--output_path", tmp_path / "out"]
    words += ["--system_instruction", "Be brief."]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "secret")
        run(words, OFFLINE)
    (path,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(path.read_text())["results"]["warm"]
    assert found["exact_match,none"] == 1.0
    for prompt in stand.prompts[-2:]:
        assert prompt.index("Be brief.") < prompt.index("Is it")


@pytest.mark.slow
def test_guidellm(stand: Stand, tmp_path: Path):
    # Use this project's torch: other builds may include gigabytes of CUDA.
    folder = install("guidellm", ("guidellm>=0.8,<0.9", "torch==2.13.0"), is_npm=False)
    stand.script.say(WORDS)
    data, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    rows = [{"prompt": f"Is it {word}?"} for word in ("hot", "warm", "cold")]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {
        "backend": f"kind=openai_http,target={stand.url[:-1]},model=model,"
        "api_key=secret",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={len(rows)}",
        "data": f"kind=json_file,path={data}",
        "tokenizer": f"kind=hf_auto,model={bundled_target()}",
        "output": f"kind=json,path={report}",
    }
    words: list[Any] = [folder / "bin" / "guidellm", "run", "--disable-console"]
    for name, value in options.items():
        words += [f"--{name}", value]
    run(words, OFFLINE)
    (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (len(rows), [])
    assert {one["output"] for one in requests["successful"]} == {WORDS}
    assert all(one["time_to_first_token_ms"] > 0 for one in requests["successful"])
    # guidellm reads the server's token counts from the last event.
    num_tokens = len(stand.engine.engine.tokenizer.encode(WORDS, False)) + 1
    counts = {one["output_metrics"]["text_tokens"] for one in requests["successful"]}
    assert counts == {num_tokens}
    asked = [prompt for prompt in stand.prompts if "Is it" in prompt][-len(rows) :]
    assert all(row["prompt"] in prompt for row, prompt in zip(rows, asked, strict=True))


VLLM = os.environ.get("JAXSPEC_VLLM_PYTHON")
MANY = {"max_num_seqs": 64, "num_pages": 64 * 24, "max_num_batched_tokens": 512}
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
    with site_of(MANY, api_keys=KEYS) as made:
        yield made


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
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
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
def test_code_of_server_page_runs(stand: Stand, client: str, python: Any):
    stand.script.say("Very warm.")
    code = code_of_server_page(stand, client)
    assert run([python, "-c", code], {}).rstrip("\n") == "Very warm."


# litellm sends its requests with openai's client, which a quick test uses.
@pytest.mark.slow
@needs_clients
def test_litellm(site: Site):
    calls = [HERE / "calls.py", "litellm", site.url[:-1], "more"]
    found = json.loads(run([CLIENTS / "python", *calls], OFFLINE).splitlines()[-1])
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
    with site_of(MANY) as site:
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
    tiny = ROOT / "checkpoints" / "jaxspec_checkpoints" / "tiny"
    words: list[Any] = [VLLM, "-c", VLLM_BENCH_SERVE]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f"{json.dumps({'prompt': PROMPT})}\n" * 32, encoding="utf-8")
    words += ["--dataset-name", "custom", "--dataset-path", prompts]
    words += ["--custom-output-len", 16, "--skip-chat-template", "--ignore-eos"]
    words += ["--num-prompts", 32, "--model", "model"]
    words += ["--tokenizer", tiny / "target", "--save-result"]
    words += ["--result-dir", tmp_path]
    with site_of(MANY) as site:
        printed = run(
            [*words, "--base-url", site.url[:-1]], {"HF_HUB_OFFLINE": "1"}, 300
        )
    assert "Speculative Decoding" in printed
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["completed"] == 32
    assert 0 < found["spec_decode_acceptance_rate"] <= 100
