"""Scripts written for vLLM run when the import and the model names are changed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Speculative decoding as users of vLLM wrote it when its arguments were flat.
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
}
# What the script itself does not look at.
CHECKS = """
(completion,) = outputs[0].outputs
assert len(completion.token_ids) == 16 or completion.finish_reason == "stop"
assert llm.get_tokenizer().decode(completion.token_ids) == completion.text
assert completion.spec_decode_metrics.num_draft_tokens > 0
assert llm.llm_engine.runner.num_launches > 0
"""


def test_flat_speculative_arguments():
    script = VLLM_SCRIPT
    for theirs, ours in NAMES.items():
        assert theirs in script
        script = script.replace(theirs, ours)
    cache = str(ROOT / ".pytest_cache" / "jax")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script + CHECKS],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    start = "Prompt: 'Once upon a time, there was a fox who', Generated text: "
    assert line.startswith(start)
    assert len(line) > len(start) + 2
