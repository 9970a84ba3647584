"""Engines with every proposer of drafts; each engine is made once per process.

All use the models of `tests.support.pair`. Most of the tests' time is compilation, so
all conformance checks of a proposer use the same executables: they change only settings
that no executable depends on.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxspec.config.token_tree import MAX_NODES, read_paths
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.runner import Runner
from jaxspec.sharding import make_mesh
from tests.support import heads, pair
from tests.support.engines import (
    MICRO,
    OneGreedyProgramRunner,
    OneProgramRunner,
    OneShapeRunner,
    make_draft_of,
    make_engine,
    make_micro,
    with_settings,
)

# Three levels, so that page and window borders fall at every offset of a tree.
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]"
# A similar tree for the micro target, which has 16 tokens.
MICRO_TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"
# The largest tree that is allowed, eight levels deep.
LARGEST_TREE = str(
    [(0,) * count for count in range(1, 9)]
    + [
        (*(0,) * level, rank, *(0,) * more)
        for level in range(4)
        for rank in range(1, 4)
        for more in range(4)
    ]
    + [(1, 1), (1, 2), (2, 1), (3, 1), (0, 1, 1), (0, 1, 2), (0, 2, 1), (0, 3, 1)]
)
assert len(read_paths(LARGEST_TREE)) == MAX_NODES
LOOKUP = (3, 1)
# Rounds with suffix drafts are compiled for 0, a few, and at most this many drafts.
NUM_SUFFIX = 32
SUFFIX = {"max_tree_depth": 2 * NUM_SUFFIX}
MASK, MICRO_MASK = 0, MICRO["vocab_size"] - 1
# Tokens of a trimmed draft: half of the micro target's vocabulary.
MICRO_KEPT = (1, 3, 4, 5, 8, 9, 11, 14)
# Sizes of a micro model that can be split over eight devices.
MICRO_SPLIT: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=4)


@dataclass(frozen=True, kw_only=True)
class Proposer:
    """One way to propose drafts.

    Attributes:
        draft: Argument of `pair.draft`; None without a draft model.
        head: Kind of head, such as "eagle"; None without a head.
        options: Further arguments of `make_engine`.
        micro: Arguments of `make_engine` that differ for the micro target.
        runner: Runner that decides which launches share a program. A lookup with a
            draft model needs several programs, because the draft model needs a draft
            prefill after launches that did not run it.
        family: Family of the target and the draft model, as in `pair`.
        at_most: The acceptance rate must be below this; low for random heads.
    """

    draft: str | None = None
    head: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    micro: Mapping[str, Any] = field(default_factory=dict)
    runner: type[Runner] = OneProgramRunner
    family: str = pair.GEMMA2
    at_most: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether the shared program serves only greedy requests."""
        return issubclass(self.runner, OneGreedyProgramRunner)

    @property
    def has_side_branches(self) -> bool:
        return bool(self.options.get("tree") or self.options.get("num_side_leaves"))

    @property
    def can_be_correct(self) -> bool:
        """Whether all drafts would be accepted if the draft model were the target."""
        names = {"mask_token_id", "kept", "draft_scheme", "lookup", "suffix"}
        return self.draft is not None and not names & self.options.keys()

    @property
    def num_draft_tokens(self) -> int:
        return _num_draft_tokens(self.options)


def _num_draft_tokens(options: Mapping[str, Any]) -> int:
    if tree := options.get("tree"):
        return len(read_paths(tree))
    return options.get("num_draft_tokens", pair.NUM_DRAFT)


def _model(**options: Any) -> Proposer:
    changes = {name: options.pop(name) for name in ("micro",) if name in options}
    runner = options.pop("runner", OneShapeRunner)
    return Proposer(draft="noisy", options=options, runner=runner, **changes)


def _lookup(**options: Any) -> Proposer:
    micro = dict(lookup=(2, 1)) if "lookup" in options else {}
    if "suffix" in options:
        micro = dict(suffix={"max_spec_factor": 2.0}, num_draft_tokens=3)
    if "tree" in options:
        micro |= dict(tree=MICRO_TREE)
    draft, runner = options.pop("draft", None), options.pop("runner", OneProgramRunner)
    return Proposer(draft=draft, options=options, micro=micro, runner=runner)


def _head(kind: str, **options: Any) -> Proposer:
    # A program for only greedy requests compiles in a third of the time.
    runner = OneProgramRunner if kind == "eagle3" else OneGreedyProgramRunner
    settings = dict(max_num_seqs=8, num_pages=160, max_num_batched_tokens=64)
    micro = dict(tree=MICRO_TREE) if "tree" in options else {}
    return Proposer(
        head=kind, options=settings | options, micro=micro, runner=runner, at_most=0.5
    )


