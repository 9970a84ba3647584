"""With `batch_invariant`, a GPU multiplies in one way for every K and any neighbours.

One program serves all launches of a form, and no product is parted into several sums,
which XLA would choose by the number of rows. Compiled for an H200 that is not there.
"""

import itertools
from typing import Any

import pytest

from jaxspec.engine.memory.device_descriptions import describe, describe_mesh
from jaxspec.engine.runner import options_of
from jaxspec.engine.scheduling.shapes import SAMPLED, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.step import lower_step
from tests.batteries import members
from tests.kernels import aot_gpu, aot_tpu
from tests.program import hlo
from tests.program.aot_record import engine_config

NUM_SEQS = 8
CASES = [(None, True), ("2b", True), ("2b", False)]


@pytest.mark.aot
@pytest.mark.skipif(aot_gpu.missing() is not None, reason=str(aot_gpu.missing()))
@pytest.mark.parametrize(
    ("draft", "is_invariant"),
    members("invariant", CASES, is_example=lambda case: case == CASES[0]),
)
def test_products_are_the_same_for_every_k_and_batch(draft, is_invariant):
    config = engine_config(
        "2b",
        draft,
        num_layers=1,
        dtype="bfloat16",
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=768,
        batch_invariant=is_invariant,
    )
    mesh = describe_mesh("h200", config)
    program, forms = describe(config, mesh)
    shapes = Shapes(config, SpeculationPolicy(config.speculative))
    drafts = range(config.num_draft_tokens + 1)
    found = {
        shapes.find(num_seqs, k, 0, SAMPLED)
        for num_seqs, k in itertools.product(range(1, NUM_SEQS + 1), drafts)
    }
    dots = []
    for shape in found if is_invariant else [shapes.find(1, 0, 0, SAMPLED)]:
        assert shape is not None
        lowered = lower_step(program, shape, forms)
        with aot_tpu.no_compilation_cache():
            compiled: Any = lowered.compile(options_of(config, mesh))
        dots.append(hlo.dots(compiled.as_text()))
    print(dots)
    # Whatever K and the batch are, these; else XLA parts some into 4 or 16 sums.
    assert (len(found) == 1) == is_invariant
    assert all(len(sizes) == 2 for sizes in dots[0]) == is_invariant
