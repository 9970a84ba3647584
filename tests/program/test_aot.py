"""Step programs for TPUs and GPUs fit, work in place and copy nothing large.

Compilers report memory, kernels, collectives and moves of programs without the devices;
nothing runs. `RECORDS` has the reports on whole programs and the limits of each;
`make test` compiles a few again, long suites the others.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxspec.engine.memory.device_descriptions import describe_mesh, named_limit
from jaxspec.engine.scheduling.programs import SAMPLED, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.plan import Features, StepShape
from jaxspec.sharding import make_mesh
from tests.long_suites import members
from tests.program import (
    aot_dflash,
    aot_h200,
    aot_hosts,
    aot_pairs,
    aot_step,
    aot_trees,
    hlo,
)
from tests.program.aot_hosts import NUM_CHIPS, NUM_HOSTS
from tests.program.aot_record import (
    FOLDER,
    compile_step,
    engine_config,
    skip_without_compiler,
)
from tests.program.aot_step import PLACES, num_attentions

Row = dict[str, Any]
PAGE = FOLDER.parent / "compilers.md"
GREEDY = Features(all_greedy=True)

# Peak memory of a chip, without arguments. Rounds need logits, hidden rows and weights
# that the compiler prefetches. Not `temp_bytes`: on TPU that counts each such copy (XLA
# slices a weight into four) twice, and doubles if more weights are prefetched.
PEAK_BYTES = {"v5e-8": 3 * 2**25, "v5e-8/draft-2": 5 * 2**25}
# Bounds of `temp_bytes` for programs that prefetch few weights in slices.
TEMP_BYTES = {"v6e-1": 2**29, "h200": 2**29, "h100/gemma-3": 2**29}
# A round's logits, 8 x 5 x 256,000 floats on one chip, are the largest move.
LOGITS = 8 * 5 * 256_000 * 4
LARGEST_MOVE = {
    "v5e-8": 2**21, "v5e-8/draft-2": 2**23, "v6e-1": LOGITS, "h200": LOGITS,
    "v5e-1/gemma-3": 2**21, "v6e-1/gemma-3": LOGITS, "v5e-8/gemma-3": 2**23,
    "h100/gemma-3": 8 * 5 * 262_144 * 4,
}  # fmt: skip
# All VMEM of a device.
VMEM_BYTES = {"v5e": 2**27, "v6e": 2**27, "v7x": 2**26}
# Elements of the largest collective: a few per row and candidate. A row of logits would
# have 256,000.
LARGEST_COLLECTIVE = 2**13


def check_in_place(row: Row) -> None:
    """Check that the whole state is updated in place, and that nothing is copied."""
    assert row["donated_bytes"] >= row["state_bytes"], "the state is not in place"
    assert row["copied"] == [], "a weight or a layer's pages are copied"


def check_step(row: Row) -> None:
    check_in_place(row)
    name = row["place"]
    assert row["hbm_bytes"] < PLACES[name].hbm, "it does not fit"
    assert row["peak_bytes"] < PEAK_BYTES.get(name, 2**27), "a high peak"
    assert row["temp_bytes"] < TEMP_BYTES.get(name, math.inf), "large temporaries"
    assert max(row["moves"].values()) <= LARGEST_MOVE[name], "a large move"


def check_hosts(row: Row) -> None:
    """Check that all hosts run one program, and drafts add no sums between hosts."""
    check_in_place(row)
    cell, chips = aot_hosts.CELLS[row["name"]], NUM_CHIPS // NUM_HOSTS
    by_host = [host for host in range(NUM_HOSTS) for _ in range(chips)]
    assert row["processes"] == by_host, "a host's chips are not adjacent"
    assert row["executables"] == 1, "more than one executable"
    assert row["hbm_bytes"] < int(15.75 * 2**30), "it does not fit"
    # Temporaries are the logits of a sixteenth of the vocabulary, and prefetched
    # weights.
    assert row["peak_bytes"] < 2**29
    target, draft = (
        layers or whole for layers, whole in zip(cell.layers, (46, 26), strict=True)
    )
    # Two sums per layer, after attention and after the feed-forward block; one for the
    # embedding, and two to sample from a divided vocabulary.
    of_target = 2 * target + 3
    # The draft model is in the text twice: in the first pass, and in the loop over the
    # others.
    of_draft = 2 * (2 * draft + 3)
    whole = f"all-reduce over {NUM_CHIPS}"
    expected = {whole: of_target, f"all-reduce over {chips}": of_draft}
    if cell.draft_devices != chips:
        # 2B has four KV heads and eight query heads: attention is not split over
        # sixteen chips, and only the feed-forward block needs a sum.
        expected = {whole: of_target + of_draft - 2 * draft}
    assert row["groups"] == expected, "other sums than within a host"


def check_tree(row: Row) -> None:
    """Check that a row's mask is one bit per row of the tree, with a depth."""
    check_in_place(row)
    if row["name"].endswith("/chain"):
        assert row["rows"] == row["nodes"] + 1 == aot_trees.NUM_LEVELS + 1
        return
    words = 1 + math.ceil(row["rows"] / 32)
    most = max(row["mask_operands"].values(), default=0)
    limit = 4 * words * row["rows"] * aot_trees.NUM_SEQS
    assert 0 < most <= limit, "masks are no bits"
    # One constant mask in bytes, which all sequences share, is allowed.
    assert sum(row["squares"].values()) <= 4 * row["rows"] ** 2, "squares in memory"


