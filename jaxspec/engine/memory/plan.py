"""How a device's memory is divided: weights, programs, and pages with what is left.

Arithmetic over facts of one device; where there are several, each holds as much.
Imports neither jax nor models: `jaxspec.engine.memory.probe` finds the facts.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxspec.config.engine import GivenSizes
from jaxspec.engine.memory.draft_sharding import DraftSharding
from jaxspec.engine.scheduling.programs import FIRST_CHUNK, largest_chunk
from jaxspec.errors import ConfigError, check_integer, wrong_argument
from jaxspec.program.plan import MAX_GROUP_BYTES, TILE

GIB, MIB = 2**30, 2**20
# vLLM's. The rest is for what no plan sees: libraries' own memory, what lies badly.
DEFAULT_UTILIZATION = 0.92
# The most that pages take of a CPU's memory by default.
MAX_CPU_KV_BYTES = 512 * MIB
# Of a target's bytes in bfloat16, at most, for 2B and more: the embedding stays as it
# is, and scales come beside the matrices (docs/quantization.md).
QUANTIZED_SHARE = {"int8": 0.65, "int4": 0.45}
# Tokens below which a shorter context is no advice.
LEAST_CONTEXT = 512
# Temporaries may take this share of what weights leave before defaults become smaller.
MAX_TEMPORARY_SHARE = 0.25
# Kernels number the values in an array of pages with int32.
MAX_LAYER_VALUES = 2**31 - 1


class Sizes(NamedTuple):
    """Requests that run at once, and prompt tokens that one launch feeds."""

    num_seqs: int
    num_batched_tokens: int


CPU_SIZES = Sizes(8, 512)
# As in vLLM. Users may have more prompt tokens in a launch.
ACCELERATOR_SIZES = Sizes(256, FIRST_CHUNK)


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What one model takes of one device.

    Attributes:
        page_bytes: Keys and values of one page, in all layers.
        unread_bytes: Of its weights, what a pass looks rows up in and does not read:
            the embedding, where the head is a matrix of its own.
        form: How its matrices are kept, in words; "" where they are all there and not
            quantized.
    """

    weight_bytes: int = 0
    page_bytes: int = 0
    unread_bytes: int = 0
    form: str = ""


