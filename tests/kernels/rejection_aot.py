"""Compile rejection sampling for chips that this machine lacks.

`python -m tests.kernels.rejection_aot` writes `benchmarks/results/aot_rejection.json`.
Nothing runs: no figure here is a time.
"""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxspec_kernels.rejection_sampling import SamplingValues, gpu, tpu
from jaxspec_kernels.rejection_sampling.cases import CASES, Case
from jaxspec_kernels.rejection_sampling.passes import VocabShard
from tests.kernels import aot_gpu, aot_tpu
from tests.kernels.aot_reports import compile_lowered

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "aot_rejection.json"
# Kinds of batches. Sampling values that a kind does not use are constants, so that XLA
# removes their computation.
KINDS = ("greedy", "standard", "top_p", "everything")
GPUS = ("h200", "b200")
GOAL = Case(seqs=1, drafts=5, vocab_size=256_000, columns=256_000)  # six rows of logits
FLOATS, INTS = jnp.float32, jnp.int32


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's report on the whole operation on one chip."""

    logits_bytes: int
    temp_bytes: int
    made: tuple[str, ...]  # operations whose results have a vocabulary of columns
    launches: int = 0  # GPU: kernels and copies of all branches
    kernels: tuple[aot_gpu.Kernel, ...] = ()


def shapes(
    case: Case, place: Callable[[PartitionSpec], Sharding], columns: int, dtype: Any
) -> list[Any]:
    """Return the arguments of `operation`; logits have one row per token.

    The draft's probabilities are stacked by step in memory, as the drafting loop leaves
    them. XLA:TPU would first copy any other layout to this one.
    """
    seqs, drafts = case.seqs, case.drafts
    deep = place(PartitionSpec(None, None, "model"))
    steps = jax.ShapeDtypeStruct(
        (seqs, drafts, columns),
        FLOATS,
        sharding=Format(Layout((1, 0, 2)), deep) if drafts else deep,
    )

    def array(kind: Any, *shape: int, spec: tuple = ()) -> Any:
        placement = place(PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, kind, sharding=placement)

    floats = array(FLOATS, seqs)
    return [
        array(dtype, seqs * (drafts + 1), columns, spec=(None, "model")),
        steps,
        array(INTS, seqs, drafts),
        array(INTS, seqs),
        array(FLOATS, seqs, drafts),
        floats,
        array(jnp.uint32, seqs, drafts + 1, 2),
        SamplingValues(floats, array(INTS, seqs), floats, floats),
    ]


def operation(
    run: Callable, case: Case, kind: str, axis_name: str | None = None
) -> Callable:
    """The operation on one device's slice, with the values of a kind of batch."""

    def call(logits, draft, tokens, num_valid_drafts, accept, sample, words, values):
        seqs, drafts = tokens.shape
        rule = num_valid_drafts
        if kind != "everything":
            off, rule, words = jnp.zeros(seqs, FLOATS), jnp.zeros(seqs, INTS), None
            heat = off if kind == "greedy" else values.temperature
            top_p = values.top_p if kind == "top_p" else off + 1.0
            values = SamplingValues(heat, rule, top_p, off)
        return run(
            tokens,
            draft if drafts else None,
            logits.reshape(seqs, drafts + 1, -1),
            num_valid_drafts,
            values,
            rule=rule,
            accept_uniform=accept,
            sample_uniform=sample,
            noise_words=words,
            vocab_size=case.vocab_size,
            axis_name=axis_name,
        )

    return call


def arrays(text: str, columns: int) -> tuple[str, ...]:
    """Return the arrays of `columns` columns that a program writes.

    Parameters, renamings and arrays inside of fusions, which are never in memory, are
    left out.
    """
    found = set()
    for part in text.split("\n\n"):
        if re.match(r"%?(?:fused_|bitcast_fusion|\S*fused_computation)", part.lstrip()):
            continue
        made = re.findall(rf"= \(?(\w+\[[\d,]*\b{columns}\])\S* ([\w-]+)\(", part)
        found |= {f"{name} {shape}" for shape, name in made}
    names = "parameter", "bitcast", "get-tuple-element", "tuple"
    return tuple(sorted(one for one in found if one.split()[0] not in names))


def _compiled(program: Any, case: Case, columns: int, **more: Any) -> Compiled:
    memory = program.memory_analysis()
    assert memory is not None
    return Compiled(
        logits_bytes=case.seqs * (case.drafts + 1) * columns * 4,
        temp_bytes=memory.temp_size_in_bytes,
        made=arrays(program.as_text(), columns),
        **more,
    )


