"""Sizes that a plan is made from equal those of device arrays and compiler records."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from safetensors.numpy import save_file

from jaxspec.config.engine import GivenSizes
from jaxspec.engine import model_folders, runner
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.loader import make_runner
from jaxspec.engine.memory import probe
from jaxspec.engine.memory.device_descriptions import named_devices, named_mesh
from jaxspec.engine.memory.draft_sharding import OTHER_SUMS
from jaxspec.engine.memory.plan import (
    DEFAULT_UTILIZATION,
    GIB,
    MIB,
    MemoryPlan,
    ModelBytes,
    ProgramFacts,
    Sizes,
)
from jaxspec.engine.memory.probe import (
    bytes_of,
    find_facts,
    fit,
    plan_for,
    ram_bytes,
    spread_draft,
)
from jaxspec.engine.metrics import EngineMetrics, Load
from jaxspec.engine.model_folders import PACKAGED_GEMMA3, model_folder
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.program.plan import StepShape
from jaxspec_checkpoints.layout import EMBEDDING, HEAD
from tests.checkpoints.models import write_tiny
from tests.program import aot_memory, hlo
from tests.program.aot_step import PLACES

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
# Bytes of the weights in bfloat16, as the index files on the Hugging Face Hub add them
# up (27B: from shapes), and of one token's keys and values.
WEIGHT_BYTES = {"2b": 5_228_683_776, "9b": 18_483_411_968, "27b": 54_454_256_640}
KV_BYTES = {"2b": 106_496, "9b": 344_064, "27b": 376_832}
# XLA copies one layer's pages of 27B into the chip's own memory of 128 MiB and back,
# where they fit: in this program of two layers.
FETCHED = {"v5e-8/27b<-2b/64+0/greedy/draft over 8": ["copy-start bf16[65536,4,128]"]}
# Copies of hidden rows of the draft model, two and one of each sequence. They are
# listed because a weight matrix has the same size.
HIDDEN = {
    "v5e-8/27b<-2b/256+512/plain": [
        "transpose bf16[512,2304]",
        "transpose bf16[256,2304]",
    ],
    "v5e-8/27b<-2b/256+512/controls": [
        "transpose bf16[512,2304]",
        "transpose bf16[256,2304]",
        "copy-start f32[512,2304]",
    ],
    "v5e-8/27b<-2b/128+2048/plain": ["transpose bf16[256,2304]"],
}
TINY: dict[str, Any] = dict(
    model="jaxspec/tiny-gemma2", load_format="dummy", dtype="float32"
)


def pair(target: str = "9b", draft: str | None = "2b", **changes: Any) -> EngineArgs:
    drafts: dict[str, Any] = {}
    if draft is not None:
        model = f"google/gemma-2-{draft}-it"
        drafts = dict(speculative_model=model, num_speculative_tokens=5)
    return EngineArgs(model=f"google/gemma-2-{target}", **(drafts | changes))


def test_packaged_file_is_planned_as_stored(monkeypatch):
    """Plan with the sizes in the file of `jaxspec/gemma-3-270m`, which is quantized."""
    tiny = EngineArgs(model="jaxspec/tiny-gemma2")
    folder = model_folder(tiny.model, "model")
    monkeypatch.setitem(model_folders._BUNDLED, PACKAGED_GEMMA3, lambda: folder)
    found = plan_for(EngineArgs(model=PACKAGED_GEMMA3), "h200").facts
    assert found == plan_for(tiny, "h200").facts


# Number of outputs and of features of each matrix in a layer of 2B.
MATRICES = ((2048, 2304), (2048, 2304), (2304, 2048), (18432, 2304), (2304, 9216))


@pytest.mark.parametrize(
    ("kind", "saved", "group"),
    [("int8", 1, None), ("fp8", 1, None), ("int4", 1.5, 128)],
)
def test_quantized_weights_are_counted_as_stored(kind, saved, group):
    plan = plan_for(pair("2b", None, quantization=kind), "h200")
    values = 26 * sum(outputs * features for outputs, features in MATRICES)
    scales = 26 * sum(
        outputs * (features // (group or features)) for outputs, features in MATRICES
    )
    expected = WEIGHT_BYTES["2b"] - int(saved * values) + 4 * scales
    assert plan.facts.target.weight_bytes == expected
    assert f"GiB  {kind} " in plan.table()
    drafted = plan_for(pair(speculative_model_quantization=kind), "h200").facts
    assert drafted.target == plan_for(pair(), "h200").facts.target
    assert drafted.draft.weight_bytes == expected


def test_trimmed_head_is_counted_in_addition_to_the_embedding():
    plain, plan = (
        plan_for(pair(speculative_config=config, max_num_seqs=64), "h100")
        for config in (None, {"draft_vocab_size": 32768})
    )
    head = 32768 * 2304 * 2
    before, draft = plain.facts.draft, plan.facts.draft
    # The trimmed draft also stores the token ids of its head's rows.
    assert draft.weight_bytes == before.weight_bytes + head + 4 * 32768
    assert (before.unread_bytes, draft.unread_bytes) == (0, 256000 * 2304 * 2)
    assert plan.facts.target == plain.facts.target
    assert "GiB  a head of 32,768 of 256,000 tokens" in plan.table()
    options: dict[str, Any] = dict(
        speculative_config={"draft_vocab_size": 32768},
        speculative_model_quantization="int8",
        quantize_embedding=True,
    )
    table = plan_for(pair(**options), "h100").table()
    assert "int8 per output, embedding int8 per row, a head of 32,768" in table


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_untied_head_is_counted(tmp_path, is_quantized):
    """A head counts if the weights have one, unless it equals the embedding."""
    tensors = write_tiny(tmp_path, family="2b", tie_word_embeddings=True)
    changes: dict[str, Any] = {}
    if is_quantized:
        changes = dict(quantization="int8", quantize_embedding=True)

    def weight_bytes() -> int:
        args = EngineArgs(model=str(tmp_path), dtype="bfloat16", **changes)
        return plan_for(args, "h100").facts.target.weight_bytes

    tied, table = weight_bytes(), tensors[EMBEDDING]
    head = table.nbytes // 2
    if is_quantized:
        head = table.size + 4 * len(table)  # a byte per number, a float32 scale per row
    path = tmp_path / "model.safetensors"
    save_file(tensors | {HEAD: table + 1}, path)
    assert weight_bytes() == tied + head
    save_file(tensors | {HEAD: table}, path)
    assert weight_bytes() == tied
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": False})
    )
    path.unlink()
    assert weight_bytes() == tied + head


def test_unread_draft_weights_do_not_add_time():
    config: dict[str, Any] = {"draft_vocab_size": 32768}
    plans = [
        plan_for(pair("27b", tensor_parallel_size=8, speculative_config=one), "v5e-8")
        for one in (None, config)
    ]
    whole, trimmed = (
        plan.draft_sharding.sizes[0] for plan in plans if plan.draft_sharding
    )
    assert whole.devices == trimmed.devices == 8
    # Each device reads its part of a trimmed head instead of 256,000 rows; in addition,
    # every device reads the ids of the rows.
    saved = (256000 - 32768) * 2304 * 2 // 8 - 4 * 32768
    ratio = trimmed.read_s / whole.read_s
    assert ratio == pytest.approx(1 - saved / plans[0].facts.draft.weight_bytes)


def test_jax_share_of_a_gpu_is_respected(monkeypatch):
    for name in runner.POOL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in runner.POOL_VARIABLES:
        monkeypatch.setenv(name, "0.75")
        facts = plan_for(pair(max_num_seqs=64), "h100").facts
        assert facts.limit_bytes == 78 * GIB * 3 // 4
        assert facts.budget_bytes(0.92) == 78 * GIB * 3 // 4
        assert (facts.limit_share, facts.most_share) == (0.75, 0.75)
        assert runner.most_pool_share(0.4) == 0.75
        monkeypatch.delenv(name)
    assert runner.pool_share(None) == runner.most_pool_share(0.4) == 0.95
    assert runner.pool_share(0.4) == pytest.approx(0.45)
    # `build_mesh` sets the same variable, which does not count as the user's share.
    monkeypatch.setenv(runner.POOL_VARIABLES[0], f"{runner.pool_share(0.4):g}")
    assert runner.most_pool_share(0.4) == 0.95


def test_memory_of_lookup_drafts_with_and_without_a_draft_model():
    lookup = dict(method="ngram", prompt_lookup_max=4, num_speculative_tokens=5)
    with_model = dict(method="ngram+draft_model", model="google/gemma-2-2b-it")
    with_model |= dict(num_speculative_tokens=5)
    plain, alone, both = (
        plan_for(pair(draft=None, speculative_config=config), "h100").facts
        for config in (None, lookup, with_model)
    )
    assert alone.draft == ModelBytes()
    programs = alone.programs
    assert (programs.draft_vocab_size, programs.num_levels) == (0, 5)
    assert both.programs.draft_vocab_size > 0
    assert both.programs_without == dataclasses.replace(
        both.programs, draft_vocab_size=0
    )
    assert plan_for(pair(), "h100").facts.programs_without == plain.programs


def test_eight_chips_share_both_models():
    plan = plan_for(pair("27b", tensor_parallel_size=8), "v5e-8")
    facts = plan.facts
    assert (facts.num_devices, facts.limit_bytes) == (8, int(15.75 * GIB))
    # Each chip has two of the 27B's 16 KV heads, and a copy of one of the 2B's four. A
    # page holds the tokens of the local layers or of the global ones.
    assert facts.target.page_bytes == 16 * KV_BYTES["27b"] // 8 // 2
    assert facts.draft.page_bytes == 16 * KV_BYTES["2b"] // 4 // 2
    # Everything is divided except the norms: four in each layer and one at the end.
    norms = 2 * (4 * 46 + 1) * 4608
    assert facts.target.weight_bytes == (WEIGHT_BYTES["27b"] - norms) // 8 + norms
    whole: dict[str, Any] = dict(
        speculative_draft_tensor_parallel_size=1, max_model_len=2048
    )
    # This context is shorter than the window: a page holds the tokens of all layers.
    args = pair("27b", tensor_parallel_size=8, **whole)
    assert plan_for(args, "v5e-8").facts.draft == ModelBytes(
        weight_bytes=WEIGHT_BYTES["2b"],
        page_bytes=16 * KV_BYTES["2b"],
        num_values=WEIGHT_BYTES["2b"] // 2,
    )
    # On a TPU, compiled programs take device memory; on a GPU they are small.
    assert facts.programs.code_bytes > GIB
    assert plan_for(pair(), "h100").facts.programs.code_bytes == 0


def test_rejects_more_devices_than_named():
    with pytest.raises(ConfigError, match="tensor_parallel_size=2, but 1 gpu"):
        plan_for(pair(tensor_parallel_size=2), "h100")


def test_scanned_layers_take_as_much_memory_and_have_longer_arrays():
    """An array has the pages of all layers of a kind; its size is limited on a TPU."""

    def both(device: str, draft: str | None) -> list[MemoryPlan]:
        return [
            plan_for(
                pair(
                    "9b",
                    draft,
                    max_num_seqs=64,
                    scan_layers=scan,
                    disable_hybrid_kv_cache_manager=True,
                ),
                device,
            )
            for scan in (False, True)
        ]

    each, scanned = both("h100", "2b")
    assert scanned.facts.target == each.facts.target
    assert scanned.facts.draft == each.facts.draft
    # A page has 16 tokens with keys and values of eight heads, of four in the draft
    # model. An array has 21 layers (half of 42), and 13 (half of 26).
    layer = 16 * 2 * 8 * 256
    assert each.facts.page_arrays == ((layer // 2, 2), (layer, 2))
    assert scanned.facts.page_arrays == ((13 * layer // 2, 2), (21 * layer, 2))
    assert scanned.num_pages == each.num_pages == 6976
    each, scanned = both("v6e-1", None)
    most = (2**31 - 1) // (21 * layer)
    assert scanned.facts.addressable(each.num_pages) == most == 1560
    assert scanned.num_pages <= most < each.num_pages


def recorded() -> list[tuple[str, ProgramFacts, Sizes, int]]:
    """Return recorded compilations at full size, with the bytes of temporaries."""
    found = []
    for name in ("aot_step", "aot-costs-after"):
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            place = PLACES[row["place"]]
            target, draft = place.pair
            args = EngineArgs(
                model=target,
                speculative_model=draft,
                num_speculative_tokens=4,
                max_num_seqs=8,
                tensor_parallel_size=place.devices,
                speculative_draft_tensor_parallel_size=place.draft_devices,
            )
            device = row["place"].partition("/")[0]
            programs = plan_for(args, device).facts.programs
            if "greedy" in row.get("program", ""):
                programs = dataclasses.replace(programs, draft_vocab_size=0)
            label = f"{name} {row['place']} {row.get('program')}"
            found.append((label, programs, Sizes(8, 128), row["temp_bytes"]))
    alone = {
        size: plan_for(pair(size, None), "h200").facts.programs for size in WEIGHT_BYTES
    }
    for row in json.loads((RESULTS / "aot_h200.json").read_text())["rows"]:
        kind, models, *rest = row["name"].split("/")
        target, _, draft = models.partition("-")
        numbers = dict(one.split() for one in rest if one.count(" ") == 1)
        if "batch" not in numbers or target not in WEIGHT_BYTES:
            continue
        programs = alone[target]
        k = int(numbers.get("K", 0))
        programs = dataclasses.replace(programs, num_levels=k)
        sizes = Sizes(int(numbers["batch"]), 32)
        found.append((f"h200 {row['name']}", programs, sizes, row["temp_bytes"]))
    return found


def test_estimate_is_slightly_above_compiled_size():
    rows = recorded()
    assert len(rows) > 20
    for label, programs, sizes, temp_bytes in rows:
        estimate = programs.temporary_bytes(sizes, has_controls=False)
        assert temp_bytes <= estimate <= temp_bytes + 336 * MIB, label


def test_temporaries_of_a_layer_are_those_of_its_mlp():
    """Temporaries are gate and up in float32 and their product in bfloat16.

    The bytes are from XLA's buffer report. On an H200, a program for 64 sequences of
    27B has 1,337,855,792 bytes of temporaries: the distributions, which exist from the
    start, those three arrays, 10 bytes per value of the model's width, and small
    arrays.
    """
    name = "h200/27b<-2b/64+2048/plain"
    row, facts = aot_memory.read()[name], aot_memory.CELLS[name].facts("h200")
    tokens, hidden, model = 64 * 6 + 2048, 36_864, 4608
    distributions = 4 * 256_000 * 5 * 64
    found = tokens * (2 * 4 * hidden + 2 * hidden + (4 + 4 + 2) * model) + distributions
    assert 0 <= row["temp_bytes"] - found < 2 * MIB
    assert facts.programs.token_bytes == (2 * 4 + 2) * hidden + 4 * 4 * model


@pytest.mark.parametrize("name", aot_memory.read())
def test_large_batches_and_controls_match_compiled_sizes(name: str):
    cell, row = aot_memory.CELLS[name], aot_memory.read()[name]
    facts = cell.facts(cell.device)
    sizes = Sizes(cell.num_seqs, cell.num_tokens)
    has_controls = cell.form in ("controls", "prompts")
    estimate = facts.programs.temporary_bytes(sizes, has_controls=has_controls)
    # A greedy program has no distributions, but the estimate includes them.
    most = estimate if cell.form == "greedy" else 1.5 * row["temp_bytes"] + 320 * MIB
    assert row["temp_bytes"] <= estimate <= most
    # An engine has programs with and without controls, and plans for the larger ones.
    assert facts.programs.temporary_bytes(sizes) >= estimate
    found = row["weight_bytes"], row["page_bytes"]
    assert found == (facts.weight_bytes, facts.page_bytes)
    if "commit" in row:
        return  # older records lack the values below
    # Pages and rows are updated in place, to the last byte except padding. The program
    # copies no weight and no layer's pages.
    assert row["donated_bytes"] >= row["state_bytes"]
    assert row["copied"] == (FETCHED | HIDDEN).get(name, [])
    # Apart from the state, a program returns only the launch's result.
    if "output_bytes" in row:
        result_bytes = row["output_bytes"] - row["donated_bytes"]
        # With controls, the result has 20 logprobs of every row and of prompt tokens.
        assert 0 <= result_bytes < (2**21 if has_controls else 2**16)
        assert row["argument_bytes"] > row["donated_bytes"]


# Common (target, draft) pairs by device. They are recorded at 64, 128 and 256
# sequences, except those in `TOO_LARGE`.
PAIRS = (
    ("v6e-1", "2b", None),
    ("v6e-1", "9b", "2b"),
    ("v5e-8", "27b", "2b"),
    ("h200", "9b", "2b"),
    ("h200", "27b", "2b"),
)
# Combinations whose weights and programs leave too little memory for pages.
TOO_LARGE = {"v6e-1/9b<-2b/128+512/plain", "v6e-1/9b<-2b/256+512/plain"}


def test_pairs_are_recorded_at_every_size_and_fit():
    rows, found = aot_memory.read(), set()
    for name, row in rows.items():
        cell = aot_memory.CELLS[name]
        if cell.form != "plain":
            continue
        key = cell.device, cell.target, cell.draft
        found.add((*key, cell.num_seqs))
        for place in aot_memory.PLACES.get(cell.device, (cell.device,)):
            facts = cell.facts(place)
            taken = facts.weight_bytes + facts.programs.code_bytes + row["temp_bytes"]
            one = facts.pages_per_seq * facts.page_bytes
            # One sequence of maximum length fits the engine's share of the device.
            fits = taken + one <= facts.budget_bytes(DEFAULT_UTILIZATION)
            whole = cell.draft_devices in (None, len(named_devices(cell.device)))
            assert fits == (whole and name not in TOO_LARGE), (name, place)
    wanted = {(*pair, count) for pair in PAIRS for count in (64, 128, 256)}
    assert wanted <= found
    assert any(aot_memory.CELLS[name].form == "controls" for name in rows)


def test_tables_equal_the_record():
    rows = aot_memory.read()
    text = (RESULTS.parent / "compilers.md").read_text(encoding="utf-8")
    for table in (aot_memory.memory_table(rows), aot_memory.sharding_table(rows)):
        assert table in text, "python -m tests.program.aot_memory --table"
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert aot_memory.window_table() in text, "python -m tests.program.aot_memory"


def test_draft_on_fewer_chips_has_less_all_reduce_and_more_memory():
    """A 27B target with a 2B draft on a v5e-8."""
    rows = aot_memory.read()
    weights: dict[int, int] = {}
    for name, row in rows.items():
        cell = aot_memory.CELLS[name]
        if cell.draft_devices is None:
            continue
        expected = aot_memory.draft_sums(cell, row["layers"][1])
        assert aot_memory.counted_draft_sums(row) == expected
        assert (expected[0] == 0) == (cell.draft_devices == 1)
        assert not any("all-gather" in key for key in row["collectives"])
        weights[cell.draft_devices] = row["weight_bytes"]
    assert weights.keys() == {1, 2, 4, 8}
    assert weights[8] < weights[4] < weights[2] < weights[1]
    # One record has all 26 layers of the draft. Each of its five passes has two
    # all-reduces per layer and one for the embedding; the first pass has two rows for
    # each sequence.
    [whole] = [row for row in rows.values() if row["layers"][1] == 26]
    expected = 265, 6 * 64 * 2304 * (4 * 52 + 2)
    assert aot_memory.counted_draft_sums(whole) == expected
    assert aot_memory.draft_sums(aot_memory.CELLS[whole["name"]]) == expected
    # The program's text has two passes of the draft model: the first, and the body of a
    # loop. On several devices the vocabulary is divided, and sampling a token takes
    # eleven small all-reduces in each of the two; on one device it takes none.
    [same] = [
        row
        for name, row in rows.items()
        if row["program"] == whole["program"]
        and aot_memory.CELLS[name].draft_devices == 1
    ]
    eight, one = (
        sum(
            count
            for key, count in row["collectives"].items()
            if hlo.shape_of(key)[1:] not in ((2304,), (4608,))
        )
        for row in (whole, same)
    )
    assert eight - one == 2 * (OTHER_SUMS - 1)


def test_draft_is_spread_over_the_fastest_number_of_devices():
    """Engine, plan and `compile` choose the same number on devices of known kinds."""
    big = pair("27b", tensor_parallel_size=8)
    found = plan_for(big, "v5e-8")
    assert found.draft_sharding is not None
    assert (found.draft_sharding.devices, found.draft_sharding.is_given) == (8, False)
    assert found.table().endswith(found.draft_sharding.line())
    assert found.as_dict()["draft_sharding"]["devices"] == 8
    eight, *_, whole = found.draft_sharding.sizes
    assert eight.num_pages == found.num_pages
    assert eight.read_s == found.facts.draft.weight_bytes / 819e9
    # A draft of 5.2 GB on each chip leaves too little memory for 8,192 tokens.
    assert (whole.devices, whole.num_pages) == (1, None)
    assert whole.read_s == WEIGHT_BYTES["2b"] / 819e9

    given = dataclasses.replace(big, speculative_draft_tensor_parallel_size=2)
    found = plan_for(given, "v5e-8")
    assert found.draft_sharding is not None
    assert (found.draft_sharding.devices, found.draft_sharding.is_given) == (2, True)
    assert found.facts.draft.weight_bytes > 2 * eight.read_s * 819e9

    # With one device there is no choice; for CPUs no speeds are known.
    assert plan_for(pair(), "h100").draft_sharding is None
    assert (
        plan_for(pair("27b", None, tensor_parallel_size=8), "v5e-8").as_dict()[
            "draft_sharding"
        ]
        is None
    )


def test_small_draft_is_on_every_device():
    cell = aot_memory.Cell(device="v5e-8", target="27b", num_seqs=64)
    config = cell.config()
    assert config.draft_model_config is not None
    small = dataclasses.replace(
        config.draft_model_config, num_layers=2, hidden_size=64, intermediate_size=128
    )
    config = dataclasses.replace(config, draft_model_config=small)
    mesh = named_mesh("v5e-8", config)
    assert mesh.shape["model"] == 8
    spread, spread_mesh, sharding = spread_draft(config, mesh, device="v5e-8")
    assert sharding is not None
    # Reading the embedding (256,000 x 64 x 2 bytes) takes 40 us, and each all-reduce at
    # least 7 us.
    assert sharding.devices == 1
    assert spread.speculative is not None
    assert spread.speculative.draft_tensor_parallel_size == 1
    assert dict(spread_mesh.shape) == {"data": 1, "replica": 8, "model": 1}
    assert list(spread_mesh.devices.flat) == list(mesh.devices.flat)
    # A config that was not made from engine arguments counts as the user's choice.
    by_hand = dataclasses.replace(config, given=None)
    _, same_mesh, sharding = spread_draft(by_hand, mesh, device="v5e-8")
    assert sharding is not None
    assert (sharding.is_given, same_mesh.shape["model"]) == (True, 8)


def test_fp8_pages_exclude_one_kv_head_per_device():
    """The 2B has four KV heads: on four or more devices XLA would copy its pages."""
    (config, mesh), (small, small_mesh) = (
        (dataclasses.replace(config, kv_cache_dtype="fp8"), named_mesh("v5e-8", config))
        for size in ("27b", "9b")
        for config in [
            aot_memory.Cell(device="v5e-8", target=size, num_seqs=64).config()
        ]
    )
    _, _, sharding = spread_draft(config, mesh, device="v5e-8")
    assert sharding is not None and sharding.devices in (1, 2)
    # Each device has one of the 9B's own eight KV heads, whatever the draft's number of
    # devices.
    with pytest.raises(UnsupportedError, match="one KV head"):
        spread_draft(small, small_mesh, device="v5e-8")


def test_code_size_matches_compiled_programs():
    costs, sizes = (
        json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        for name in ("aot-costs-after", "aot_memory")
    )
    programs = [
        (row["place"], "prompts" in row["program"], row["code_bytes"]) for row in costs
    ]
    programs += [
        (row["name"].split("/")[0], "+0/" not in row["name"], row["code_bytes"])
        for row in sizes
    ]
    found = dict[tuple[int, bool], list[int]]()
    for place, has_prompts, num_bytes in programs:
        if place == "h200":
            assert num_bytes == 0
        else:
            key = 1 + place.endswith("8"), has_prompts
            found.setdefault(key, []).append(num_bytes)
    assert len(found) == 4
    for (chips, has_prompts), each in found.items():
        most = probe.CODE_BYTES[chips][has_prompts]
        assert 0.9 * most < max(each) <= most, (chips, has_prompts)


def config_of(**changes: Any) -> Any:
    drafts: dict[str, Any] = dict(speculative_model="jaxspec/tiny-gemma2-draft")
    sizes: dict[str, Any] = dict(
        num_speculative_tokens=2, max_num_seqs=2, max_model_len=64
    )
    return EngineArgs(**(TINY | drafts | sizes | changes)).create_engine_config()


@pytest.mark.parametrize(
    ("dtype", "num_devices"),
    [
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
        ("bfloat16", 2),
    ],
)
def test_counted_bytes_equal_array_bytes(dtype: str, num_devices: int):
    config = config_of(dtype=dtype, tensor_parallel_size=num_devices)
    made = make_runner(config)
    facts = find_facts(config, made.mesh, GivenSizes())

    def on_first(tree: Any) -> int:
        first = made.mesh.devices.flat[0]
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == first
        )

    target, (draft,) = made.params
    assert facts.target.weight_bytes == on_first(target)
    assert facts.draft.weight_bytes == on_first(draft)
    pages = config.num_pages
    assert facts.target.page_bytes * pages == on_first(made.state.target_pages)
    assert facts.draft.page_bytes * pages == on_first(made.state.proposers)
    assert bytes_of(made.params) == on_first(made.params)


def test_default_cpu_sizes_are_unchanged(caplog):
    config = config_of(tensor_parallel_size=2)
    with caplog.at_level(logging.INFO, logger="jaxspec"):
        made = make_runner(config)
    assert made.config == config
    assert made.memory is not None
    assert made.memory.facts.limit_bytes is None
    [table] = [one for one in caplog.messages if one.startswith("Memory of")]
    assert table == made.memory.table()
    assert "Maximum concurrency at 64 tokens: 2.00x" in table
    # The plan is made without compiling a program.
    assert (made.num_compiles, made.temporary_bytes) == (0, 0)
    # The draft model is spread like the target.
    assert spread_draft(config, made.mesh) == (config, made.mesh, None)
    assert made.mesh.shape["model"] == 2
    by_hand = dataclasses.replace(config, given=None, num_pages=9)
    assert fit(by_hand, named_mesh("h100-2", config), device="h100-2")[0] == by_hand


def test_cpu_memory_is_planned_if_the_user_sets_a_share(monkeypatch):
    mesh = runner.build_mesh(config_of())
    page = find_facts(config_of(), mesh, GivenSizes()).page_bytes
    config, plan = fit(config_of(kv_cache_memory_bytes=100 * page + 1), mesh)
    assert (config.num_pages, plan.utilization) == (100, None)
    monkeypatch.setattr(probe, "ram_bytes", lambda: 2 * GIB)
    config, plan = fit(config_of(gpu_memory_utilization=0.5), mesh)
    assert plan.facts.limit_bytes == 2 * GIB
    taken = plan.facts.weight_bytes + plan.workspace_bytes + plan.kv_bytes
    assert 0.95 * GIB < taken <= GIB
    assert config.num_pages == plan.num_pages
    # Other engines of the process use the same device memory.
    two = config_of(gpu_memory_utilization=0.5, data_parallel_size=2)
    assert fit(two, mesh)[1].facts.limit_bytes == GIB
    with pytest.raises(ConfigError, match=r"max_num_seqs .* from 1 to 4, got 5"):
        fit(config_of(kv_cache_memory_bytes=4 * page, max_num_seqs=5), mesh)
    given = config_of(num_gpu_blocks_override=7, kv_cache_memory_bytes=100 * page)
    assert fit(given, mesh)[0].num_pages == 7


def test_metrics_report_the_planned_share():
    for given, label in (
        ({}, "0.92"),
        ({"gpu_memory_utilization": 0.5}, "0.5"),
        ({"num_gpu_blocks_override": 9}, "None"),
    ):
        config = config_of(**given)
        config, plan = fit(config, named_mesh("h100", config), device="h100")
        found = EngineMetrics(config, EngineStats(), plan).read(Load())
        (one,) = (one for one in found if one.name == "vllm:cache_config_info")
        assert one.labels["gpu_memory_utilization"] == label


def limit_of(*stats: dict[str, int] | None, given: GivenSizes | None = None) -> Any:
    devices = [SimpleNamespace(memory_stats=lambda one=one: one) for one in stats]
    first = SimpleNamespace(platform="gpu", device_kind="GPU")
    mesh: Any = SimpleNamespace(
        devices=SimpleNamespace(flat=[first]), local_devices=devices
    )
    return probe._limit_and_use(mesh, given or GivenSizes(), None)


def test_memory_of_a_device_is_read_from_its_stats():
    one = dict(bytes_limit=80, bytes_in_use=1)
    assert limit_of(one, dict(bytes_limit=70, bytes_in_use=5)) == (70, 5)
    assert limit_of(one | dict(bytes_in_use=0)) == (80, 0)
    for silent in (None, {}):
        with pytest.raises(
            ConfigError, match="GPU does not report its memory.* set kv_cache_mem"
        ):
            limit_of(silent)
        assert limit_of(silent, given=GivenSizes(num_pages=5)) == (None, 0)
    assert 2**28 < ram_bytes() < 2**50


def executable(temp_bytes: int, code_bytes: int) -> Any:
    """Return the part of a compiled program that the plan reads."""
    analysis = SimpleNamespace(
        temp_size_in_bytes=temp_bytes, generated_code_size_in_bytes=code_bytes
    )
    return SimpleNamespace(memory_analysis=lambda: analysis)


def test_warns_of_programs_larger_than_planned(caplog, monkeypatch):
    made = make_runner(config_of())
    made.memory = plan_for(pair(max_num_seqs=64), "h100")
    caplog.clear()

    def build(num_seqs: int, temp_bytes: int, code_bytes: int) -> None:
        built = SimpleNamespace(executable=executable(temp_bytes, code_bytes))
        monkeypatch.setattr(made.cache, "build", lambda *_: built)
        made.executable(StepShape(num_seqs=num_seqs, num_levels=0, max_prompt_tokens=0))

    build(1, 10**9, 10**6)
    build(2, 10**8, 10**6)
    assert (made.temporary_bytes, made.code_bytes) == (10**9, 2 * 10**6)
    assert not caplog.messages
    build(3, 3 * 10**9, 0)
    build(4, 4 * 10**9, 0)
    [message] = caplog.messages
    assert "Compiled programs take 2.80 GiB of a device's memory, more than" in message
    assert "the planned 2.63 GiB" in message
    assert "max_num_seqs=64" in message


def test_compiled_program_reports_its_temporaries(monkeypatch):
    shapes: list[StepShape] = []

    def lower(program: Any, shape: StepShape, forms: Any) -> Any:
        shapes.append(shape)
        return SimpleNamespace(compile=lambda options: executable(12_345, 0))

    monkeypatch.setattr(probe, "lower_step", lower)
    config = config_of()
    mesh = runner.build_mesh(config)
    assert probe.compiled_temporaries(config, mesh) == 12_345
    # The largest program that plain requests use.
    assert [one.name for one in shapes] == ["2x2+512_sampled"]
    # Includes programs that are compiled on demand.
    many = dict(max_num_batched_tokens=4096, max_num_seqs=16, max_model_len=512)
    probe.compiled_temporaries(config_of(**many), mesh)
    assert shapes[-1].name == "16x2+4096_sampled"