def check_dflash(row: Row) -> None:
    """Check that a round has one drafter pass, and memory for its logits."""
    check_in_place(row)
    case = aot_dflash.CASES[row["name"]]
    assert row["hbm_bytes"] < aot_dflash.HBM[case.device], "it does not fit"
    num_rows = aot_dflash.NUM_SEQS * case.block_size
    logits = 4 * num_rows * 262_144
    assert max(row["moves"].values(), default=0) <= logits, "a large move"
    assert row["drafter_pages_bytes"] > 0, "no keys and values of the drafter"
    # Every layer calls attention once: keys and values of new context are written
    # without it, and one pass makes all drafts.
    if case.device != "h200":
        assert row["attentions"] == sum(row["layers"]), "more than one pass"


def check_pair(row: Row) -> None:
    """Check that a server's program fits a device, and changes its state in place.

    For a v7x, XLA copies weights that a loop reads into another layout, in every
    launch: those of layers in a loop, and those of the draft model, whose passes are a
    loop. A program without drafts has no weights and no pages of the draft model.
    """
    case = aot_pairs.CASES[row["name"]]
    kind, _, _ = case.devices.partition("-")
    is_relaid = kind == "v7x" or row["name"] == aot_pairs.TRANSPOSED
    assert bool(row["copied"]) == is_relaid, "a weight or a layer's pages are copied"
    if not case.scan_layers:
        width = aot_pairs.config_of(case).model_config.hidden_size
        of_target = [move for move in row["copied"] if width in hlo.shape_of(move)]
        assert of_target == [], "a weight of the target is copied"
    kept = row["argument_bytes"] - row["donated_bytes"] - row["target_bytes"]
    if case.program != "alone":
        kept -= row["draft_bytes"]
    assert 0 <= kept < 2**22, "the state is not in place"
    assert row["hbm_bytes"] < named_limit(case.devices, None), "it does not fit"
    assert 0 < row["vmem_bytes"] < VMEM_BYTES[kind], "an operation does not fit"
    assert 0 < row["lower_cpu_s"] < row["compile_cpu_s"]


def check_h200(row: Row) -> None:
    """Check that a program fits an H200 and an H100 with both models' weights.

    No move may be larger than the logits.
    """
    check_in_place(row)
    fits = aot_h200.fits(row["pair_bytes"])
    assert all(fits.values()), "the pair does not fit"
    assert row["fits"] == fits
    # Temporaries are at most four copies of the logits, and the rows of a layer. At
    # batch 1 the logits are small, so the limit is below a layer's pages.
    logits = row["logits_bytes"]
    assert max(row["moves"].values(), default=0) <= logits, "a large move"
    assert row["peak_bytes"] <= 4 * logits + 2**21, "large temporaries"


