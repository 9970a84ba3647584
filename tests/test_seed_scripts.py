"""Scripts written for vLLM run when the import and the model names are changed."""

import runpy
import shlex
import sys
from pathlib import Path

import pytest

from jaxspec.serve import launcher
from jaxspec.serve.flags import Options
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]

# A script for vLLM with flat arguments, which older versions had.
VLLM_SCRIPT = """\
from vllm import LLM, SamplingParams

prompts = ["Once upon a time, there was a fox who"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="google/gemma-2-9b-it",
    tensor_parallel_size=1,
    speculative_model="google/gemma-2-2b-it",
    num_speculative_tokens=5,
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
NAMES = {
    "vllm": "jaxspec",
    "google/gemma-2-9b-it": "jaxspec/tiny-gemma2",
    "google/gemma-2-2b-it": "jaxspec/tiny-gemma2-draft",
    "meta-llama/Meta-Llama-3-70B": "jaxspec/tiny-gemma2",
    "meta-llama/Meta-Llama-3-8B": "jaxspec/tiny-gemma2-draft",
}
# Lines added to a script, which check values that the script itself does not read.
CHECKS = """
(completion,) = outputs[0].outputs
assert len(completion.token_ids) == 16 or completion.finish_reason == "stop"
assert llm.get_tokenizer().decode(completion.token_ids) == completion.text
assert llm.llm_engine.runner.num_launches > 0
# A first text may finish before the program with drafts is compiled.
llm.wait_for_programs()
llm.llm_engine.policy.set_adaptive(False)  # on a busy machine, K may be 0
((completion,),) = [one.outputs for one in llm.generate(prompts, sampling_params)]
assert completion.spec_decode_metrics.num_draft_tokens > 0
"""


# A script with today's arguments, which also reads metrics as an evaluation does.
METRICS_SCRIPT = """\
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector

prompts = ["Once upon a time, there was a fox who"]
llm = LLM(
    model="google/gemma-2-9b-it",
    speculative_config={
        "method": "draft_model",
        "model": "google/gemma-2-2b-it",
        "num_speculative_tokens": 3,
    },
    max_model_len=256,
    enable_prefix_caching=True,
    enable_chunked_prefill=True,
    disable_log_stats=False,
)
params = SamplingParams(
    temperature=0.7, repetition_penalty=1.1, logprobs=2, max_tokens=200, seed=1
)
outputs = llm.generate(prompts, sampling_params=params)

num_drafts = num_accepted = 0
acceptance_counts = [0] * 3
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        num_accepted += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for position, count in enumerate(metric.values):
            acceptance_counts[position] += count
print(f"mean acceptance length: {1 + num_accepted / num_drafts:.2f}")
"""
METRICS_CHECKS = """
assert sum(acceptance_counts) == num_accepted
assert sorted(acceptance_counts, reverse=True) == acceptance_counts
steps = [text.spec_decode_metrics for output in outputs for text in output.outputs]
assert sum(one.num_spec_steps for one in steps) == num_drafts
assert sum(one.num_accepted_draft_tokens for one in steps) == num_accepted
"""


# A script that streams with the asynchronous engine, as older posts do. An unread
# stream with the same id comes first, and the number of drafts is not given.
ASYNC_SCRIPT = """\
import asyncio
import uuid

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine

engine = AsyncLLMEngine.from_engine_args(
    AsyncEngineArgs(
        model="google/gemma-2-9b-it",
        speculative_model="google/gemma-2-2b-it",
        trust_remote_code=True,
        tensor_parallel_size=1,
        max_num_seqs=8,
        dtype="half",
        use_v2_block_manager=True,
        enforce_eager=True,
    )
)
prompt, params, request_id = "The fox", SamplingParams(max_tokens=200), uuid.uuid4().hex
unread = engine.generate(prompt, params, request_id)

async def stream_tokens():
    text = ""
    async for output in engine.generate(prompt, params, request_id):
        if output.outputs:
            print(output.outputs[0].text[len(text):], end="", flush=True)
            text = output.outputs[0].text
    print(flush=True)
    return output

