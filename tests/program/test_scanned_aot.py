"""Scanned layers of full width: a loop reads weights and pages where they lie.

On a TPU. XLA:GPU copies every layer's weights out of their stacks, whatever is made of
the products, and with its fusions of dynamic slices asked for as well.
"""

from typing import Any

import pytest

from jaxspec.engine.memory.device_descriptions import describe, describe_mesh
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.step import lower_step
from tests.batteries import members
from tests.kernels import aot_gpu, aot_tpu
from tests.program import hlo
from tests.program.aot_record import engine_config

# Of both models: two turns, as of one there is no loop.
NUM_LAYERS = 4
# Logits of 40 rows are 41 MB; one layer's `gate_up_proj` of the 9B is 205 MB.
TEMP_BYTES = 2**27
# Devices, draft, and rounds that a launch may run.
CASES = [
    ("v6e-1", None, 1),
    ("v6e-1", "2b", 1),
    ("v5e-8", "2b", 1),
    ("h200", "2b", 1),
    ("v6e-1", "2b", 8),
]


@pytest.mark.aot
@pytest.mark.parametrize(
    ("devices", "draft", "max_rounds"),
    members("scanned", CASES, is_example=lambda case: case == CASES[0]),
)
def test_nothing_is_copied_out_of_a_stack(devices, draft, max_rounds):
    reason = aot_gpu.missing() if devices == "h200" else aot_tpu.MISSING
    if reason is not None:
        pytest.skip(reason)
    config = engine_config(
        "9b",
        draft,
        num_layers=NUM_LAYERS,
        scan_layers=True,
        dtype="bfloat16",
        tensor_parallel_size=8 if devices == "v5e-8" else 1,
        max_num_seqs=8,
        num_gpu_blocks_override=768,
    )
    program, forms = describe(config, describe_mesh(devices, config))
    given: Any = forms
    target, drafts, state = given
    shape = StepShape(
        num_seqs=8,
        num_draft_tokens=4 if draft else 0,
        chunk=0,
        features=Features(is_greedy=True),
        max_rounds=max_rounds,
    )
    with aot_tpu.no_compilation_cache():
        compiled: Any = lower_step(program, shape, forms).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    print(devices, draft, memory)
    stacks = [model["layers"] for model in (target, *drafts)]
    assert bool(hlo.taken_out(text, stacks)) == (devices == "h200")
    assert hlo.copied(text, (stacks, state.target_pages, state.proposers)) == []
    assert memory.temp_size_in_bytes < TEMP_BYTES * (2 if devices == "h200" else 1)
    assert memory.alias_size_in_bytes >= hlo.local_bytes(state)
    # A kernel for each layer of a pair: the target's pass, the draft's first and the
    # one in its loop.
    kernels = 2 * (3 if draft else 1)
    if devices != "h200":
        assert hlo.num_kernels(text) >= kernels
        assert hlo.num_kernels(text) < kernels + 2 * NUM_LAYERS