@cache
def for_tpu(case: Case, chip: str, kind: str = "everything") -> Compiled:
    """Compile for one TPU chip's slice of the vocabulary, without collectives."""
    columns, placement = case.columns // case.shards, aot_tpu.sharding(chip)
    given = shapes(case, lambda _: placement, columns, FLOATS)
    with aot_tpu.no_compilation_cache():
        run = operation(tpu.rejection_sampling, case, kind)
        program = compile_lowered(jax.jit(run).lower(*given))
    return _compiled(program, case, columns)


@cache
def split_for_tpu(case: Case) -> tuple[Compiled, list[int]]:
    """Compile under `shard_map` for eight v5e; also return the sizes of collectives."""
    shards = case.shards
    chips = aot_tpu.mesh("v5e:2x4", (1, 8 // shards, shards))
    given = shapes(case, partial(NamedSharding, chips), case.columns, FLOATS)
    split = jax.shard_map(
        operation(tpu.rejection_sampling, case, "everything", "model"),
        mesh=chips,
        in_specs=jax.tree.map(lambda one: one.sharding.spec, tuple(given)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    with aot_tpu.no_compilation_cache():
        program = compile_lowered(jax.jit(split).lower(*given))
    text = program.as_text()
    assert text is not None
    return _compiled(program, case, case.columns // shards), collectives(text)


def collectives(hlo: str) -> list[int]:
    """Return the number of elements of each collective's result."""
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+"
    found = re.findall(rf"= (.*?) (?:{names})(?:-start)?\(", hlo)
    listed = (dims for types in found for dims in re.findall(r"\w+\[([\d,]*)\]", types))
    return [math.prod(int(n) for n in dims.split(",") if n) for dims in listed]


@cache
def tpu_kernel(case: Case, chip: str, dtype: str = "float32") -> aot_tpu.Compiled:
    """Compile only the kernel of the first pass; report its VMEM."""
    columns = case.columns // case.shards
    placement = aot_tpu.sharding(chip)
    rows = case.seqs * (case.drafts + 1)
    shard = VocabShard(
        columns=columns,
        tile=min(tpu.TILE, columns),
        vocab_size=case.vocab_size,
        axis_name=None,
    )
    given = [
        jax.ShapeDtypeStruct(shape, kind, sharding=placement)
        for shape, kind in (
            ((rows, columns), dtype),
            ((rows,), FLOATS),
            ((rows,), INTS),
        )
    ]
    return aot_tpu.compile_kernel(partial(tpu.statistics, shard), given, pool=0)


@cache
def for_gpu(
    kind: str, case: Case = GOAL, dtype: str = "float32", device: str = "h200"
) -> Compiled:
    """Compile for one GPU; also return the resources of each Triton kernel."""
    chips: Mesh = aot_gpu.mesh(1, device)
    given = shapes(
        case, lambda _: NamedSharding(chips, PartitionSpec()), case.columns, dtype
    )
    run = operation(gpu.rejection_sampling, case, kind)
    program, kernels, launches = aot_gpu.compile_for_gpu(
        run, given, chips, prefix="rejection_sampling_"
    )
    return _compiled(program, case, case.columns, launches=launches, kernels=kernels)


def main() -> None:
    """Compile and write the compilers' reports, of whole operations only for v5e."""
    aot_tpu.use_compilers()
    lines: dict[str, Any] = {
        f"tpu kernel {name} {chip}": {"vmem_bytes": tpu_kernel(case, chip).vmem_bytes}
        for name, case in CASES.items()
        for chip in aot_tpu.CHIPS
    }
    for name, case in CASES.items():
        lines[f"tpu {name} v5e"] = asdict(for_tpu(case, "v5e"))
        if case.shards > 1:
            lines[f"tpu v5e:2x4 {name}"] = asdict(split_for_tpu(case)[0])
    for device in GPUS:
        for kind in KINDS:
            name = f"{device.upper()} 6 rows, {kind}"
            lines[name] = asdict(for_gpu(kind, device=device))
    aot_tpu.write_record(
        RESULTS,
        "programs",
        lines.items(),
        command="python -m tests.kernels.rejection_aot",
        versions=aot_tpu.versions() | aot_gpu.versions(),
    )


if __name__ == "__main__":
    main()