@dataclass(frozen=True, kw_only=True)
class ProgramFacts:
    """What the memory of programs follows from, on one device.

    Attributes:
        num_draft_tokens: K.
        num_side_nodes: Drafts of a tree that are more than K.
        vocab_size: Columns of the target's logits.
        draft_vocab_size: Columns of the laws that drafts were drawn from; 0 where they
            were drawn from none.
        max_model_len: Tokens per sequence.
        is_invariant: With `batch_invariant`, whose launches are small.
        token_bytes: What one token takes within a layer of the target, at most.
        row_tile: Rows of a sequence are kept in multiples of these, where sequences are
            told apart: 8 on a TPU.
        fixed_bytes: Temporaries that every program has.
        code_bytes: Of all programs together, where they lie in the device's memory.
    """

    num_draft_tokens: int = 0
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
        """Those that the largest program has room for."""
        return largest_chunk(
            sizes.num_batched_tokens,
            num_seqs=sizes.num_seqs,
            max_model_len=self.max_model_len,
            is_invariant=self.is_invariant,
        )

    def temporary_bytes(self, sizes: Sizes, *, has_controls: bool = True) -> int:
        """Temporaries of the largest program, as compilers' records have them.

        The rows of a round are kept as logits, cut off from those of prompts, and as
        the verdict filters them: 4 bytes each, three times. Of hundreds of sequences
        they are there once, and filtered in groups of `MAX_GROUP_BYTES`; on a TPU once
        more, for the groups, in whole tiles. Penalties and log-probabilities have them
        two or three times more, on a TPU a row of each sequence beside them, and those
        of prompts' tiles. What the layers compute before is gone by then. Drafts' laws
        are there from the start.

        Args:
            has_controls: Count the programs of requests with such wishes.
        """
        seqs = 1 << (sizes.num_seqs - 1).bit_length()
        width = self.num_draft_tokens + self.num_side_nodes + 1
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
        laws = 4 * self.draft_vocab_size * self.num_draft_tokens * seqs
        return max(logits, layers) + laws + self.fixed_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """What is known of one device before anything is put on it.

    Attributes:
        device: What people call it.
        platform: "cpu", "gpu" or "tpu".
        num_devices: Those that hold as much each.
        limit_bytes: What jax may take of it; None where nobody plans by it, as on a
            CPU.
        limit_share: What share of the device's memory that is: not all of a GPU's.
        most_share: What share it would be if the engine planned with all of it: jax
            takes of a GPU what `gpu_memory_utilization` says, and little more.
        used_bytes: Taken already, by others.
        draft: Nothing without a draft model or a head.
        draft_name: What it is.
        programs_without: What programs would be without it; None: the same.
        kv_dtype: What a number of a key or value is kept as.
        page_size: Tokens per page.
        max_model_len: Tokens per sequence.
        layer_page_values: Numbers that one page has in one array, at most.
        compiled_bytes: Temporaries of the largest program, from the compiler itself;
            None: they are estimated.
    """

    device: str
    platform: str
    num_devices: int = 1
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
    layer_page_values: int = 1
    compiled_bytes: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Of both models."""
        return self.target.weight_bytes + self.draft.weight_bytes

    @property
    def page_bytes(self) -> int:
        """Of one page of both models."""
        return self.target.page_bytes + self.draft.page_bytes

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return math.ceil(self.max_model_len / self.page_size)

    @property
    def max_pages(self) -> int:
        """More than these cannot be numbered."""
        return MAX_LAYER_VALUES // self.layer_page_values

    def budget_bytes(self, utilization: float) -> int:
        """What a share of the device's memory comes to, as far as jax may take it."""
        limit = self.limit_bytes or 0
        return int(limit * min(utilization / self.limit_share, 1))

    def with_most(self) -> "MemoryFacts":
        """The same where jax takes as much of the device as it ever would."""
        if self.limit_bytes is None:
            return self
        limit = int(self.limit_bytes * self.most_share / self.limit_share)
        return replace(self, limit_bytes=limit, limit_share=self.most_share)

    def without_draft(self) -> "MemoryFacts":
        """The same engine without its draft model or head."""
        if self.draft == ModelBytes():
            return self
        programs = self.programs_without or self.programs
        return replace(self, draft=ModelBytes(), programs=programs, compiled_bytes=None)

    def workspace_bytes(self, sizes: Sizes) -> int:
        """What programs take beside weights and pages: temporaries and code."""
        temporary = self.compiled_bytes
        if temporary is None:
            temporary = self.programs.temporary_bytes(sizes)
        return temporary + self.programs.code_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How one device's memory is divided.

    Attributes:
        utilization: Share of the limit that was planned with; None: pages were said, or
            are a CPU's default.
        draft_sharding: How the draft model's devices were chosen, where they were.
    """

    facts: MemoryFacts
    sizes: Sizes
    num_pages: int
    utilization: float | None = None
    draft_sharding: DraftSharding | None = None

    @property
    def workspace_bytes(self) -> int:
        """Temporaries of the largest program, and the code of all."""
        return self.facts.workspace_bytes(self.sizes)

    @property
    def kv_bytes(self) -> int:
        """Of the pages of both models."""
        return self.num_pages * self.facts.page_bytes

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the limit that nothing is planned for; None without a limit."""
        facts = self.facts
        if facts.limit_bytes is None:
            return None
        taken = facts.used_bytes + facts.weight_bytes + self.workspace_bytes
        return facts.limit_bytes - taken - self.kv_bytes

    def concurrency(self, num_tokens: int) -> float:
        """Sequences of `num_tokens` tokens that there are pages for."""
        return self.num_pages / math.ceil(num_tokens / self.facts.page_size)

    @property
    def draft_bytes(self) -> int:
        """What drafts cost: weights, a part of the pages, and of what programs take."""
        draft, alone = self.facts.draft, self.facts.without_draft()
        programs = max(self.workspace_bytes - alone.workspace_bytes(self.sizes), 0)
        return draft.weight_bytes + self.num_pages * draft.page_bytes + programs

    @property
    def sequences_lost(self) -> float:
        """Sequences of the full length that would fit more without the draft model.

        As many run at once: only their pages are more.
        """
        facts, alone = self.facts, self.facts.without_draft()
        if self.utilization is not None:  # pages are what weights and programs leave
            budget = facts.budget_bytes(self.utilization)
            num_pages = _pages_left(alone, self.sizes, budget)
        else:
            num_pages = min(self.kv_bytes // alone.page_bytes, facts.max_pages)
        return max(num_pages - self.num_pages, 0) / facts.pages_per_seq

    def rows(self) -> list[tuple[str, int, str]]:
        """Each part: its name, its bytes on a device, and what else there is to say."""
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
        each = f"{facts.page_bytes // size:,} bytes per token"
        if has_draft:
            each += f" (draft {draft.page_bytes // size:,})"
        each += f", {facts.page_bytes:,} per page"
        remark = (
            f"{self.num_pages:,} pages of {size} tokens in {facts.kv_dtype}, {each}"
        )
        rows.append(("KV", self.kv_bytes, remark))
        if facts.limit_bytes is not None and self.left_bytes is not None:
            remark = f"of {shown_bytes(facts.limit_bytes)}"
            if self.utilization is not None:
                remark += f", gpu_memory_utilization={self.utilization:g}"
            rows.append(("left", self.left_bytes, remark))
        return rows

    def table(self) -> str:
        """The parts one below the other, and how many sequences the pages hold."""
        facts = self.facts
        each = "" if facts.num_devices == 1 else f", each of {facts.num_devices}"
        lines = [f"Memory of {facts.device}{each}"]
        for name, num_bytes, remark in self.rows():
            line = f"  {name:<17}{shown_bytes(num_bytes):>11}  {remark}"
            lines.append(line.rstrip())
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """How many sequences the pages hold, and what the draft model costs."""
        facts, length = self.facts, self.facts.max_model_len
        concurrency = self.concurrency(length)
        lines = [f"Maximum concurrency at {length:,} tokens: {concurrency:.2f}x"]
        if facts.draft != ModelBytes():
            lines.append(
                f"The {facts.draft_name} takes {shown_bytes(self.draft_bytes)}: "
                f"without it, {self.sequences_lost:.2f} more of such sequences"
            )
        if self.draft_sharding is not None:
            lines.append(self.draft_sharding.line())
        return lines

    def told(self) -> dict[str, Any]:
        """The same for programs that read it, with bytes of one device."""
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
            "max_num_seqs": self.sizes.num_seqs,
            "max_num_batched_tokens": self.sizes.num_batched_tokens,
            "max_model_len": self.facts.max_model_len,
            "max_concurrency": self.concurrency(self.facts.max_model_len),
            "draft_bytes": self.draft_bytes,
            "sequences_lost": self.sequences_lost,
            "draft_sharding": self.draft_sharding and self.draft_sharding.told(),
            "table": self.table(),
        }