STEPS, HOSTS, TREES, DFLASH, PAIRS = (
    module.RECORD.read()
    for module in (aot_step, aot_hosts, aot_trees, aot_dflash, aot_pairs)
)
H200_FILE = json.loads(aot_h200.RESULTS.read_text())
H200 = {row["name"]: row for row in H200_FILE["rows"]}
RECORDS: dict[str, tuple[dict[str, Row], Callable[[Row], None]]] = {
    "step": (STEPS, check_step),
    "hosts": (HOSTS, check_hosts),
    "trees": (TREES, check_tree),
    "dflash": (DFLASH, check_dflash),
    "pairs": (PAIRS, check_pair),
    "h200": (H200, check_h200),
}


@pytest.mark.parametrize("record", RECORDS)
def test_recorded_programs_hold_the_limits(record):
    rows, check = RECORDS[record]
    for row in rows.values():
        check(row)


def test_all_programs_are_recorded():
    assert list(STEPS) == list(PLACES)
    for name, row in STEPS.items():
        whole = aot_step.models(PLACES[name])
        assert row["layers"] == [model.num_layers for model in whole]
    assert list(HOSTS) == list(aot_hosts.CELLS)
    assert list(TREES) == list(aot_trees.CASES)
    assert list(DFLASH) == list(aot_dflash.CASES)
    assert list(PAIRS) == list(aot_pairs.CASES)
    for name, row in DFLASH.items():
        case = aot_dflash.CASES[name]
        assert row["layers"] == [case.num_target_layers(), case.num_drafter_layers]
        assert row["drafts"] == case.block_size - 1
    nodes = {"chain": 5, "leaves": 10, "tree": 16}
    for name, row in TREES.items():
        assert row["nodes"] == nodes[aot_trees.CASES[name].kind]
    wanted = aot_h200.programs(mesh=make_mesh(1))
    assert list(H200) == list(wanted)
    for name, row in H200.items():
        assert row["layers"] == list(wanted[name].layers)
    assert H200_FILE["memory_fraction"] == aot_h200.device.MEMORY_FRACTION


def test_tables_match_the_records():
    text = PAGE.read_text(encoding="utf-8")
    assert aot_hosts.make_table(HOSTS) in text
    assert aot_trees.table(TREES) in text
    assert aot_dflash.table(DFLASH) in text
    assert aot_pairs.make_table(PAIRS) in text


COPIED = {"copied": ["copy bf16[4096,16,16,256]"]}


@pytest.mark.parametrize(
    ("record", "name", "change", "message"),
    [
        ("step", "v6e-1", {"donated_bytes": 0}, "in place"),
        ("step", "v6e-1", COPIED, "are copied"),
        ("step", "v6e-1", {"moves": {"copy f32[8,6,256000]": 1 << 40}}, "large move"),
        ("step", "v6e-1", {"hbm_bytes": 1 << 40}, "not fit"),
        ("step", "v6e-1", {"peak_bytes": 1 << 40}, "high peak"),
        ("step", "v6e-1", {"temp_bytes": 1 << 40}, "large temporaries"),
        ("hosts", aot_hosts.EXAMPLE, {"executables": 2}, "more than one"),
        ("hosts", aot_hosts.EXAMPLE, COPIED, "are copied"),
        ("hosts", aot_hosts.EXAMPLE, {"processes": [0, 1] * 8}, "not adjacent"),
        (
            "hosts",
            aot_hosts.EXAMPLE,
            {"groups": {"all-reduce over 16": 21}},
            "within a host",
        ),
        ("trees", "v6e-1/9b/tree", {"donated_bytes": 0}, "in place"),
        ("trees", "v6e-1/9b/tree", COPIED, "are copied"),
        # A mask with a byte for each pair of rows, or with an element of an MXU
        # operand.
        (
            "trees",
            "v6e-1/9b/tree",
            {"mask_operands": {"s32[8,17,17]": 4 * 8 * 17 * 17}},
            "no bits",
        ),
        (
            "trees",
            "v6e-1/9b/tree",
            {"squares": {"bf16[8,34,17]": 2 * 8 * 34 * 17}},
            "squares",
        ),
        ("dflash", aot_dflash.EXAMPLE, COPIED, "are copied"),
        ("dflash", aot_dflash.EXAMPLE, {"attentions": 37}, "more than one pass"),
        ("dflash", aot_dflash.EXAMPLE, {"drafter_pages_bytes": 0}, "no keys"),
        ("pairs", aot_pairs.FIRST, COPIED, "are copied"),
        (
            "pairs",
            aot_pairs.EVERY_LAYER,
            {"copied": ["copy bf16[10240,2560]"]},
            "of the target is copied",
        ),
        ("pairs", aot_pairs.FIRST, {"donated_bytes": 0}, "in place"),
        ("pairs", aot_pairs.FIRST, {"hbm_bytes": 32 * 2**30}, "not fit"),
        ("pairs", aot_pairs.FIRST, {"vmem_bytes": 2**27}, "operation does not fit"),
        ("h200", "plain/9b/batch 1", {"pair_bytes": 126 * 2**30}, "not fit"),
        ("h200", "plain/9b/batch 1", {"donated_bytes": 0}, "in place"),
        ("h200", "plain/9b/batch 1", COPIED, "are copied"),
        (
            "h200",
            "plain/9b/batch 1",
            {"moves": {"copy f32[8,6,256000]": 1 << 40}},
            "large move",
        ),
        ("h200", "plain/9b/batch 1", {"peak_bytes": 1 << 40}, "temporaries"),
    ],
)
def test_program_beyond_its_limits_is_rejected(record, name, change, message):
    rows, check = RECORDS[record]
    check(rows[name])
    with pytest.raises(AssertionError, match=message):
        check(rows[name] | change)


