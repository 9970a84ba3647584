"""Read a compiled program's text: operations that move bytes, and the bytes."""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

# Operations that only move bytes, without computing.
_MOVES = (
    "all-gather", "all-to-all", "collective-permute", "copy", "reduce-scatter",
    "transpose",
)  # fmt: skip
# Operations that only name values, without writing.
_NAMES = ("bitcast", "conditional", "get-tuple-element", "parameter", "tuple", "while")
_COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter",
)  # fmt: skip
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "s8": 1, "u8": 1}
# An upper bound: two 4-bit values share a byte.
_BYTES |= {"f8e4m3fn": 1, "s4": 1, "u4": 1}
_QUANTIZED = ("int8", "int4", "uint4", "float8_e4m3fn")
# Matches the result's shape, or several shapes in parentheses, and the operation's
# name.
_OPERATION = re.compile(r" = (\(.*?\)|\S+) ([a-z][\w-]*)\(")
# Matches the name of the computation that a fusion calls.
_FUSION = re.compile(r" fusion\(.*?calls=%([\w.-]+)")
_NOTHING = (0, "u8[]", "")
# One line per operation, in StableHLO and in HLO.
_ANY_OPERATION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+(?:, %[\w.-]+|:\d+)* = ", re.MULTILINE
)
# A part of jax's error about a program text that it cannot parse.
_UNREADABLE = "async-update instruction"
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{(\S*?)\})?")


def num_operations(text: str) -> int:
    """Count the operations in a program's text, in StableHLO or in HLO."""
    return len(_ANY_OPERATION.findall(text))


def text_of(compiled: Any) -> str | None:
    """Return the text of a compiled program; None if jax cannot parse it.

    jax 0.10.2 cannot parse libtpu 0.0.52's programs of large batches for a v6e.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        if _UNREADABLE not in str(error):
            raise
        return None


def facts(
    compiled: Any, *, state: Any = (), kept: Any = (), text: str | None = None
) -> dict[str, Any]:
    """Return a compiler's report on one program, for one chip.

    Args:
        state: Arrays that are updated in place.
        kept: Arrays, such as weights and pages, that may not be copied.
        text: Text of the program, if `compiled` cannot provide it.
    """
    memory, text = compiled.memory_analysis(), text or compiled.as_text()
    assert text is not None
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return dict(
        executables=len(re.findall(r"^HloModule ", text, re.MULTILINE)),
        compiled_ops=num_operations(text),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        # Largest memory in use at a time, without the arguments.
        peak_bytes=memory.peak_memory_in_bytes - memory.argument_size_in_bytes,
        code_bytes=code,
        # The sum of arguments, results that are not donated, temporaries and code.
        hbm_bytes=used + code,
        donated_bytes=memory.alias_size_in_bytes,
        state_bytes=local_bytes(state),
        kernels=num_kernels(text),
        all_reduces=all_reduces(text),
        collectives=collectives(text),
        moves=largest(moves(text)),
        copied=copied(text, kept),
    )


def local_bytes(tree: Any) -> int:
    """Return the bytes that arrays of these shapes take on one chip."""
    return sum(_local_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _operations(text: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield name, shape, bytes and layout of every operation's largest result."""
    for line in text.splitlines():
        found = _OPERATION.search(line)
        if found is None:
            continue
        results, name = found.groups()
        arrays = []
        for kind, sizes, layout in _ARRAY.findall(results):
            count = math.prod(int(size) for size in sizes.split(",") if size)
            bytes_ = count * _BYTES.get(kind, 4)
            arrays.append((bytes_, f"{kind}[{sizes}]", layout))
        # The results of an asynchronous operation include its operands. A gather's
        # operands are smaller than its result, and a copy's result comes first.
        size, shape, layout = max(arrays, key=lambda array: array[0], default=_NOTHING)
        yield name, shape, size, layout


def collectives(text: str) -> dict[str, int]:
    """Count the operations between chips, by name and shape."""
    named = [
        (name.removesuffix("-start"), shape) for name, shape, _, _ in _operations(text)
    ]
    counted = collections.Counter(
        f"{name} {shape}" for name, shape in named if name in _COLLECTIVES
    )
    return dict(sorted(counted.items()))


def all_reduces(text: str) -> dict[str, int]:
    """Count the sums over chips, by shape."""
    found = [(*key.split(" "), count) for key, count in collectives(text).items()]
    return {shape: count for name, shape, count in found if name == "all-reduce"}


def bytes_of(move: str) -> int:
    """Return the bytes of the array in an entry of `moves`."""
    [(kind, *_)] = _ARRAY.findall(move)
    return math.prod(shape_of(move)) * _BYTES.get(kind, 4)


def largest_collective(text: str, *, but: tuple[int, ...]) -> int:
    """Return the elements of the largest collective that is not of hidden rows.

    Hidden rows of a layer are those of the width `but`.
    """
    sizes = [0]
    for name, shape, _, _ in _operations(text):
        dimensions = sizes_of(shape)
        is_hidden = bool(dimensions) and dimensions[-1] in but
        if name.removesuffix("-start") in _COLLECTIVES and not is_hidden:
            sizes.append(math.prod(dimensions))
    return max(sizes)