def default_cpu_pages(pages_per_seq: int, num_seqs: int, page_bytes: int) -> int:
    """Fill the batch with full sequences, within the cap, one at the least."""
    cap = MAX_CPU_KV_BYTES // page_bytes
    return max(pages_per_seq, min(num_seqs * pages_per_seq, cap))


def default_sizes(facts: MemoryFacts, room_bytes: int, given: GivenSizes) -> Sizes:
    """Sequences and prompt tokens where the user says nothing; what is given stays.

    Args:
        room_bytes: What programs' temporaries and pages share.
    """
    wanted = CPU_SIZES if facts.platform == "cpu" else ACCELERATOR_SIZES
    seqs = given.max_num_seqs or wanted.num_seqs
    tokens = given.max_num_batched_tokens or wanted.num_batched_tokens

    def is_too_much() -> bool:
        temporary = facts.programs.temporary_bytes(Sizes(seqs, tokens))
        return temporary > MAX_TEMPORARY_SHARE * room_bytes

    while given.max_num_seqs is None and seqs > CPU_SIZES.num_seqs and is_too_much():
        seqs //= 2
    is_open = given.max_num_batched_tokens is None
    while is_open and tokens > CPU_SIZES.num_batched_tokens and is_too_much():
        tokens //= 2
    return Sizes(seqs, tokens)


