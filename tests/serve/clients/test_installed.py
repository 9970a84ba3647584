"""Clients of OpenAI's API in their own environments, with scripted texts.

Each client requests a chat, a stream, a tool call, a structured output, and a chat with
a system message. The two benchmark tools make fewer requests: lm-eval chats with a
system message, and guidellm streams. Environments are cached in
`.pytest_cache/clients`; clients that cannot be installed are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxspec_checkpoints import bundled_target
from tests.support.tool_chats import Stage

HERE = Path(__file__).parent
ENVIRONMENTS = Path(__file__).parents[3] / ".pytest_cache" / "clients"
INSTALL_S, ASK_S = 600, 120

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


CLIENTS = {
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
        run(["npm", "install", "--no-audit", "--no-fund", *requirements], folder)
    else:
        run([sys.executable, "-m", "venv", "."], folder)
        run(["bin/python", "-m", "pip", "install", "-q", *requirements], folder)
    done.write_text(wanted)
    return folder


def run(words: list[str], folder: Path) -> None:
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


def output_of(words: list[Any], folder: Path) -> str:
    """Run a program that must succeed; return its output."""
    # Otherwise litellm would fetch a price list from the network.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=ASK_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", CLIENTS)
def test_client(stand: Stand, name: str, call: str):
    client = CLIENTS[name]
    folder = install(name, client.requirements, is_npm=client.script is not None)
    said, expected = client.own.get(call, CALLS[call])
    stand.script.say(said)
    words: list[Any] = [folder / "bin" / "python", HERE / "calls.py", name]
    if client.script is not None:
        # Node searches for modules next to the script.
        words = ["node", shutil.copy(HERE / client.script, folder)]
    printed = output_of([*words, stand.url[:-1], call], folder)
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
        output_of(words, folder)
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
    output_of(words, folder)
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