def _as_slots(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of pages that a scatter writes: page and slot axes merged."""
    return (shape[0] * shape[1], *shape[2:]) if len(shape) == 4 else shape


def shape_of(move: str) -> tuple[int, ...]:
    """Return the dimensions of the array in an entry of `moves`."""
    sizes = re.sub(r".*\[(.*)\]", r"\1", move).split(",")
    return tuple(int(size) for size in sizes if size)


def sizes_of(move: str) -> tuple[int, ...]:
    """Return the sorted dimensions of an entry's array.

    Sorted, because a transposed weight is a copy too.
    """
    return tuple(sorted(shape_of(move)))


def moves(text: str) -> dict[str, int]:
    """Return the operations that only move data, with their bytes.

    A fusion inside a fusion writes nothing: it names an operand in another layout.
    """
    return {
        f"{name} {shape}": size
        for name, shape, size, layout in _operations(_without_nested(text))
        # XLA fetches weights to on-chip memory, S(1), before it needs them: not a move.
        if name.removesuffix("-start") in _MOVES and "S(1)" not in layout
    }


def largest(found: dict[str, int], count: int = 8) -> dict[str, int]:
    """Return the `count` entries with the most bytes."""
    order = sorted(found, key=lambda move: -found[move])
    return {move: found[move] for move in order[:count]}


def copied(text: str, tree: Any) -> list[str]:
    """Moves whose array has the dimensions of a weight or of a layer's pages.

    Vectors are left out: other arrays have the same number of elements.
    """
    kept = set()
    for leaf in jax.tree.leaves(tree):
        local = leaf.sharding.shard_shape(leaf.shape)
        if len(local) < 2:
            continue
        kept |= {tuple(sorted(local)), tuple(sorted(_as_slots(local)))}
    return [move for move in moves(text) if sizes_of(move) in kept]


def taken_out(text: str, stacks: Any) -> list[str]:
    """Operations that write one entry of a stack to memory.

    Args:
        stacks: A tree of arrays; their first axis counts the entries.
    """
    entries = set()
    for leaf in jax.tree.leaves(stacks):
        local = leaf.sharding.shard_shape(leaf.shape)[1:]
        if len(local) > 1:
            entries.add(tuple(sorted(size for size in local if size > 1)))
    return [
        f"{name} {kind}[{sizes}]"
        for name, kind, sizes in _written(text)
        if tuple(size for size in sizes_of(f"{kind}[{sizes}]") if size > 1) in entries
    ]


def dequantized(text: str, params: Any) -> list[str]:
    """Return operations that write a quantized weight as 16 or 32-bit floats."""
    sizes = set()
    for leaf in jax.tree.leaves(params):
        local = leaf.sharding.shard_shape(leaf.shape)
        if len(local) > 1 and leaf.dtype.name in _QUANTIZED:
            sizes.add(math.prod(local))
    return [
        f"{name} {kind}[{shape}]"
        for name, kind, shape in _written(text)
        if kind in ("bf16", "f16", "f32")
        and name not in _NAMES
        and math.prod(shape_of(f"{kind}[{shape}]")) in sizes
    ]


def squares(text: str, side: int) -> dict[str, int]:
    """Arrays in memory with an element for each pair of `side` rows, with their bytes.

    Their last two dimensions are `side`, or a multiple of it and `side`.
    """
    found = {}
    for _, kind, sizes in _written(text):
        shape = shape_of(f"{kind}[{sizes}]")
        if len(shape) > 1 and shape[-1] == side and shape[-2] % side == 0:
            found[f"{kind}[{sizes}]"] = bytes_of(f"{kind}[{sizes}]")
    return found


def kernel_operands(text: str, kernel: str) -> list[list[str]]:
    """Operands of each launch of one of our kernels: types and dimensions."""
    made = dict(re.findall(r"%([\w.-]+) = (\w+\[[\d,]*\])", text))
    calls = [
        line
        for line in text.splitlines()
        if num_kernels(line) and re.search(rf'op_name="[^"]*/{kernel}[/"]', line)
    ]
    return [
        [made[name] for name in re.findall(r"%([\w.-]+)", _arguments(line))]
        for line in calls
    ]


def _arguments(call: str) -> str:
    [found] = re.findall(r" custom-call\((.*?)\), custom_call_target", call)
    return found


def _written(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, type and dimensions of the arrays that operations write to memory.

    Operations inside a fusion write nothing, and S(1) is on-chip memory.
    """
    fused = set(_FUSION.findall(text))
    for computation, line in _lines(text):
        operation = _OPERATION.search(line)
        if operation is None or computation in fused:
            continue
        results, name = operation.groups()
        if name not in _NAMES:
            for kind, sizes, layout in _ARRAY.findall(results):
                if "S(1)" not in layout:
                    yield name, kind, sizes


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield every line with the name of its computation."""
    computation = ""
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if header is not None:
            computation = header[1]
        yield computation, line


def _without_nested(text: str) -> str:
    """Leave out the computations of fusions inside fusions."""
    called = collections.defaultdict[str, set[str]](set)
    for computation, line in _lines(text):
        called[computation].update(_FUSION.findall(line))
    fused = {name for names in called.values() for name in names}
    nested = {name for one in fused for name in called.get(one, ())}
    return "\n".join(line for one, line in _lines(text) if one not in nested)


def dots(text: str) -> dict[tuple[int, ...], int]:
    """Count the matrix products by the dimensions of their results."""
    found = re.findall(r" = \w+\[([\d,]*)\]\S* dot\(", text)
    return collections.Counter(
        tuple(int(size) for size in sizes.split(",") if size) for sizes in found
    )


def num_kernels(text: str) -> int:
    """Number of launches of our kernels in the text."""
    target = r'custom_call_target="(?:tpu_custom|__gpu\$xla\.gpu)'
    return len(re.findall(target, text))
