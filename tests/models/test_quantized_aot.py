"""Quantized layers of 2B, compiled for devices that are not here: none is widened.

XLA converts values within the fusion of the dot that reads them. What it would cost
otherwise is what is gained: a matrix of bfloat16, written and read again. Not so for
int4 on a GPU: there XLA widens the matrices of attention by themselves.
"""

from typing import Any

import jax
import pytest

from benchmarks.compile_costs import engine_config
from jaxspec.engine.described import describe, describe_mesh
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.step import lower_step
from jaxspec_checkpoints.quantization import stored_bytes
from tests.batteries import members
from tests.kernels import aot_gpu, aot_tpu
from tests.program import hlo

# One kind of layer and the other: bfloat16 takes 85 MB of `gate_up_proj`, and int8
# 4.7 MB of the smallest matrix: on a TPU there is room for no second one of any.
NUM_LAYERS = 2
TEMP_BYTES = {"v5e-1": 2**22, "h200": 2**26}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("devices", "kind"),
    members(
        "quantized",
        [
            ("v5e-1", "int8"),
            ("v5e-1", "int4"),
            ("v5e-1", "fp8"),
            ("h200", "int8"),
            ("h200", "fp8"),
        ],
        is_example=lambda case: case == ("v5e-1", "int8"),
    ),
)
def test_no_matrix_of_2b_is_widened_in_memory(devices, kind):
    reason = aot_gpu.missing() if devices == "h200" else aot_tpu.MISSING
    if reason is not None:
        pytest.skip(reason)
    config = engine_config(
        "2b",
        num_layers=NUM_LAYERS,
        quantization=kind,
        dtype="bfloat16",
        max_num_seqs=8,
        num_gpu_blocks_override=512,
    )
    program, forms = describe(config, describe_mesh(devices, config))
    shape = StepShape(
        num_seqs=8, num_draft_tokens=0, chunk=0, features=Features(is_greedy=True)
    )
    with aot_tpu.no_compilation_cache():
        compiled: Any = lower_step(program, shape, forms).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    print(devices, kind, memory)
    target: Any = forms[0]
    layers = target["layers"]
    assert hlo.dequantized(text, layers) == []
    assert memory.temp_size_in_bytes < TEMP_BYTES[devices]
    # What is read: values of 8 or 4 bits, and scales.
    held = sum(
        stored_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(target)
    )
    assert memory.argument_size_in_bytes - hlo.local_bytes(forms[2]) < 1.01 * held