_PARD = dict(mask_token_id=MASK, micro=dict(mask_token_id=MICRO_MASK))
_TRIMMED = dict(kept=pair.KEPT, micro=dict(kept=MICRO_KEPT), runner=OneProgramRunner)
_GEMMA3: dict[str, Any] = dict(family=pair.GEMMA3, runner=OneGreedyProgramRunner)

# Keys are test ids.
PROPOSERS: dict[str, Proposer] = {
    "draft model": _model(),
    "pard": _model(runner=OneProgramRunner, **_PARD),
    "pard, 16 drafts": _model(num_draft_tokens=16, **_PARD),
    "pard, leaves": _model(num_side_leaves=2, **_PARD),
    "pard, tree": _model(tree=TREE, mask_token_id=MASK),
    "int8 draft": _model(draft_scheme=pair.INT8),
    "int4 draft": _model(draft_scheme=pair.INT4),
    "trimmed": _model(**_TRIMMED),
    "trimmed, scanned": _model(scan_layers=True, **_TRIMMED),
    "trimmed, n-gram": _model(lookup=LOOKUP, **_TRIMMED),
    "trimmed, tree": _model(tree=TREE, **_TRIMMED),
    "trimmed, leaves": _model(num_side_leaves=2, **_TRIMMED),
    "trimmed, pard": _model(mask_token_id=MASK, **_TRIMMED),
    "n-gram": _lookup(lookup=LOOKUP),
    "n-gram + draft model": _lookup(
        lookup=LOOKUP, draft="noisy", runner=OneShapeRunner
    ),
    "suffix": _lookup(suffix=SUFFIX, num_draft_tokens=NUM_SUFFIX),
    "suffix + draft model": _lookup(
        suffix=SUFFIX, draft="noisy", runner=OneShapeRunner
    ),
    "eagle": _head("eagle"),
    "eagle3": _head("eagle3"),
    "medusa": _head("medusa"),
    "dflash": _head("dflash"),
    "eagle, leaves": _head("eagle", num_side_leaves=2),
    "eagle3, leaves": _head("eagle3", num_side_leaves=2),
    "medusa, tree": _head("medusa", tree=TREE),
    "dflash, tree": _head("dflash", tree=TREE),
    "leaves": _model(num_side_leaves=2, runner=OneProgramRunner),
    "tree": _model(tree=TREE, micro=dict(tree=MICRO_TREE), runner=OneProgramRunner),
    "tree, scanned": _model(tree=TREE, scan_layers=True),
    "largest tree": _model(tree=LARGEST_TREE),
    "n-gram, tree": _lookup(lookup=LOOKUP, tree=TREE),
    "n-gram + draft model, leaves": _lookup(
        lookup=LOOKUP, draft="noisy", num_side_leaves=1, runner=OneShapeRunner
    ),
    "suffix, leaves": _lookup(suffix={}, num_side_leaves=1, runner=OneShapeRunner),
    "draft model, Gemma 3": Proposer(draft="noisy", **_GEMMA3),
}


def make(name: str, **changes: Any) -> LLMEngine:
    """Make a new engine with a proposer.

    Args:
        changes: Arguments of `make_engine` that override the proposer's.
    """
    proposer = PROPOSERS[name]
    options: dict[str, Any] = dict(pair.SETTINGS, runner=proposer.runner)
    options |= {"num_draft_tokens": proposer.num_draft_tokens, **proposer.options}
    options |= changes
    if proposer.head is not None:
        return heads.make_head_engine(proposer.head, **options)
    target, draft = pair.target(proposer.family), None
    if proposer.draft is not None:
        draft = pair.draft(proposer.draft, proposer.family)
    return make_engine(target, draft, **options)


@functools.cache
def first_engine(name: str) -> LLMEngine:
    """Return the engine whose executables all checks of a proposer share."""
    return pair.engine() if name == "draft model" else make(name)


@functools.cache
def forced_engine(name: str) -> LLMEngine:
    """Return an engine whose texts consist of drafts: see `heads.forced_rounds`."""
    return make(name, **heads.FORCED)


def engine(name: str, *, seed: int = 0, **speculative: Any) -> LLMEngine:
    """Return a new engine over the shared executables of a proposer.

    Args:
        speculative: Changed fields of `SpeculativeConfig`.
    """
    return with_settings(first_engine(name), seed=seed, **speculative)