def plan_memory(facts: MemoryFacts, given: GivenSizes) -> MemoryPlan:
    """Divide a device's memory: what weights and programs leave becomes pages.

    Where there is no limit, what is given says how many pages.

    Raises:
        ConfigError: It does not fit, with all numbers and one setting that helps.
    """
    share = given.gpu_memory_utilization or DEFAULT_UTILIZATION
    limit = facts.limit_bytes
    budget = facts.budget_bytes(share)
    room = budget if limit is None else _room_bytes(facts, budget)
    sizes = default_sizes(facts, room, given)
    is_planned = given.num_pages is None and given.kv_cache_memory_bytes is None
    utilization = None
    if given.num_pages is not None:
        num_pages = given.num_pages
    elif given.kv_cache_memory_bytes is not None:
        num_pages = given.kv_cache_memory_bytes // facts.page_bytes
        _check_kv_bytes(facts, given.kv_cache_memory_bytes)
    else:
        assert limit is not None, "nobody says how many pages"
        utilization = share
        num_pages = _pages_left(facts, sizes, budget)
    plan = MemoryPlan(
        facts=facts,
        sizes=_with_pages(sizes, given, num_pages),
        num_pages=num_pages,
        utilization=utilization,
    )
    if limit is not None and is_planned and num_pages < facts.pages_per_seq:
        raise _no_room(plan, given, budget)
    if plan.left_bytes is not None and plan.left_bytes < 0:
        raise _too_many_pages(plan, given)
    return plan


def _room_bytes(facts: MemoryFacts, budget: int) -> int:
    """Of a budget, what temporaries and pages share."""
    taken = facts.used_bytes + facts.weight_bytes + facts.programs.code_bytes
    return budget - taken


def _with_pages(sizes: Sizes, given: GivenSizes, num_pages: int) -> Sizes:
    """No more sequences than there are pages, if the user has not said so many."""
    if given.max_num_seqs is None:
        return sizes._replace(num_seqs=max(min(sizes.num_seqs, num_pages), 1))
    return sizes