@pytest.mark.aot
@pytest.mark.parametrize(
    "name", members("step", PLACES, is_example=lambda name: name == "v5e-8/draft-2")
)
def test_pair_compiles(name):
    place, layers, shape = PLACES[name], (None, None), aot_step.SHAPE
    skip_without_compiler(name)
    # The parts of a program repeat by layer, so the place that is always compiled has
    # one layer of each model and no sampling, which takes a third of the time. The
    # record has the whole programs.
    if name == "v5e-8/draft-2":
        layers, shape = (1, 1), dataclasses.replace(shape, features=GREEDY)
    row, text = aot_step.compile_pair(name, shape, layers=layers)
    print(row)
    check_step(row)
    target_layers, draft_layers = row["layers"]
    # Every layer calls attention once per pass. The target has one pass, the draft
    # model two: its first pass, and the body of its loop.
    assert num_attentions(text) >= target_layers + 2 * draft_layers
    if place.devices > 1:
        # Every layer has a sum after attention and one after the feed-forward block.
        target, draft = (model.hidden_size for model in aot_step.models(place))
        sums = row["all_reduces"]
        assert of_width(sums, "f32", target, draft) == {
            f"f32[40,{target}]": 2 * target_layers,
            f"f32[16,{draft}]": 2 * draft_layers,
            f"f32[8,{draft}]": 2 * draft_layers,
        }
        assert of_width(sums, "bf16", target, draft) == {
            f"bf16[40,{target}]": 1, f"bf16[16,{draft}]": 1, f"bf16[8,{draft}]": 1
        }  # fmt: skip
        largest = hlo.largest_collective(text, but=(target, draft))
        assert largest <= LARGEST_COLLECTIVE


def of_width(sums: dict[str, int], kind: str, *widths: int) -> dict[str, int]:
    """Return the sums over chips of hidden rows of a type, by shape."""
    pattern = rf"^{kind}\[\d+,({'|'.join(map(str, widths))})\]"
    return {shape: count for shape, count in sums.items() if re.search(pattern, shape)}


@pytest.mark.aot
@pytest.mark.long_suite(name="hosts")
@pytest.mark.parametrize("name", aot_hosts.CELLS)
def test_multihost_program_compiles(name):
    skip_without_compiler("v5e")
    check_hosts(aot_hosts.measure(name))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("device", "kept"),
    [
        *((device, "auto") for device in aot_trees.DEVICES),
        ("h200", "int8"),
        ("v6e-1", "int8"),
    ],
)
def test_accepted_kv_rows_are_moved_in_place(device, kept):
    skip_without_compiler(device)
    copied, in_place, page_bytes = aot_trees.moved_in_place(device, kept)
    assert copied == []
    assert in_place >= page_bytes


