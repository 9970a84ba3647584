"""The division of a device's memory equals calculations by hand."""

import dataclasses
import re
from typing import Any

import pytest

from jaxspec.config.engine import GivenSizes
from jaxspec.engine.memory.plan import (
    ACCELERATOR_SIZES,
    CPU_SIZES,
    GIB,
    MAX_INT32_VALUES,
    LocalPages,
    ModelBytes,
    ProgramFacts,
    Sizes,
    default_cpu_pages,
    default_sizes,
    plan_memory,
    shown_bytes,
)
from jaxspec.errors import ConfigError
from tests.support.memory_plans import (
    DRAFT_2B,
    PROGRAMS,
    TARGET_9B,
    WITHOUT,
    facts,
    make_plan,
)

SIXTY_FOUR = dict(max_num_seqs=64, max_num_batched_tokens=2048)


def test_9b_with_a_2b_draft_on_80_gb():
    given = SIXTY_FOUR | dict(gpu_memory_utilization=0.9)
    made = make_plan(given)
    # Each of 64 sequences has rows for 5 drafts and one more token: 384 rows. The 2,048
    # prompt tokens are 64 tiles.
    logits = 4 * 256_000 * (5 * 384 + 4 * 64)
    distributions = 4 * 256_000 * 5 * 64
    assert made.workspace_bytes == logits + distributions + 268_435_456 == 2_824_339_456
    # Budget minus weights minus workspace: 72,000,000,000 - 23,712,095,744 -
    # 2,824,339,456 bytes hold 6,306 pages of 7,208,960 bytes, which are rounded down to
    # 6,272.
    assert made.num_pages == 6272
    assert made.kv_bytes == 45_214_597_120
    assert made.left_bytes == 8_248_967_680
    # A sequence of 8,192 tokens has 512 pages.
    assert made.concurrency(8192) == 12.25
    assert made.concurrency(100) == 6272 / 7
    # Without the draft, programs have 64 rows and no distributions.
    alone = 4 * 256_000 * (5 * 64 + 4 * 64) + 268_435_456
    assert alone == 858_259_456
    programs = made.workspace_bytes - alone
    assert made.draft_bytes == 5_228_683_776 + 6272 * 1_703_936 + programs
    # Without a draft model, 72,000,000,000 - 18,483,411,968 - 858,259,456 bytes hold
    # 9,565 pages of the 9B, which are rounded down to 9,472.
    assert made.sequences_lost == (9472 - 6272) / 512
    without = make_plan(given, draft=ModelBytes(), programs=WITHOUT)
    assert without.num_pages == 9472
    assert "draft" not in without.table()
    assert (without.draft_bytes, without.sequences_lost) == (0, 0)
    used = make_plan(given, used_bytes=10**10)
    pages = 10**10 / 7_208_960
    assert made.num_pages - used.num_pages == pytest.approx(pages, rel=0.05)
    # The default share is vLLM's.
    assert make_plan(SIXTY_FOUR).utilization == 0.92
    share = dict(gpu_memory_utilization=0.92)
    assert make_plan(SIXTY_FOUR).num_pages == make_plan(SIXTY_FOUR | share).num_pages
    # Shares are of the whole device, of which jax may use 0.95 here.
    shared = facts(limit_bytes=95 * 10**9, limit_share=0.95)
    assert shared.budget_bytes(0.92) == pytest.approx(92 * 10**9)
    assert shared.budget_bytes(1.0) == 95 * 10**9


