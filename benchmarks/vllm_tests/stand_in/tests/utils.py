"""The helpers of vLLM's server tests, for jaxspec's server.

Flags that ask for another model's properties are left out: `DROPPED`.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from stand_in_models import prepare

from jaxspec.utils.network_utils import get_open_port

VLLM_PATH = Path(os.environ["VLLM_SOURCE"])
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENGINE_KWARGS: dict[str, Any] = {}
# Flags of other models, with the number of values that follow.
DROPPED = {
    **{"--reasoning-parser": 1, "--tool-call-parser": 1, "--tokenizer-mode": 1},
    **{"--enable-lora": 0, "--lora-modules": 1, "--max-lora-rank": 1},
    **{"--max-cpu-loras": 1, "--tokenizer": 1, "--revision": 1, "--runner": 1},
}
CHAT_TEMPLATE = "examples/tool_chat_template_gemma3_pythonic.jinja"
START_S = 240.0
# Highest values that the bundled pair and jaxspec allow.
LIMITS = {"--max-model-len": 8192, "--max-logprobs": 1024}


def without_dropped(arguments: Sequence[str]) -> list[str]:
    """Return a server's arguments without the flags of other models."""
    kept, rest = [], list(arguments)
    while rest:
        name = rest.pop(0)
        if name in LIMITS and rest[0].isdecimal():
            kept += [name, str(min(int(rest.pop(0)), LIMITS[name]))]
        elif name.partition("=")[0] in DROPPED:
            del rest[: 0 if "=" in name else DROPPED[name]]
            while name == "--lora-modules" and rest and not rest[0].startswith("-"):
                del rest[0]
        else:
            kept.append(name)
    return kept


class RemoteOpenAIServer:
    """A server process of jaxspec, with the interface of vLLM's helper."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: Mapping[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: Mapping[str, Any] | None = None,
    ):
        arguments = without_dropped(vllm_serve_args)
        self.uds = None
        if "--uds" in arguments:
            self.uds = arguments[arguments.index("--uds") + 1]
        if self.uds is None and auto_port:
            arguments += ["--port", str(get_open_port())]
        if seed is not None:
            arguments += ["--seed", str(seed)]
        if "--chat-template" not in arguments:
            arguments += ["--chat-template", str(VLLM_PATH / CHAT_TEMPLATE)]
        if not {"--speculative-config", "--speculative-model"} & {*arguments}:
            arguments += ["--speculative-model", prepare("draft", is_draft=True)]
            arguments += ["--num-speculative-tokens", "3"]
        self.host = "localhost"
        if "--host" in arguments:
            self.host = arguments[arguments.index("--host") + 1]
        self.port = None
        if "--port" in arguments:
            self.port = int(arguments[arguments.index("--port") + 1])
        prepare(model)
        command = [sys.executable, "-m", "jaxspec.serve", model, *arguments]
        print("starting", *command[2:], flush=True)
        environment = os.environ | dict(env_dict or {})
        self.proc = subprocess.Popen(command, env=environment)
        try:
            self._wait(START_S)
        except BaseException:
            self._shutdown()
            raise

    def _wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        with httpx.Client(transport=transport) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(self.url_for("health")).status_code == 200:
                        return
                if self.proc.poll() is not None:
                    raise RuntimeError("the server ended before it was ready")
                if time.monotonic() > until:
                    raise RuntimeError(f"the server was not ready after {timeout_s} s")
                time.sleep(0.3)

    def _get_process_termination_timeout(self) -> float:
        return 15.0

    def _shutdown(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._shutdown()

    @property
    def url_root(self) -> str:
        return "http://server" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _options(self, given: Mapping[str, Any], *path: str) -> dict[str, Any]:
        made = {"base_url": self.url_for(*path), "api_key": self.DUMMY_API_KEY}
        return {**made, "max_retries": 0, "timeout": 600, **given}

    def get_client(self, **given: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(given, "v1"))

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(given, "v1"))

    def get_client_anthropic(self, **given: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options(given))

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options(given))


def _unsupported(reason: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        pytest.skip(reason)

    return refuse


RemoteVLLMServer = RemoteOpenAIServer
RemoteLaunchRenderServer = _unsupported("jaxspec has no render server")
RemoteOpenAIServerCustom = _unsupported("jaxspec's server has no custom main function")


def create_new_process_for_each_test(*_: object) -> Callable[[Any], Any]:
    """Do nothing: vLLM's helper frees a GPU's memory between tests."""
    return lambda function: function


def multi_gpu_test(*, num_gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skip(f"needs {num_gpus} GPUs")


def multi_gpu_only(*, num_gpus: int = 2) -> pytest.MarkDecorator:
    return multi_gpu_test(num_gpus=num_gpus)


def large_gpu_mark(min_gb: int) -> pytest.MarkDecorator:
    return pytest.mark.filterwarnings(f"ignore:vLLM needs {min_gb} GB")


def requires_fp8(function: Any) -> Any:
    return pytest.mark.skip("needs a GPU with fp8")(function)


def requires_spawn_multiprocessing() -> bool:
    return True


def set_random_seed(seed: int) -> None:
    """Do nothing: jaxspec has no global seed."""
