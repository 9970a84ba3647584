"""The memory plan of a device: weights, programs, and the rest for KV pages.

Arithmetic over facts of one device; with several devices, the same plan holds for each.
Imports neither jax nor models: `jaxspec.engine.memory.probe` finds the facts.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxspec.config.engine import EngineConfig, GivenSizes, kv_widths
from jaxspec.engine.memory.draft_sharding import DraftSharding
from jaxspec.engine.memory.round_cost import RoundCost
from jaxspec.engine.scheduling.programs import FIRST_CHUNK, largest_chunk
from jaxspec.errors import ConfigError, check_integer, wrong_argument
from jaxspec.program.plan import MAX_GROUP_BYTES, TILE

GIB, MIB = 2**30, 2**20
# vLLM's default. The rest is for unplanned memory: libraries, fragmentation.
DEFAULT_UTILIZATION = 0.92
# Maximum bytes of a CPU's memory that pages take by default.
MAX_CPU_KV_BYTES = 512 * MIB
# Largest size of a quantized target of 2B or more, relative to bfloat16: the embedding
# is not quantized, and matrices have scales (docs/quantization.md).
QUANTIZED_SHARE = {"int8": 0.65, "int4": 0.45}
# A plan shows the maximum concurrency for sequences of these lengths, in tokens.
LENGTHS = 8192, 32768, 131072
# Groups of layers by the tokens that they keep, as a plan shows them.
GROUPS = {
    "all": "",
    "global": " in global layers",
    "local": " of a window in local layers",
}
# Upper bound of the bytes per value. "auto" becomes float32 or bfloat16 only once the
# device is known, so it counts as float32.
MAX_DTYPE_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2}
# Shortest context that an error suggests, in tokens.
LEAST_CONTEXT = 512
# Default sizes are reduced if temporaries exceed this share of the memory without
# weights.
MAX_TEMPORARY_SHARE = 0.25
# Largest array of pages that int32 can index. On a GPU, XLA and Pallas use int64 for
# larger arrays, but Pallas only above `MAX_INT32_BYTES` bytes: arrays of 2**31 to 2**32
# 8-bit values cannot be addressed. XLA's writes to larger arrays on a TPU are untested.
MAX_INT32_VALUES = 2**31 - 1
MAX_INT32_BYTES = 2**32


class Sizes(NamedTuple):
    """Requests that run at once, and prompt tokens of one launch."""

    num_seqs: int
    num_batched_tokens: int


CPU_SIZES = Sizes(8, 512)
# The defaults of TPUs and GPUs, as in vLLM. Users may allow more prompt tokens in a
# launch.
ACCELERATOR_SIZES = Sizes(256, FIRST_CHUNK)


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes of one model on one device.

    Attributes:
        page_bytes: Keys and values of one page, in all layers; with local pages
            (`LocalPages`), of one unit.
        unread_bytes: Weights of which a pass reads only single rows: the embedding, if
            the head is a separate matrix.
        shared_bytes: Weights of the target that a pass of a head reads too: the output
            matrix, if it has none of its own.
        num_values: Values of the weights that a pass reads; each multiplies every row.
        form: Description of quantized or trimmed matrices; "" if there are none.
    """

    weight_bytes: int = 0
    page_bytes: int = 0
    unread_bytes: int = 0
    shared_bytes: int = 0
    num_values: int = 0
    form: str = ""

    @property
    def read_bytes(self) -> int:
        """Weights that a pass reads."""
        return self.weight_bytes - self.unread_bytes + self.shared_bytes


@dataclass(frozen=True, kw_only=True)
class LocalPages:
    """Sizes of local pages, if layers with a sliding window keep only their window.

    A unit holds a local page, or `unit_pages` global ones.

    Attributes:
        unit_pages: As for `EngineConfig`.
        decode_pages, max_pages: Most local pages of a sequence while it decodes, and at
            any time.
    """

    unit_pages: int
    decode_pages: int
    max_pages: int