def _pages_left(facts: MemoryFacts, sizes: Sizes, budget: int) -> int:
    """The pages that a budget of bytes leaves, as many as can be numbered.

    The number is round: a start finds some megabytes more or less in use than the one
    before. Programs are compiled for a number of pages: seven leading bits let most
    starts have the same.
    """
    taken = facts.used_bytes + facts.weight_bytes + facts.workspace_bytes(sizes)
    found = min(max(budget - taken, 0) // facts.page_bytes, facts.max_pages)
    step = 1 << max(found.bit_length() - 7, 0)
    rounded = found // step * step
    return rounded if rounded >= facts.pages_per_seq else found


def _check_kv_bytes(facts: MemoryFacts, given: int) -> None:
    one = facts.pages_per_seq * facts.page_bytes
    check_integer(
        ConfigError,
        "kv_cache_memory_bytes",
        given,
        low=one,
        hint=f"One sequence of max_model_len={facts.max_model_len} tokens takes {one:,}"
        f" bytes ({shown_bytes(one)}) of keys and values; give as many, or a smaller "
        "max_model_len.",
    )


def _no_room(plan: MemoryPlan, given: GivenSizes, budget: int) -> ConfigError:
    """What weights and programs leave does not hold one sequence."""
    facts, most = plan.facts, plan.facts.with_most().limit_bytes
    assert most is not None
    one = facts.pages_per_seq * facts.page_bytes
    taken = facts.used_bytes + facts.weight_bytes + plan.workspace_bytes
    name, value = _remedy(plan, given, budget, taken + one)
    advice = f"{name}={value}"
    if name == "tensor_parallel_size":
        advice += f", on {value} such devices"
        advice = ", or ".join([advice, *_on_the_same(plan, budget, taken + one)])
    parts = [f"target {shown_bytes(facts.target.weight_bytes)}"]
    if facts.draft.weight_bytes:
        parts.append(f"draft {shown_bytes(facts.draft.weight_bytes)}")
    parts.append(f"programs {shown_bytes(plan.workspace_bytes)}")
    if facts.used_bytes:
        parts.append(f"others {shown_bytes(facts.used_bytes)}")
    share = given.gpu_memory_utilization or DEFAULT_UTILIZATION
    return ConfigError(
        f"{shown_bytes(taken + one)} are needed of {facts.device}'s "
        f"{shown_bytes(most)}, of which gpu_memory_utilization={share:g} gives "
        f"{shown_bytes(budget)}: {', '.join(parts)}, and {shown_bytes(one)} of keys "
        f"and values for one sequence of max_model_len={facts.max_model_len} tokens. "
        f"Set {advice}.",
        parameter=name,
        value=value,
    )


def _remedy(
    plan: MemoryPlan, given: GivenSizes, budget: int, needed: int
) -> tuple[str, object]:
    """The one setting that makes room, the one that costs least first."""
    facts, most = plan.facts, plan.facts.with_most()
    num_tokens = _pages_left(facts, plan.sizes, budget) * facts.page_size
    if num_tokens >= facts.max_model_len // 4:
        return "max_model_len", num_tokens
    # More memory can mean larger defaults, which need more of it: each share is tried.
    for percent in range(1, int(98 * most.most_share) + 1):
        share = percent / 100
        if most.budget_bytes(share) >= needed and _has_room(most, given, share):
            return "gpu_memory_utilization", share
    seqs, share = plan.sizes.num_seqs, given.gpu_memory_utilization
    while seqs > 1:
        seqs //= 2
        fewer = replace(given, max_num_seqs=seqs)
        if _has_room(facts, fewer, share or DEFAULT_UTILIZATION):
            return "max_num_seqs", seqs
    devices = 1 << facts.num_devices.bit_length()  # heads are spread over powers of two
    while devices < 64 and needed * facts.num_devices / devices > budget:
        devices *= 2
    if facts.platform == "tpu" and devices == 2:  # there is no slice of two chips
        devices = 4
    return "tensor_parallel_size", devices


def _on_the_same(plan: MemoryPlan, budget: int, needed: int) -> list[str]:
    """Settings that make room without more devices, at a price."""
    facts, found = plan.facts, []
    if not facts.target.form:  # not quantized yet
        for kind, share in QUANTIZED_SHARE.items():
            if needed - facts.target.weight_bytes * (1 - share) <= budget:
                found.append(f"quantization={kind!r}, which changes texts")
                break
    num_tokens = _pages_left(facts, plan.sizes, budget) * facts.page_size
    if num_tokens >= LEAST_CONTEXT:
        found.append(f"max_model_len={num_tokens}")
    return found


def _has_room(facts: MemoryFacts, given: GivenSizes, share: float) -> bool:
    """Whether one sequence fits with these sizes and this share."""
    budget = facts.budget_bytes(share)
    sizes = default_sizes(facts, _room_bytes(facts, budget), given)
    return _pages_left(facts, sizes, budget) >= facts.pages_per_seq


def _too_many_pages(plan: MemoryPlan, given: GivenSizes) -> ConfigError:
    """The pages that the user asks for are more than the device has room for."""
    facts = plan.facts
    assert facts.limit_bytes is not None
    assert plan.left_bytes is not None
    most = max(plan.kv_bytes + plan.left_bytes, 0)
    name, value, allowed = "num_gpu_blocks_override", given.num_pages, 0
    allowed = most // facts.page_bytes
    if value is None:
        name, value, allowed = (
            "kv_cache_memory_bytes",
            given.kv_cache_memory_bytes,
            most,
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
    """A number of bytes for people."""
    if abs(num_bytes) >= GIB // 4:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"