last = asyncio.run(stream_tokens())
"""
ASYNC_CHECKS = """
# The programs with drafts are compiled once the first text is finished.
engine.engine.wait_for_programs()
params.ignore_eos, request_id = True, uuid.uuid4().hex
last = asyncio.run(stream_tokens())
(completion,) = last.outputs
assert last.finished
assert completion.finish_reason in ("stop", "length")
assert completion.spec_decode_metrics.num_draft_tokens > 0
assert engine.engine.config.max_draft_tokens == 5
engine.shutdown()
assert not engine.is_running
"""


# A script for four devices, as in a deployment guide.
PARALLEL_SCRIPT = """\
from vllm import LLM, SamplingParams

# Initialize the engine with speculation
llm = LLM(
    model="meta-llama/Meta-Llama-3-70B",
    speculative_model="meta-llama/Meta-Llama-3-8B",
    num_speculative_tokens=5,
    tensor_parallel_size=4
)

prompt = "Write a Python function to calculate the Fibonacci sequence."
sampling_params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=100)

outputs = llm.generate([prompt], sampling_params)

for output in outputs:
    print(f"Generated text: {output.outputs[0].text}")
"""
PARALLEL_CHECKS = """
assert llm.llm_engine.runner.mesh.devices.size == 4
(completion,) = outputs[0].outputs
assert len(completion.token_ids) == 100 or completion.finish_reason == "stop"
# The programs with drafts are compiled once the first text is finished.
llm.llm_engine.wait_for_programs()
sampling_params.temperature, sampling_params.ignore_eos = 0.0, True
((completion,),) = (one.outputs for one in llm.generate([prompt], sampling_params))
assert completion.spec_decode_metrics.num_accepted_draft_tokens > 0
"""
# The guide's server, started by the command that it gives.
PARALLEL_COMMAND = """\
python -m vllm.entrypoints.openai.api_server \\
    --model meta-llama/Meta-Llama-3-70B \\
    --speculative-model meta-llama/Meta-Llama-3-8B \\
    --num-speculative-tokens 5 \\
    --tensor-parallel-size 4
"""


def renamed(script: str) -> str:
    """Return the script with only its import and its model names replaced."""
    for theirs, ours in NAMES.items():
        script = script.replace(theirs, ours)
    return script


def run_script(script: str, checks: str, *, expected: tuple[str, ...] = ()) -> str:
    """Run a script for vLLM with names replaced; return what it printed.

    Args:
        expected: Prefixes of allowed warnings.
    """
    whole = renamed(script) + checks
    ignored = [part for one in expected for part in ("-W", f"ignore:{one}")]
    done = run_python("-W", "error", *ignored, "-c", whole)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # the README has the same arguments, and `test_docs` runs it
def test_flat_speculative_arguments_are_accepted():
    (line,) = run_script(VLLM_SCRIPT, CHECKS).splitlines()
    start = "Prompt: 'Once upon a time, there was a fox who', Generated text: "
    assert line.startswith(start)
    assert len(line) > len(start) + 2


@pytest.mark.slow
def test_metrics_of_drafts_are_read():
    (line,) = run_script(METRICS_SCRIPT, METRICS_CHECKS).splitlines()
    length = float(line.removeprefix("mean acceptance length: "))
    assert 1 < length <= 4


@pytest.mark.slow
def test_streams_of_the_asynchronous_engine_are_read():
    expected = "num_speculative_tokens is not given", "dtype='half' is taken"
    text = run_script(ASYNC_SCRIPT, ASYNC_CHECKS, expected=expected)
    assert len(text.strip()) > 2


@pytest.mark.slow
def test_tensor_parallel_arguments_are_accepted():
    text = run_script(PARALLEL_SCRIPT, PARALLEL_CHECKS)
    assert len(text.removeprefix("Generated text: ").strip()) > 10


def test_server_command_is_accepted(monkeypatch: pytest.MonkeyPatch):
    command = renamed(PARALLEL_COMMAND).replace("\\\n", "")
    _, _, module, *arguments = shlex.split(command)
    seen: list[Options] = []
    monkeypatch.setattr(launcher, "run", lambda options: seen.append(options) or 0)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns about it
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 0
    config = seen[0].engine.create_engine_config()
    assert config.served_model_name == "jaxspec/tiny-gemma2"
    assert (config.max_draft_tokens, config.tensor_parallel_size) == (5, 4)