@pytest.mark.aot
@pytest.mark.long_suite(name="trees")
@pytest.mark.parametrize(
    "name", [one for one in aot_trees.CASES if not one.endswith("/chain")]
)
def test_tree_round_compiles(name):
    skip_without_compiler(aot_trees.CASES[name].device)
    row = aot_trees.measure(aot_trees.CASES[name])
    print(json.dumps(row))
    check_tree(row)


@pytest.mark.aot
@pytest.mark.long_suite(name="trees")
@pytest.mark.parametrize(
    ("kind", "kept"), [("chain", "int8"), ("leaves", "int8"), ("chain", "fp8")]
)
def test_eight_bit_pages_are_updated_in_place(kind, kept):
    """Pages of both models, and scales, are written and read in place.

    If a layer's pages fit into on-chip memory, XLA may move them there and back, which
    is not a copy in HBM: `hlo.copied` ignores it. These do not fit: the draft's take
    134 MB, a v6e has 128.
    """
    name = f"v6e-1/9b/{kind}"
    case = aot_trees.CASES[name]
    skip_without_compiler(case.device)
    row = aot_trees.measure(case, kv_cache_dtype=kept)
    print(json.dumps(row))
    check_tree(row)
    # The pages hold as many values as in bfloat16, in half the bytes; int8 has scales
    # as well.
    wide = TREES[name]["state_bytes"]
    assert 0.5 * wide < row["state_bytes"] < 0.51 * wide
    # With two layers per model, a move of one layer's pages in any shape would be at
    # least this large.
    smallest = aot_trees.NUM_PAGES * case.config().page_size * 8 * 256
    assert max(row["moves"].values()) < smallest


@pytest.mark.aot
@pytest.mark.parametrize(
    "name",
    members(
        "step", aot_dflash.CASES, is_example=lambda name: name == aot_dflash.EXAMPLE
    ),
)
def test_dflash_round_compiles(name):
    case = aot_dflash.CASES[name]
    skip_without_compiler(case.device)
    num_layers = 2 if name == aot_dflash.EXAMPLE else None
    row = aot_dflash.measure(case, num_layers)
    print(json.dumps(row))
    check_dflash(row)


@pytest.mark.aot
@pytest.mark.long_suite(name="h200")
@pytest.mark.parametrize(
    "name", ["plain/27b/batch 8", "pass/9b/batch 1/K 0", "round/9b-2b/K 8"]
)
def test_gpu_benchmark_program_compiles(name):
    skip_without_compiler("h200")
    program = aot_h200.programs(mesh=aot_h200.gpu(), layers=(1, 1))[name]
    row, text = aot_h200.compile_program(name, program)
    print(row)
    check_h200(row)
    # Every layer calls attention once per pass. The target has one pass, the draft
    # model two: its first pass, and the body of its loop.
    num_passes = sum(program.layers) + sum(program.layers[1:])
    assert num_attentions(text) >= num_passes
    # The program computes all logits, even if it returns no token.
    assert re.search(r"= \w+\[(?:\d+,)*256000\]", text)


# Device, draft model, and the maximum number of rounds in a launch.
SCANNED = [
    ("v6e-1", None, 1), ("v6e-1", "2b", 1), ("v5e-8", "2b", 1), ("h200", "2b", 1),
    ("v6e-1", "2b", 8),
]  # fmt: skip


@pytest.mark.aot
@pytest.mark.long_suite(name="scanned")
@pytest.mark.parametrize(("devices", "draft", "max_rounds"), SCANNED)
def test_scanned_layers_read_weights_and_pages_in_place(devices, draft, max_rounds):
    """For TPUs only.

    XLA:GPU copies every layer's weights out of their stacks, with any use of the
    products, and even with its fusions of dynamic slices enabled.
    """
    skip_without_compiler(devices)
    num_layers = 4  # of both models: two turns, since one turn would need no loop
    config = engine_config(
        "9b",
        draft,
        num_layers=num_layers,
        scan_layers=True,
        dtype="bfloat16",
        tensor_parallel_size=8 if devices == "v5e-8" else 1,
        max_num_seqs=8,
        num_gpu_blocks_override=768,
    )
    k = 4 if draft else 0
    shape = StepShape(
        num_seqs=8,
        num_levels=k,
        max_prompt_tokens=0,
        features=GREEDY,
        max_rounds=max_rounds,
    )
    step = compile_step(config, describe_mesh(devices, config), shape)
    target, drafts, state = step.forms
    stacks = [model["layers"] for model in (target, *drafts)]
    is_gpu = devices == "h200"
    assert bool(hlo.taken_out(step.text, stacks)) == is_gpu
    assert hlo.copied(step.text, (stacks, state.target_pages, state.proposers)) == []
    # Logits of 40 rows are 41 MB; one layer's `gate_up_proj` of the 9B is 205 MB.
    assert step.facts["temp_bytes"] < 2**27 * (2 if is_gpu else 1)
    assert step.facts["donated_bytes"] >= step.facts["state_bytes"]
    # A kernel for each layer of a pair: the target's pass, the draft's first and the
    # one in its loop.
    kernels = 2 * (3 if draft else 1)
    if not is_gpu:
        assert kernels <= step.facts["kernels"] < kernels + 2 * num_layers


