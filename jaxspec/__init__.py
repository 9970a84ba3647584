"""Speculative decoding for Gemma in JAX, with vLLM's API.

Reading order, from a user's call down to the device:

1. `jaxspec.llm`: text in, text out, with `jaxspec.conversations` and
   `jaxspec.beam_search`. `jaxspec.__main__` and `jaxspec.cli` are the command line,
   `jaxspec.serve` is the server, `jaxspec.bench` has benchmarks, `jaxspec.train` trains
   heads and drafts.
2. `jaxspec.sampling_params`, `jaxspec.inputs`, `jaxspec.outputs`, `jaxspec.logprobs`,
   `jaxspec.metrics`: types of inputs and outputs. `jaxspec.errors`: argument checks.
3. `jaxspec.text`: tokenization and chat formats.
4. `jaxspec.engine.arg_utils` and `jaxspec.config`: arguments become one configuration;
   `jaxspec.engine.memory` plans memory, `jaxspec.engine.loader` makes an engine.
5. `jaxspec.engine.llm_engine`: add a request, step, collect outputs;
   `jaxspec.engine.async_llm_engine` does so for event loops, in a thread.
6. `jaxspec.engine.scheduling`: decides what the next step does.
7. `jaxspec.engine.runner`: the interface between host and device.
8. `jaxspec.program.step`: the program; then `jaxspec.program.propose`,
   `jaxspec.program.target_pass`, `jaxspec.program.verify` and
   `jaxspec.program.tree.side_branches`.
9. `jaxspec.models.gemma.network`: the network. `jaxspec.sharding`: its placement on
   devices. `jaxspec.jax_settings`: the jax settings under which it is traced.

Others: common parts of all command lines (`jaxspec.command_line`), the exit of
processes with live engines (`jaxspec.exit`), errors for packages that an extra installs
(`jaxspec.extras`), progress bars (`jaxspec.progress`), and
vLLM's import paths: `jaxspec.benchmarks`, `jaxspec.distributed`, `jaxspec.entrypoints`,
`jaxspec.envs`, `jaxspec.exceptions`, `jaxspec.logger`, `jaxspec.lora`,
`jaxspec.platforms`, `jaxspec.sequence`, `jaxspec.tokenizers`, `jaxspec.tool_parsers`,
`jaxspec.usage`, `jaxspec.utils`, `jaxspec.v1`, `jaxspec.version`.
"""

import os
import signal
import sys

# While `jaxspec` or `python -m jaxspec...` imports modules, Ctrl-C ends the process: a
# KeyboardInterrupt would show a traceback. `jaxspec.exit.run_main` restores it.
if sys.argv[:1] == ["-m"]:  # Python has not found the module yet; its name follows "-m"
    _is_program = sys.orig_argv[-len(sys.argv)].partition(".")[0] == "jaxspec"
else:
    _is_program = any(os.path.basename(word) == "jaxspec" for word in sys.argv[:1])
if _is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib
from typing import Any

from jaxspec.inputs import PromptType, TextPrompt, TokensPrompt
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import SamplingParams

__version__ = "0.2.0"

__all__ = [
    "CompletionOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# Public as well, but imported on first use: these import jax, which takes seconds.
_LAZY = {
    "AsyncEngineArgs": "jaxspec.engine.arg_utils",
    "AsyncLLMEngine": "jaxspec.engine.async_llm_engine",
    "EngineArgs": "jaxspec.engine.arg_utils",
    "LLM": "jaxspec.llm",
    "LLMEngine": "jaxspec.engine.llm_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
