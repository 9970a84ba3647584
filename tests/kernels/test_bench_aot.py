"""The benchmark's loops, compiled for a GPU, read what they say in every call."""

import functools
import re

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.kernels import work as bench_work
from benchmarks.kernels.clock import loop_of
from jaxspec_kernels.rejection_sampling.cases import Case as SamplingCase
from tests.batteries import members
from tests.kernels import aot_gpu, aot_tpu


@pytest.mark.aot
@pytest.mark.skipif(aot_gpu.missing() is not None, reason=str(aot_gpu.missing()))
@pytest.mark.parametrize(
    "controls",
    members(
        "kernel_benchmark",
        bench_work.CONTROLS,
        is_example=lambda name: name == "greedy",
    ),
)
def test_no_read_of_logits_is_moved_out_of_the_loop(controls):
    """On a GPU: a read that depends on no result could be made once for all calls."""
    case = SamplingCase(seqs=1, drafts=5, vocab_size=32_768, columns=32_768)
    one = NamedSharding(aot_gpu.mesh(), PartitionSpec())
    work = bench_work.sampling(case, controls, "float32", logit_bytes=2 * 6 * 4 * 32768)
    assert len(work.turns) == 2
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one),
        (work.carry, *work.turns),
    )
    run = functools.partial(work.run, implementation="reference")
    loop = loop_of(work.step(run), 2)
    with (
        aot_tpu.no_compilation_cache(),
        jax.sharding.use_abstract_mesh(one.mesh.abstract_mesh),
    ):
        text = jax.jit(loop, donate_argnums=0).lower(*shapes).compile().as_text()
    assert text is not None
    entry = text[text.index("\nENTRY") :].splitlines()[2:]
    names = "parameter|tuple|get-tuple-element|bitcast|while"
    made = [line for line in entry if not re.search(rf" ({names})\(", line)]
    assert any(" while(" in line for line in entry)
    reads = [line for line in made if re.search(r"\[[0-9,]*32768\]", line)]
    assert not reads