def test_given_pages_bytes_and_sizes_are_used():
    made = make_plan(SIXTY_FOUR | dict(num_pages=1000))
    assert made.num_pages == 1000
    # The memory of 1,000 pages of both models would hold 1,309 pages of the target
    # alone.
    assert made.sequences_lost == (1309 - 1000) / 512
    # `compiled_bytes` is the size of programs with drafts, so programs without drafts
    # still have the estimated size.
    found = make_plan(SIXTY_FOUR | dict(num_pages=1000), compiled_bytes=2**30)
    programs = 2**30 - 858_259_456
    assert found.draft_bytes == 5_228_683_776 + 1000 * 1_703_936 + programs
    made = make_plan(dict(kv_cache_memory_bytes=7_208_960 * 777 + 5))
    assert (made.num_pages, made.utilization) == (777, None)
    # `num_pages` has priority over `kv_cache_memory_bytes`, as in vLLM.
    both = make_plan(dict(kv_cache_memory_bytes=10**10, num_pages=1000))
    assert both.num_pages == 1000
    # If the memory limit is unknown, as on a CPU, no plan exceeds it.
    endless = make_plan(dict(num_pages=10**9), limit_bytes=None)
    assert (endless.num_pages, endless.left_bytes) == (10**9, None)
    # By default there are no more sequences than pages.
    few: dict[str, Any] = dict(num_pages=40)
    assert make_plan(few, max_model_len=64).sizes.num_seqs == 40
    given = make_plan(few | dict(max_num_seqs=64), max_model_len=64)
    assert given.sizes.num_seqs == 64  # `EngineConfig` rejects it


def test_table_shows_all_parts():
    text = make_plan(SIXTY_FOUR | dict(gpu_memory_utilization=0.9)).table()
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    assert lines == [
        "Memory of GPU",
        "target weights 17.21 GiB",
        "draft weights 4.87 GiB",
        "programs 2.63 GiB estimated, for 64 sequences and 2,048 prompt tokens",
        "KV 42.11 GiB 6,272 pages of 16 tokens in bfloat16, 450,560 bytes per token "
        "(draft 106,496), 7,208,960 per page",
        "left 7.68 GiB of 74.51 GiB, gpu_memory_utilization=0.9",
        "Maximum concurrency at 8,192 tokens: 12.25x",
        "The draft model takes 16.65 GiB: without it, 6.25 more such sequences fit",
    ]
    shown = make_plan(SIXTY_FOUR | dict(gpu_memory_utilization=0.9)).as_dict()
    assert shown["table"] == text
    assert (shown["parts"]["KV"], shown["shown"]["KV"]) == (45_214_597_120, "42.11 GiB")
    assert (shown["num_pages"], shown["max_concurrency"]) == (6272, 12.25)
    several = make_plan(num_devices=8, used_bytes=2**20, compiled_bytes=2**30).table()
    assert "Memory of GPU, each of 8" in several
    assert re.search(r"in use by others +1\.00 MiB", several)
    assert re.search(r"programs +1\.00 GiB  compiled, for 256", several)


def test_number_of_pages_is_rounded():
    # The number of pages is rounded down, so that memory limits that differ by 7 MB
    # (one page) give the same plan, and so the same programs.
    counts = {
        make_plan(SIXTY_FOUR, used_bytes=n * 7 * 10**6).num_pages for n in range(10)
    }
    assert len(counts) <= 2
    assert all(count % 64 == 0 for count in counts)
    # The number is not rounded down if one sequence of maximum length would no longer
    # fit.
    exact = TARGET_9B.weight_bytes + DRAFT_2B.weight_bytes + 2_824_339_456
    limit = exact + 515 * 7_208_960
    small = make_plan(
        SIXTY_FOUR | dict(gpu_memory_utilization=1.0),
        limit_bytes=limit,
        max_model_len=514 * 16,
    )
    assert small.num_pages == 515


def test_pages_are_limited_by_int32_indices():
    # For each page, a layer of the 2B has 16 * 8 * 256 values.
    values = 16 * 8 * 256
    most = MAX_INT32_VALUES // values
    assert most == 65_535
    large: dict[str, Any] = dict(
        limit_bytes=10**15, draft=ModelBytes(), page_arrays=((values, 2),)
    )
    made = make_plan(platform="tpu", **large)
    assert made.num_pages == 65_024
    for platform in ("gpu", "cpu"):
        assert make_plan(platform=platform, **large).num_pages > 10**8
    given = make_plan(dict(kv_cache_memory_bytes=10**13), platform="tpu", **large)
    assert given.num_pages == most
    error = refusal(dict(num_pages=most + 1), platform="tpu", **large)
    assert "num_gpu_blocks_override must be at most 65,535, got 65536" in str(error)
    assert make_plan(dict(num_pages=most + 2), **large).num_pages == most + 2