@pytest.mark.aot
@pytest.mark.long_suite(name="scanned")
@pytest.mark.parametrize(
    ("device", "target", "draft", "scan_layers"),
    [
        ("v5e-1", "google/gemma-3-4b-it", "google/gemma-3-270m-it", False),
        ("v6e-1", "google/gemma-3-4b-it", "google/gemma-3-270m-it", False),
        # XLA copies the draft model's weights: see `check_pair`.
        ("v7x-2", "google/gemma-3-4b-it", None, False),
        ("v6e-1", "google/gemma-3-4b-it", None, True),
        # An H100 runs the same program.
        ("h200", "google/gemma-3-4b-it", "google/gemma-3-270m-it", False),
        ("h200", "9b", "2b", False),
    ],
)
def test_pages_of_windows_are_updated_in_place(device, target, draft, scan_layers):
    """Local and global layers share arrays, and no array is copied."""
    skip_without_compiler(device)
    # A global layer with its local layers, and a local layer with its own array; in a
    # loop, two turns of the former.
    period = 2 if target == "9b" else 6
    config = engine_config(
        target,
        draft,
        num_layers=2 * period + 1 if scan_layers else period + 1,
        scan_layers=scan_layers,
        dtype="bfloat16",
        max_num_seqs=8,
        max_model_len=8192,
        num_gpu_blocks_override=2400,
        disable_hybrid_kv_cache_manager=False,
    )
    assert config.unit_pages == period - 1
    k = 4 if draft else 0
    shape = StepShape(num_seqs=8, num_levels=k, max_prompt_tokens=0, features=GREEDY)
    step = compile_step(config, describe_mesh(device, config), shape)
    pages = step.forms[2].target_pages, step.forms[2].proposers
    arrays = [array.shape[0] for array in jax.tree.leaves(pages)]
    turns = 2 if scan_layers else 1
    expected = [2400 * (period - 1) * turns, 2400]
    assert arrays == expected * (2 if draft else 1), arrays
    check_in_place(step.facts)
    assert num_attentions(step.text) >= (period + 1) * (3 if draft else 1)


@pytest.mark.aot
@pytest.mark.long_suite(name="invariant")  # each takes half a minute
@pytest.mark.parametrize(
    ("draft", "is_invariant"), [(None, True), ("2b", True), ("2b", False)]
)
def test_products_are_the_same_for_every_k_and_batch(draft, is_invariant):
    """With `batch_invariant`, one program serves all launches of a form on a GPU.

    No product is split into several sums (4 or 16), which XLA would do depending on the
    number of rows.
    """
    skip_without_compiler("h200")
    config = engine_config(
        "2b",
        draft,
        num_layers=1,
        dtype="bfloat16",
        max_num_seqs=8,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=768,
        batch_invariant=is_invariant,
    )
    shapes = Shapes(config, SpeculationPolicy(config.speculative))
    found = {
        shapes.find(num_seqs, k, 0, SAMPLED)
        for num_seqs in range(1, 9)
        for k in range(config.max_draft_tokens + 1)
    }
    assert (len(found) == 1) == is_invariant
    [shape] = found if is_invariant else [shapes.find(1, 0, 0, SAMPLED)]
    assert shape is not None
    mesh = describe_mesh("h200", config)
    text = compile_step(config, mesh, shape, has_options=True).text
    assert all(len(sizes) == 2 for sizes in hlo.dots(text)) == is_invariant