def with_config(engine: LLMEngine, **changes: Any) -> LLMEngine:
    """Return a new engine with another host configuration and the same runner."""
    config = replace(engine.config, **changes)
    return LLMEngine(config, runner=engine.runner, tokenizer=engine.tokenizer)


@functools.cache
def plain_engine(family: str = pair.GEMMA2, dtype: str = "float32") -> LLMEngine:
    """Return an engine without drafts, whose texts are the expected ones."""
    if (family, dtype) == (pair.GEMMA2, "float32"):
        return pair.plain_engine()
    runner = OneProgramRunner if family == pair.GEMMA2 else OneGreedyProgramRunner
    return make_engine(pair.target(family), dtype=dtype, runner=runner, **pair.SETTINGS)


def micro_head(kind: str, *, is_split: bool = False) -> tuple[Any, Any]:
    """Return the config and parameters of a head for the micro target.

    An EAGLE-3 head can propose 11 of the 16 tokens and uses the target's embedding;
    DFlash uses its embedding and its output matrix.
    """
    hidden = MICRO["hidden_size"]
    sizes: dict[str, Any] = dict(
        target_hidden_size=hidden,
        vocab_size=MICRO["vocab_size"],
        draft_vocab_size=MICRO["vocab_size"],
    )
    if kind == "eagle":
        sizes |= dict(hidden_size=hidden, has_embedding=False)
    if kind == "eagle3":
        sizes |= dict(
            hidden_size=hidden,
            draft_vocab_size=11,
            has_embedding=False,
            norm_before_residual=False,
        )
    if kind == "medusa":
        sizes |= dict(lm_heads=0)
    if kind == "dflash":
        sizes |= dict(hidden_size=hidden, has_lm_head=False)
    config = heads.config_of(kind, **sizes)
    if is_split and kind != "medusa":
        config = replace(config, num_q_heads=8, num_kv_heads=2)
    return config, heads.random_params(config, seed=2)


@functools.cache
def micro_target() -> Any:
    return make_micro(seed=3)


@functools.cache
def micro_engine(name: str, *, is_optimized: bool = False) -> LLMEngine:
    """Return an engine with the micro target, sized for thousands of short requests."""
    proposer, target = PROPOSERS[name], micro_target()
    options = {**proposer.options, **proposer.micro}
    for setting in pair.SETTINGS:
        options.pop(setting, None)
    options.setdefault("num_draft_tokens", _num_draft_tokens(options))
    if proposer.head is not None:
        options["head"] = micro_head(proposer.head)
    draft = None if proposer.draft is None else make_draft_of(target, num_layers=2)
    # Nearly every launch has prompts, and most rounds of a lookup have no drafts:
    # programs without drafts save time.
    is_shaped = is_optimized or "lookup" in options or "suffix" in options
    return make_engine(
        target,
        draft,
        max_num_seqs=64,
        max_num_batched_tokens=512,  # a third of the rows ends in a round
        num_pages=1024,
        max_model_len=32,
        runner=OneShapeRunner if is_shaped else OneProgramRunner,
        is_optimized=is_optimized,
        **options,
    )


def split_engine(name: str, num_devices: int, num_draft_devices: int) -> LLMEngine:
    """Return an engine with a micro target on several devices.

    Args:
        num_draft_devices: Devices that share one copy of the draft model or head.
    """
    proposer = PROPOSERS[name]
    target = split_target(proposer.family)
    options: dict[str, Any] = {**proposer.options, **proposer.micro}
    options = {key: one for key, one in options.items() if key not in pair.SETTINGS}
    options |= dict(
        num_draft_tokens=proposer.num_draft_tokens,
        tensor_parallel_size=num_devices,
        draft_tensor_parallel_size=num_draft_devices,
        runner=proposer.runner,
    )
    draft = None
    if proposer.head is not None:
        config, _ = micro_head(proposer.head, is_split=True)
        mesh = make_mesh(num_devices, num_draft_devices)
        options["head"] = config, heads.random_params(config, mesh=mesh)
    elif proposer.family == pair.GEMMA3:
        options |= pair.SETTINGS
        draft = pair.add_noise(_split_gemma3())
    else:
        draft = make_micro(seed=3, **MICRO_SPLIT)
    return make_engine(target, draft, **options)


@functools.cache
def split_target(family: str) -> Any:
    if family == pair.GEMMA3:
        return _split_gemma3()
    return make_micro(seed=3, **MICRO_SPLIT)


def _split_gemma3() -> Any:
    """Return a Gemma 3 whose single KV head is copied to each device."""
    sizes = dict(num_attention_heads=8, hidden_size=24, intermediate_size=32)
    return pair.make_model(2, family=pair.GEMMA3, **sizes)
