"""Asks compilers for the temporaries of large batches, to hold a memory plan against.

`PYTHONPATH=.venv/aot python -m tests.program.aot_memory` compiles programs of 9B with a
2B draft for a GPU that is not there, and writes their temporaries and code to
`benchmarks/results/aot_memory.json`. Both models have two layers here: temporaries are
those of one layer and of the logits. Nothing runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from benchmarks.compile_costs import engine_config
from jaxspec.config import EngineConfig
from jaxspec.engine.controller import Controller
from jaxspec.engine.described import describe, describe_mesh
from jaxspec.engine.shapes import Shapes
from jaxspec.program.plan import Features
from jaxspec.program.step import lower_step
from tests.kernels import aot_gpu, aot_tpu

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "aot_memory.json"
NUM_DRAFT_TOKENS = 5
FEATURES = {
    "plain": Features(),
    "controls": Features(has_controls=True, num_logprobs=20),
    "prompts": Features(has_controls=True, num_logprobs=20, num_prompt_logprobs=20),
}
# Device, sequences, prompt tokens, what requests need.
PROGRAMS = (
    ("h200", 256, 2048, "plain"),
    ("h200", 256, 2048, "controls"),
    ("h200", 64, 2048, "prompts"),
)


def config_of(num_seqs: int, num_tokens: int) -> EngineConfig:
    """The pair with two layers each."""
    return engine_config(
        "9b",
        "2b",
        num_layers=2,
        num_speculative_tokens=NUM_DRAFT_TOKENS,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        num_gpu_blocks_override=4096,
    )


def measure() -> Iterator[dict[str, Any]]:
    """Compile one after the other."""
    for device, seqs, tokens, form in tqdm(PROGRAMS, unit="program"):
        config = config_of(seqs, tokens)
        program, forms = describe(config, describe_mesh(device, config))
        shapes = Shapes(config, Controller(config.speculative))
        shape = shapes.all(features=[FEATURES[form]])[0]
        with aot_tpu.no_compilation_cache():
            compiled: Any = lower_step(program, shape, forms).compile()
        told = compiled.memory_analysis()
        yield {
            "device": device,
            "program": shape.name,
            "form": form,
            "num_seqs": seqs,
            "num_batched_tokens": tokens,
            "num_draft_tokens": NUM_DRAFT_TOKENS,
            "temp_bytes": told.temp_size_in_bytes,
            "code_bytes": told.generated_code_size_in_bytes,
        }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    rows = list(measure())
    versions = aot_gpu.versions()
    text = json.dumps({"versions": versions, "rows": rows}, indent=2)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