def test_large_arrays_of_eight_bits_are_avoided_on_a_gpu():
    """Pallas indexes arrays of up to 2**32 bytes with int32."""
    values = 16 * 8 * 256
    most = MAX_INT32_VALUES // values
    there = facts(page_arrays=((values, 1),))
    for num_pages, expected in (
        *((most, most), (most + 1, most), (2 * most + 2, most)),
        (2 * most + 3, 2 * most + 3),
    ):
        assert there.addressable(num_pages) == expected
    # The draft model's arrays are smaller. Fewer pages for them can make the target's
    # arrays too short for int64.
    both = facts(page_arrays=((values // 4, 1), (values, 1)))
    assert both.addressable(7 * most) == 4 * most + 3
    near = facts(page_arrays=((values * 2 // 3, 1), (values, 1)))
    assert near.addressable(2 * most + 3) == most
    # The number that is rounded down can be addressed as well.
    budget = (2 * most + 3) * TARGET_9B.page_bytes + 10**10
    made = make_plan(
        SIXTY_FOUR | dict(gpu_memory_utilization=1.0),
        limit_bytes=budget + TARGET_9B.weight_bytes,
        draft=ModelBytes(),
        page_arrays=((values, 1),),
    )
    assert made.num_pages == most


def test_temporaries_are_the_larger_of_logits_and_layers():
    few = PROGRAMS.temporary_bytes(Sizes(1, 2048))
    assert few == 200_704 * (6 + 2048) + 4 * 256_000 * 5 + 268_435_456
    many = PROGRAMS.temporary_bytes(Sizes(1, 8192))
    assert many - few == 200_704 * (8192 - 2048)
    # Program sizes are powers of two: 33 sequences use the program for 64.
    assert PROGRAMS.temporary_bytes(Sizes(33, 2048)) == PROGRAMS.temporary_bytes(
        Sizes(64, 2048)
    )
    # A program never has more prompt tokens than all sequences together, and few of
    # them with `batch_invariant`.
    short = dataclasses.replace(PROGRAMS, max_model_len=1024)
    sizes = Sizes(4, 10**6)
    assert short.temporary_bytes(sizes) == short.temporary_bytes(Sizes(4, 4096))
    invariant = dataclasses.replace(PROGRAMS, is_invariant=True)
    assert invariant.temporary_bytes(sizes) == PROGRAMS.temporary_bytes(Sizes(4, 128))
    given = GivenSizes(max_num_batched_tokens=4096)
    shown = plan_memory(facts(programs=invariant), given).table()
    assert " 128 prompt tokens" in shown
    plain = ProgramFacts(vocab_size=1000, max_model_len=8192, token_bytes=1)
    assert plain.temporary_bytes(Sizes(8, 32)) == 4 * 1000 * (5 * 8 + 4)
    without = plain.temporary_bytes(Sizes(8, 32), has_controls=False)
    assert without == 4 * 1000 * (3 * 8 + 1)
    # The logits are of 256 sequences of 6 rows, again of 8 rows each for the groups,
    # and of 16 rows for prompts.
    tpu = dataclasses.replace(PROGRAMS, row_tile=8)
    logits = 4 * 256_000 * (256 * 6 + 256 * 8 + 16) + 2 * 2**28
    found = tpu.temporary_bytes(Sizes(256, 512), has_controls=False)
    assert found == logits + 4 * 256_000 * 5 * 256 + 268_435_456
    code = dataclasses.replace(PROGRAMS, code_bytes=10**9)
    assert (
        facts(programs=code, compiled_bytes=5).workspace_bytes(CPU_SIZES) == 5 + 10**9
    )


@pytest.mark.parametrize(
    ("platform", "room_gb", "given", "expected"),
    [
        ("gpu", 48, {}, ACCELERATOR_SIZES),
        # 256 sequences of 6 rows take 9.71 GB and 128 take 5.12 GB, more than a quarter
        # of 12 GB.
        ("gpu", 12, {}, (64, 2048)),
        # 32 sequences take 1.68 GB and 64 take 2.82 GB, more than a quarter of 7 GB.
        ("tpu", 7, {}, (32, 2048)),
        ("tpu", 2, {}, (8, 512)),
        ("cpu", 1, {}, (8, 512)),
        ("cpu", 1000, {}, (8, 512)),
        ("gpu", 1, dict(max_num_seqs=512), (512, 512)),
        ("gpu", 1, dict(max_num_seqs=1), (1, 512)),
        ("gpu", 1, dict(max_num_batched_tokens=4096), (8, 4096)),
    ],
)
def test_default_sizes_depend_on_the_memory(
    platform: str, room_gb: int, given: dict[str, int], expected: Any
):
    there = facts(platform=platform)
    assert default_sizes(there, room_gb * 10**9, GivenSizes(**given)) == expected
    assert ACCELERATOR_SIZES == (256, 2048)


def refusal(given: dict[str, Any] | None = None, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make_plan(given, **changes)
    return caught.value


def test_error_names_all_numbers_and_one_setting():
    # Of 24 GiB (25.77 GB), the budget is 0.92, or 23.708 GB: less than the weights
    # alone, which take 23.712 GB.
    error = refusal(limit_bytes=24 * GIB)
    text = str(error)
    for shown in (
        *("GPU's 24.00 GiB", "=0.92 gives 22.08 GiB", "target 17.21 GiB"),
        *("draft 4.87 GiB", "3.44 GiB of keys and values for one sequence"),
    ):
        assert shown in text
    assert text.endswith(
        "Set tensor_parallel_size=2, on 2 such devices, or quantization='int8', which "
        "changes texts."
    )
    assert (error.parameter, error.value) == ("tensor_parallel_size", 2)
    assert "\n" not in text


def test_error_suggests_the_least_costly_setting():
    shorter = refusal(SIXTY_FOUR, limit_bytes=30 * 10**9)
    # The budget of 27.6 GB leaves 1,063,564,800 bytes for pages, which hold 147.
    assert (shorter.parameter, shorter.value) == ("max_model_len", 147 * 16)
    fits = make_plan(SIXTY_FOUR, limit_bytes=30 * 10**9, max_model_len=147 * 16)
    assert fits.num_pages == 147
    more = refusal(
        SIXTY_FOUR | dict(gpu_memory_utilization=0.5), limit_bytes=40 * 10**9
    )
    # The suggested share: 30,227,422,720 bytes are needed of 40,000,000,000.
    assert (more.parameter, more.value) == ("gpu_memory_utilization", 0.76)
    share = SIXTY_FOUR | dict(gpu_memory_utilization=0.76)
    assert make_plan(share, limit_bytes=40 * 10**9).num_pages >= 512
    fewer = refusal(dict(max_num_seqs=512), limit_bytes=36 * 10**9)
    assert fewer.parameter == "max_num_seqs"
    assert isinstance(fewer.value, int)
    less = dict(max_num_seqs=fewer.value)
    assert make_plan(less, limit_bytes=36 * 10**9).num_pages >= 512
    twice = dict(max_num_seqs=2 * fewer.value)
    assert refusal(twice, limit_bytes=36 * 10**9)


def test_a_larger_share_lets_jax_take_more_of_a_gpu():
    """Raising the engine's share also raises jax's, so no second GPU is suggested."""
    # jax reserves 25 % of 80 GB, and the engine plans with 20 %.
    small: dict[str, Any] = dict(limit_bytes=20 * 10**9, limit_share=0.25)
    error = refusal(dict(gpu_memory_utilization=0.2), **small, most_share=0.95)
    assert error.parameter == "gpu_memory_utilization"
    assert "of GPU's 70.78 GiB, of which gpu_memory_utilization=0.2 gives" in str(error)
    assert isinstance(error.value, float)
    # The suggested share also suffices for the default sizes of that share, which are
    # larger.
    share = dict(gpu_memory_utilization=error.value)
    enough: dict[str, Any] = dict(
        limit_bytes=int(80e9 * (error.value + 0.05)), limit_share=error.value + 0.05
    )
    assert make_plan(share, **enough).num_pages >= 512
    # If the user has set jax's share, the error does not suggest more than that.
    shown = refusal(dict(gpu_memory_utilization=0.2), **small, most_share=0.25)
    assert shown.parameter == "tensor_parallel_size"
    assert "of GPU's 18.63 GiB" in str(shown)


@pytest.mark.parametrize(
    ("num_devices", "platform", "per_chip", "expected"),
    [
        *((1, "gpu", 1, 2), (3, "gpu", 1, 4), (4, "gpu", 1, 8), (1, "tpu", 1, 4)),
        # A v7x has slices of one chip, with two devices, and of four chips.
        *((1, "tpu", 2, 2), (2, "tpu", 2, 8)),
    ],
)
def test_advice_names_numbers_of_devices_that_exist(
    num_devices: int, platform: str, per_chip: int, expected: int
):
    devices: dict[str, Any] = dict(num_devices=num_devices, devices_per_chip=per_chip)
    error = refusal(limit_bytes=24 * GIB, platform=platform, **devices)
    assert (error.parameter, error.value) == ("tensor_parallel_size", expected)


def test_advice_on_the_same_device_is_what_fits():
    shown = str(refusal(SIXTY_FOUR, limit_bytes=29_320_000_000))
    assert re.search(r"or quantization='int8', .*, or max_model_len=\d+\.$", shown)
    shorter = dict(max_model_len=int(shown.rpartition("=")[2][:-1]))
    assert make_plan(SIXTY_FOUR, limit_bytes=29_320_000_000, **shorter).num_pages
    shown = str(refusal(limit_bytes=8 * GIB))
    assert "quantization" not in shown, "it is not enough"
    target = ModelBytes(weight_bytes=17 * GIB, page_bytes=5_505_024, form="int8")
    assert "quantization" not in str(refusal(limit_bytes=16 * GIB, target=target))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            SIXTY_FOUR | dict(num_pages=8000),
            "num_gpu_blocks_override must be at most 7,416, got 8000.*"
            "weights take 22.08 GiB",
        ),
        (
            SIXTY_FOUR | dict(kv_cache_memory_bytes=60 * 10**9),
            "kv_cache_memory_bytes must be at most 53,463,564,800",
        ),
        (
            dict(kv_cache_memory_bytes=10**9),
            "must be an integer of at least 3690987520, got 1000000000.*"
            "max_model_len=8192",
        ),
    ],
)
def test_rejects_pages_that_do_not_fit(given, message):
    assert re.search(message, str(refusal(given)))
    assert make_plan(SIXTY_FOUR | dict(num_pages=7416)).num_pages == 7416


def test_default_cpu_pages_and_shown_units():
    numbers = [default_cpu_pages(64, 8, page) for page in (1000, 2**22, 2**30)]
    assert numbers == [512, 128, 64]
    shown = [shown_bytes(count) for count in (3 * GIB // 2, 3 * 2**19, -GIB)]
    assert shown == ["1.50 GiB", "1.50 MiB", "-1.00 GiB"]


def test_sequences_keep_windows_in_local_pages():
    # A unit holds 16 tokens in five local layers, or 80 tokens in one global layer.
    local = LocalPages(unit_pages=5, decode_pages=70, max_pages=200)
    changes: dict[str, Any] = dict(local=local, max_model_len=131_072)
    made = make_plan(dict(max_num_seqs=8, num_pages=6000), **changes)
    # 8,192 tokens are 512 pages.
    assert made.concurrency(8192) == 6000 / (103 + 70)
    assert made.concurrency(64) == 6000 / (1 + 4)
    assert made.facts.pages_per_seq == 1639 + 200
    assert list(made.concurrencies) == [8192, 32768, 131_072]
    assert made.as_dict()["concurrency"][8192] == made.concurrency(8192)
    assert [line.split()[3] for line in made.notes()[:3]] == [
        "8,192",
        "32,768",
        "131,072",
    ]
    # A unit has 16 tokens in local layers, and 80 in global ones.
    of_both = {"global": 450_560 // 5, "local": 450_560}
    assert made.as_dict()["kv_bytes_per_token"] == of_both
    remark = made.as_dict()["remarks"]["KV"]
    assert remark == (
        "6,000 units of 5 pages of 16 tokens in bfloat16, 90,112 bytes per token in "
        "global layers (draft 21,299), 450,560 bytes per token of a window in local "
        "layers (draft 106,496), 7,208,960 per unit"
    )
    whole = make_plan(dict(num_pages=1000)).as_dict()
    assert whole["kv_bytes_per_token"] == {"all": 450_560}
    num_tokens = made.facts.longest(1839)
    assert num_tokens == 1639 * 5 * 16 >= 131_072
    with pytest.raises(ConfigError, match="max_model_len"):
        make_plan(dict(gpu_memory_utilization=0.31), **changes)