@dataclass(frozen=True, kw_only=True)
class ProgramFacts:
    """The sizes that determine the memory of programs on one device.

    Attributes:
        num_levels: Levels of drafts.
        num_side_nodes: Other drafts of a tree.
        vocab_size: Columns of the target's logits.
        draft_vocab_size: Columns of the draft distributions; 0 if drafts are not
            sampled.
        max_model_len: Tokens per sequence.
        is_invariant: With `batch_invariant`, whose launches are small.
        token_bytes: Largest temporaries of one token within a layer of the target.
        row_tile: Arrays with an axis of sequences pad the rows of each to a multiple of
            this: 8 on a TPU.
        fixed_bytes: Temporaries that every program has.
        code_bytes: Code of all programs, if it is in device memory.
    """

    num_levels: int = 0
    num_side_nodes: int = 0
    vocab_size: int
    draft_vocab_size: int = 0
    max_model_len: int
    is_invariant: bool = False
    token_bytes: int
    row_tile: int = 1
    fixed_bytes: int = 0
    code_bytes: int = 0

    def num_prompt_tokens(self, sizes: Sizes) -> int:
        """Return the prompt tokens that the largest program has room for."""
        return largest_chunk(
            sizes.num_batched_tokens,
            num_seqs=sizes.num_seqs,
            max_model_len=self.max_model_len,
            is_invariant=self.is_invariant,
        )

    def temporary_bytes(self, sizes: Sizes, *, has_controls: bool = True) -> int:
        """Estimate the temporaries of the largest program, from compilers' records.

        The logits of a round exist three times, with 4 bytes per value: as computed,
        separated from those of prompts, and filtered for the verdict. With hundreds of
        sequences they exist once, and are filtered in groups of `MAX_GROUP_BYTES`; on a
        TPU they exist once more, for the groups, in whole tiles. Penalties and logprobs
        add two or three copies, on a TPU also one row per sequence, and the logits of
        prompt tiles. Temporaries of the layers are free by then. The draft
        distributions exist from the start.

        Args:
            has_controls: Count the programs with penalties and logprobs.
        """
        seqs = 1 << (sizes.num_seqs - 1).bit_length()
        width = self.num_levels + self.num_side_nodes + 1
        rows = seqs * width
        tiles = self.num_prompt_tokens(sizes) // TILE
        once, groups = 4 * self.vocab_size * rows, 2 * MAX_GROUP_BYTES
        if self.row_tile > 1:
            tiled = -(-width // self.row_tile) * self.row_tile
            groups += 4 * self.vocab_size * seqs * tiled
        few, many, tile_times = (5, 4, 4) if has_controls else (3, 1, 1)
        whole = few * once
        if self.row_tile > 1 and has_controls:
            whole += 4 * self.vocab_size * seqs
        logits = min(whole, many * once + groups)
        logits += 4 * self.vocab_size * tile_times * tiles
        layers = self.token_bytes * (rows + tiles * TILE)
        drafts = 4 * self.draft_vocab_size * self.num_levels * seqs
        return max(logits, layers) + drafts + self.fixed_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Facts about one device before the engine allocates memory on it.

    Attributes:
        device: Name of the device, for messages.
        devices_per_chip: Devices of one chip of a TPU.
        platform: "cpu", "gpu" or "tpu".
        num_devices: Number of such devices; all have the same contents.
        limit_bytes: Bytes that jax may use of it; None if there is no limit to plan
            with, as on a CPU.
        limit_share: `limit_bytes` as a share of the device's memory: below 1 on a GPU.
        most_share: The share that `limit_share` would be with the largest
            `gpu_memory_utilization`: on a GPU, jax reserves little more than that
            setting.
        used_bytes: Bytes that other programs use already.
        draft: Bytes of the draft model or head; zero without one.
        draft_name: "draft model" or "head".
        programs_without: As `programs`, but for an engine without the draft; None if
            they are the same.
        kv_dtype: Type of the KV cache.
        page_size: Tokens per page.
        max_model_len: Tokens per sequence.
        local: Sizes of local pages; None if all layers keep all tokens. With it, all
            numbers of pages in a memory plan are numbers of units.
        page_arrays: (values per page, bytes per value) of the arrays of pages, without
            duplicates.
        compiled_bytes: Temporaries of the largest program, as compiled; None if they
            are estimated.
    """

    device: str
    platform: str
    num_devices: int = 1
    devices_per_chip: int = 1
    limit_bytes: int | None
    limit_share: float = 1.0
    most_share: float = 1.0
    used_bytes: int = 0
    target: ModelBytes
    draft: ModelBytes = ModelBytes()
    draft_name: str = "draft model"
    programs: ProgramFacts
    programs_without: ProgramFacts | None = None
    kv_dtype: str
    page_size: int
    max_model_len: int
    local: LocalPages | None = None
    page_arrays: tuple[tuple[int, int], ...] = ()
    compiled_bytes: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Weights of both models."""
        return self.target.weight_bytes + self.draft.weight_bytes

    @property
    def page_bytes(self) -> int:
        """Keys and values of one page, of both models."""
        return self.target.page_bytes + self.draft.page_bytes

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence, at any time."""
        num_pages = math.ceil(self.max_model_len / self.page_size)
        if self.local is None:
            return num_pages
        num_local = min(num_pages, self.local.max_pages)
        return math.ceil(num_pages / self.local.unit_pages) + num_local

    def decode_pages(self, num_tokens: int) -> int:
        """Return the pages of a sequence of `num_tokens` tokens that decodes."""
        num_pages = math.ceil(num_tokens / self.page_size)
        if self.local is None:
            return num_pages
        num_local = min(num_pages, self.local.decode_pages)
        return math.ceil(num_pages / self.local.unit_pages) + num_local

    def kv_bytes_per_token(self, page_bytes: int) -> dict[str, int]:
        """Return the bytes of a token's keys and values in each group of layers.

        Args:
            page_bytes: Bytes of a page; with local pages, of a unit.

        Returns:
            By key of `GROUPS`.
        """
        token_bytes = page_bytes // self.page_size
        if self.local is None:
            return {"all": token_bytes}
        return {"global": token_bytes // self.local.unit_pages, "local": token_bytes}

    def longest(self, num_pages: int) -> int:
        """Return the tokens of the longest sequence that fits `num_pages` pages."""
        if self.local is None:
            return num_pages * self.page_size
        unit, max_local = self.local.unit_pages, self.local.max_pages
        short = num_pages * unit // (unit + 1)  # all its local pages fit
        is_bounded = max_local < math.ceil(self.max_model_len / self.page_size)
        long = (num_pages - max_local) * unit if is_bounded else 0
        return max(short, long) * self.page_size

    def addressable(self, num_pages: int) -> int:
        """Return the largest pool of at most `num_pages` that kernels can address."""

        def is_too_large(page_values: int, value_bytes: int) -> bool:
            values = num_pages * page_values
            if self.platform == "cpu" or values <= MAX_INT32_VALUES:
                return False
            return self.platform == "tpu" or values * value_bytes <= MAX_INT32_BYTES

        while large := [array for array in self.page_arrays if is_too_large(*array)]:
            num_pages = MAX_INT32_VALUES // max(large)[0]
        return num_pages

    def budget_bytes(self, utilization: float) -> int:
        """Return the bytes of a share of the device's memory, at most jax's limit."""
        limit = self.limit_bytes or 0
        return int(limit * min(utilization / self.limit_share, 1))

    def with_most(self) -> "MemoryFacts":
        """Return the facts with the largest share that jax would reserve."""
        if self.limit_bytes is None:
            return self
        limit = int(self.limit_bytes * self.most_share / self.limit_share)
        return replace(self, limit_bytes=limit, limit_share=self.most_share)

    def without_draft(self) -> "MemoryFacts":
        """Return the facts of the same engine without its draft model or head."""
        if self.draft == ModelBytes():
            return self
        programs = self.programs_without or self.programs
        return replace(self, draft=ModelBytes(), programs=programs, compiled_bytes=None)

    def workspace_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of programs: temporaries and code."""
        temporary = self.compiled_bytes
        if temporary is None:
            temporary = self.programs.temporary_bytes(sizes)
        return temporary + self.programs.code_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How one device's memory is divided.

    Attributes:
        utilization: Share of the limit that was planned with; None if the number of
            pages was given, or is a CPU's default.
        draft_sharding: The choice of the draft model's devices; None without a choice.
        round_cost: Computed times of rounds with drafts; None without drafts, or if the
            devices' speeds are unknown.
    """

    facts: MemoryFacts
    sizes: Sizes
    num_pages: int
    utilization: float | None = None
    draft_sharding: DraftSharding | None = None
    round_cost: RoundCost | None = None

    @property
    def workspace_bytes(self) -> int:
        """Temporaries of the largest program, and the code of all."""
        return self.facts.workspace_bytes(self.sizes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages, of both models."""
        return self.num_pages * self.facts.page_bytes

    @property
    def left_bytes(self) -> int | None:
        """Unplanned bytes of the limit; None without a limit."""
        facts = self.facts
        if facts.limit_bytes is None:
            return None
        taken = facts.used_bytes + facts.weight_bytes + self.workspace_bytes
        return facts.limit_bytes - taken - self.kv_bytes

    def concurrency(self, num_tokens: int) -> float:
        """Return the number of sequences of `num_tokens` tokens that fit the pages."""
        return self.num_pages / self.facts.decode_pages(num_tokens)

    @property
    def concurrencies(self) -> dict[int, float]:
        """`concurrency` at `max_model_len`, and at each of `LENGTHS` below it."""
        longest = self.facts.max_model_len
        lengths = [*(one for one in LENGTHS if one < longest), longest]
        return {length: self.concurrency(length) for length in lengths}

    @property
    def draft_bytes(self) -> int:
        """Memory of drafting: weights, draft KV pages, and its part of programs."""
        draft, alone = self.facts.draft, self.facts.without_draft()
        programs = max(self.workspace_bytes - alone.workspace_bytes(self.sizes), 0)
        return draft.weight_bytes + self.num_pages * draft.page_bytes + programs

    @property
    def sequences_lost(self) -> float:
        """Additional sequences of full length that would fit without the draft model.

        `max_num_seqs` is the same: only the number of pages grows.
        """
        facts, alone = self.facts, self.facts.without_draft()
        if self.utilization is not None:  # pages are what weights and programs leave
            budget = facts.budget_bytes(self.utilization)
            num_pages = _pages_left(alone, self.sizes, budget)
        else:
            num_pages = facts.addressable(self.kv_bytes // alone.page_bytes)
        more = max(num_pages - self.num_pages, 0)
        return more / facts.decode_pages(facts.max_model_len)

    def rows(self) -> list[tuple[str, int, str]]:
        """Return each part: its name, its bytes on one device, and a remark."""
        facts, draft = self.facts, self.facts.draft
        size = facts.page_size
        has_draft = draft != ModelBytes()
        target = facts.target
        rows = [("target weights", target.weight_bytes, target.form)]
        if has_draft:
            rows.append(("draft weights", draft.weight_bytes, draft.form))
        if facts.used_bytes:
            rows.append(("in use by others", facts.used_bytes, ""))
        how = "estimated" if facts.compiled_bytes is None else "compiled"
        seqs, tokens = self.sizes.num_seqs, facts.programs.num_prompt_tokens(self.sizes)
        remark = f"{how}, for {seqs} sequences and {tokens:,} prompt tokens"
        rows.append(("programs", self.workspace_bytes, remark))
        by_group = facts.kv_bytes_per_token(facts.page_bytes)
        of_draft = facts.kv_bytes_per_token(draft.page_bytes)
        each = []
        for group, num_bytes in by_group.items():
            each.append(f"{num_bytes:,} bytes per token{GROUPS[group]}")
            if has_draft:
                each[-1] += f" (draft {of_draft[group]:,})"
        kind, local = "page", facts.local
        pages = f"pages of {size} tokens"
        if local is not None and local.unit_pages > 1:
            kind, pages = "unit", f"units of {local.unit_pages} {pages}"
        remark = (
            f"{self.num_pages:,} {pages} in {facts.kv_dtype}, {', '.join(each)}, "
            f"{facts.page_bytes:,} per {kind}"
        )
        rows.append(("KV", self.kv_bytes, remark))
        if facts.limit_bytes is not None and self.left_bytes is not None:
            remark = f"of {shown_bytes(facts.limit_bytes)}"
            if self.utilization is not None:
                remark += f", gpu_memory_utilization={self.utilization:g}"
            rows.append(("left", self.left_bytes, remark))
        return rows

    def table(self) -> str:
        """Return a table of the parts, followed by `notes`."""
        facts = self.facts
        each = "" if facts.num_devices == 1 else f", each of {facts.num_devices}"
        lines = [f"Memory of {facts.device}{each}"]
        for name, num_bytes, remark in self.rows():
            line = f"  {name:<17}{shown_bytes(num_bytes):>11}  {remark}"
            lines.append(line.rstrip())
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """Return the lines on concurrency and on the cost of the draft model."""
        facts = self.facts
        lines = [
            f"Maximum concurrency at {length:,} tokens: {count:.2f}x"
            for length, count in self.concurrencies.items()
        ]
        if facts.draft != ModelBytes():
            lines.append(
                f"The {facts.draft_name} takes {shown_bytes(self.draft_bytes)}: "
                f"without it, {self.sequences_lost:.2f} more such sequences fit"
            )
        if self.round_cost is not None:
            lines.append(self.round_cost.line())
        if self.draft_sharding is not None:
            lines.append(self.draft_sharding.line())
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, with the bytes of one device."""
        return {
            "device": self.facts.device,
            "num_devices": self.facts.num_devices,
            "limit_bytes": self.facts.limit_bytes,
            "parts": {name: num_bytes for name, num_bytes, _ in self.rows()},
            "shown": {name: shown_bytes(size) for name, size, _ in self.rows()},
            "remarks": {name: remark for name, _, remark in self.rows() if remark},
            "notes": self.notes(),
            "num_pages": self.num_pages,
            "kv_dtype": self.facts.kv_dtype,
            "page_size": self.facts.page_size,
            "kv_bytes_per_token": self.facts.kv_bytes_per_token(self.facts.page_bytes),
            "max_num_seqs": self.sizes.num_seqs,
            "max_num_batched_tokens": self.sizes.num_batched_tokens,
            "max_model_len": self.facts.max_model_len,
            "max_concurrency": self.concurrency(self.facts.max_model_len),
            "concurrency": self.concurrencies,
            "draft_bytes": self.draft_bytes,
            "sequences_lost": self.sequences_lost,
            "draft_sharding": self.draft_sharding and self.draft_sharding.as_dict(),
            "round_cost": self.round_cost and self.round_cost.as_dict(),
            "table": self.table(),
        }


def default_cpu_pages(pages_per_seq: int, num_seqs: int, page_bytes: int) -> int:
    """Return the pages for `num_seqs` full sequences, in at most `MAX_CPU_KV_BYTES`.

    Pages for one full sequence are always included.
    """
    cap = MAX_CPU_KV_BYTES // page_bytes
    return max(pages_per_seq, min(num_seqs * pages_per_seq, cap))


def with_cpu_pages(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a CPU's default number of pages (or of units)."""
    unit_pages = config.unit_pages
    widths = kv_widths(config.kv_cache_dtype, MAX_DTYPE_BYTES[config.dtype])
    models = filter(None, (config.model_config, config.draft_model_config))
    # Of a unit, or of a page, for each token of a page.
    num_bytes = sum(model.kv_unit_bytes(unit_pages, *widths) for model in models)
    if config.head_config is not None:
        head_bytes = config.head_config.kv_bytes_per_token(*widths)
        num_bytes += (unit_pages or 1) * head_bytes
    num_pages = default_cpu_pages(
        config.units_per_seq, config.max_num_seqs, num_bytes * config.page_size
    )
    return replace(config, num_pages=num_pages)


def default_sizes(
    facts: MemoryFacts, room_bytes: int, given_sizes: GivenSizes
) -> Sizes:
    """Return the default sizes; those that the user has set are not changed.

    Args:
        room_bytes: Bytes for temporaries of programs and for pages.
    """
    wanted = CPU_SIZES if facts.platform == "cpu" else ACCELERATOR_SIZES
    seqs = given_sizes.max_num_seqs or wanted.num_seqs
    tokens = given_sizes.max_num_batched_tokens or wanted.num_batched_tokens

    def is_too_much() -> bool:
        temporary = facts.programs.temporary_bytes(Sizes(seqs, tokens))
        return temporary > MAX_TEMPORARY_SHARE * room_bytes

    while (
        given_sizes.max_num_seqs is None and seqs > CPU_SIZES.num_seqs and is_too_much()
    ):
        seqs //= 2
    is_open = given_sizes.max_num_batched_tokens is None
    while is_open and tokens > CPU_SIZES.num_batched_tokens and is_too_much():
        tokens //= 2
    return Sizes(seqs, tokens)


def plan_memory(facts: MemoryFacts, given_sizes: GivenSizes) -> MemoryPlan:
    """Plan a device's memory: what weights and programs leave becomes pages.

    Without a limit, the user's settings determine the number of pages.

    Raises:
        ConfigError: The engine does not fit. The error has all numbers, and a setting
            with which it fits.
    """
    share = given_sizes.gpu_memory_utilization or DEFAULT_UTILIZATION
    limit = facts.limit_bytes
    budget = facts.budget_bytes(share)
    room = budget if limit is None else _room_bytes(facts, budget)
    sizes = default_sizes(facts, room, given_sizes)
    is_planned = (
        given_sizes.num_pages is None and given_sizes.kv_cache_memory_bytes is None
    )
    utilization = None
    if given_sizes.num_pages is not None:
        num_pages = given_sizes.num_pages
        _check_addressable(facts, num_pages)
    elif given_sizes.kv_cache_memory_bytes is not None:
        num_pages = given_sizes.kv_cache_memory_bytes // facts.page_bytes
        num_pages = facts.addressable(num_pages)
        _check_kv_bytes(facts, given_sizes.kv_cache_memory_bytes)
    else:
        assert limit is not None, "neither pages nor a limit are given"
        utilization = share
        num_pages = _pages_left(facts, sizes, budget)
    plan = MemoryPlan(
        facts=facts,
        sizes=_with_pages(sizes, given_sizes, num_pages),
        num_pages=num_pages,
        utilization=utilization,
    )
    if limit is not None and is_planned and num_pages < facts.pages_per_seq:
        raise _no_room(plan, given_sizes, budget)
    if plan.left_bytes is not None and plan.left_bytes < 0:
        raise _too_many_pages(plan, given_sizes)
    return plan


def _room_bytes(facts: MemoryFacts, budget: int) -> int:
    """Return the bytes of a budget that remain for temporaries and pages."""
    taken = facts.used_bytes + facts.weight_bytes + facts.programs.code_bytes
    return budget - taken


def _with_pages(sizes: Sizes, given_sizes: GivenSizes, num_pages: int) -> Sizes:
    """Limit the sequences to the number of pages, unless the user has set them."""
    if given_sizes.max_num_seqs is None:
        return sizes._replace(num_seqs=max(min(sizes.num_seqs, num_pages), 1))
    return sizes


def _pages_left(facts: MemoryFacts, sizes: Sizes, budget: int) -> int:
    """Return the pages that fit a budget of bytes, and that kernels can address.

    The number is rounded down to seven leading bits. Programs are compiled for a number
    of pages, and memory in use differs by some megabytes between starts: most starts
    get the same number.
    """
    taken = facts.used_bytes + facts.weight_bytes + facts.workspace_bytes(sizes)
    num_pages = facts.addressable(max(budget - taken, 0) // facts.page_bytes)
    step = 1 << max(num_pages.bit_length() - 7, 0)
    rounded = facts.addressable(num_pages // step * step)
    return rounded if rounded >= facts.pages_per_seq else num_pages


def _check_addressable(facts: MemoryFacts, num_pages: int) -> None:
    largest = facts.addressable(num_pages)
    if largest < num_pages:
        raise wrong_argument(
            ConfigError,
            "num_gpu_blocks_override",
            f"at most {largest:,}",
            num_pages,
            "The kernels cannot address the pages of one layer beyond that.",
        )


def _check_kv_bytes(facts: MemoryFacts, num_bytes: int) -> None:
    seq_bytes = facts.pages_per_seq * facts.page_bytes
    check_integer(
        ConfigError,
        "kv_cache_memory_bytes",
        num_bytes,
        low=seq_bytes,
        hint=f"One sequence of max_model_len={facts.max_model_len} tokens takes "
        f"{seq_bytes:,} bytes ({shown_bytes(seq_bytes)}) of keys and values; set at "
        "least that, or a smaller max_model_len.",
    )


def _no_room(plan: MemoryPlan, given_sizes: GivenSizes, budget: int) -> ConfigError:
    """Return the error if the memory left does not fit one sequence."""
    facts, limit_bytes = plan.facts, plan.facts.with_most().limit_bytes
    assert limit_bytes is not None
    seq_bytes = facts.pages_per_seq * facts.page_bytes
    taken = facts.used_bytes + facts.weight_bytes + plan.workspace_bytes
    name, value = _remedy(plan, given_sizes, budget, taken + seq_bytes)
    advice = f"{name}={value}"
    if name == "tensor_parallel_size":
        advice += f", on {value} such devices"
        advice = ", or ".join([advice, *_on_the_same(plan, budget, taken + seq_bytes)])
    parts = [f"target {shown_bytes(facts.target.weight_bytes)}"]
    if facts.draft.weight_bytes:
        parts.append(f"draft {shown_bytes(facts.draft.weight_bytes)}")
    parts.append(f"programs {shown_bytes(plan.workspace_bytes)}")
    if facts.used_bytes:
        parts.append(f"others {shown_bytes(facts.used_bytes)}")
    share = given_sizes.gpu_memory_utilization or DEFAULT_UTILIZATION
    return ConfigError(
        f"{shown_bytes(taken + seq_bytes)} are needed of {facts.device}'s "
        f"{shown_bytes(limit_bytes)}, of which gpu_memory_utilization={share:g} gives "
        f"{shown_bytes(budget)}: {', '.join(parts)}, and {shown_bytes(seq_bytes)} of "
        f"keys and values for one sequence of max_model_len={facts.max_model_len} "
        f"tokens. Set {advice}.",
        parameter=name,
        value=value,
    )


def _remedy(
    plan: MemoryPlan, given_sizes: GivenSizes, budget: int, needed: int
) -> tuple[str, object]:
    """Return a setting with which one sequence fits, the least costly one."""
    facts, max_facts = plan.facts, plan.facts.with_most()
    num_tokens = facts.longest(_pages_left(facts, plan.sizes, budget))
    if num_tokens >= facts.max_model_len // 4:
        return "max_model_len", num_tokens
    # Try each share: a larger share can raise the default sizes, which then need more
    # memory.
    for percent in range(1, int(98 * max_facts.most_share) + 1):
        share = percent / 100
        if max_facts.budget_bytes(share) >= needed and _has_room(
            max_facts, given_sizes, share
        ):
            return "gpu_memory_utilization", share
    seqs, share = plan.sizes.num_seqs, given_sizes.gpu_memory_utilization
    while seqs > 1:
        seqs //= 2
        fewer = replace(given_sizes, max_num_seqs=seqs)
        if _has_room(facts, fewer, share or DEFAULT_UTILIZATION):
            return "max_num_seqs", seqs
    devices = 1 << facts.num_devices.bit_length()  # heads are spread over powers of two
    while devices < 64 and needed * facts.num_devices / devices > budget:
        devices *= 2
    # There is no slice of two chips.
    if facts.platform == "tpu" and devices == 2 * facts.devices_per_chip:
        devices *= 2
    return "tensor_parallel_size", devices


def _on_the_same(plan: MemoryPlan, budget: int, needed: int) -> list[str]:
    """Return settings that help on the same devices.

    They change texts, or the length of the context.
    """
    facts, settings = plan.facts, []
    if not facts.target.form:  # not quantized yet
        for kind, share in QUANTIZED_SHARE.items():
            if needed - facts.target.weight_bytes * (1 - share) <= budget:
                settings.append(f"quantization={kind!r}, which changes texts")
                break
    num_tokens = facts.longest(_pages_left(facts, plan.sizes, budget))
    if num_tokens >= LEAST_CONTEXT:
        settings.append(f"max_model_len={num_tokens}")
    return settings


def _has_room(facts: MemoryFacts, given_sizes: GivenSizes, share: float) -> bool:
    """Return whether one sequence fits with these sizes and this share."""
    budget = facts.budget_bytes(share)
    sizes = default_sizes(facts, _room_bytes(facts, budget), given_sizes)
    return _pages_left(facts, sizes, budget) >= facts.pages_per_seq


def _too_many_pages(plan: MemoryPlan, given_sizes: GivenSizes) -> ConfigError:
    """Return the error if the user's number of pages does not fit."""
    facts = plan.facts
    assert facts.limit_bytes is not None
    assert plan.left_bytes is not None
    max_bytes = max(plan.kv_bytes + plan.left_bytes, 0)
    name, value, allowed = "num_gpu_blocks_override", given_sizes.num_pages, 0
    allowed = max_bytes // facts.page_bytes
    if value is None:
        name, value, allowed = (
            "kv_cache_memory_bytes",
            given_sizes.kv_cache_memory_bytes,
            max_bytes,
        )
    hint = (
        f"{facts.device} has {shown_bytes(facts.limit_bytes)}; weights take "
        f"{shown_bytes(facts.weight_bytes)}, programs "
        f"{shown_bytes(plan.workspace_bytes)} and others "
        f"{shown_bytes(facts.used_bytes)} of it, and these pages "
        f"{shown_bytes(plan.kv_bytes)}."
    )
    error = wrong_argument(ConfigError, name, f"at most {allowed:,}", value, hint)
    assert isinstance(error, ConfigError)
    return error


def shown_bytes(num_bytes: int) -> str:
    """Format a number of bytes in MiB or GiB."""
    if abs(num_bytes) >= GIB // 4:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"
