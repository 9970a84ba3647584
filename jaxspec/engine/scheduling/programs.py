"""The programs of an engine, and the compiled one that serves a launch.

Each launch size is a program to compile, so there are few. They were chosen by the
measured cost of running launches in larger programs
(`benchmarks/results/program-costs-cpu.json`): a launch pads the K, rows and features
that it does not use. Until its own program is compiled, it runs in a larger one.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.plan import TILE, Features, StepShape
from jaxspec.program.tree.tree import Tree, template_of

# Prompt tokens of the largest programs that an engine compiles at first. Larger ones
# are compiled once that many tokens wait.
FIRST_CHUNK = 2048
# The same with `batch_invariant`: every launch has room for this many.
INVARIANT_CHUNK = 4 * TILE
# Device seconds after which programs with drafts are made while requests run. To load a
# program takes 0.1 s of a CPU, in which rounds take 1.5 times as long: a first short
# request, of 96 tokens of the bundled pair, would end before the drafts pay for it.
DRAFTS_AFTER_S = 0.25
# Numbers of sequences for which programs without prompts are built.
NUM_SIZES = 3

GREEDY, SAMPLED = Features(all_greedy=True), Features()


@runtime_checkable
class Programs(Protocol):
    """The compiled programs; more can be requested."""

    def __contains__(self, shape: StepShape, /) -> bool: ...

    def has_failed(self, shape: StepShape) -> bool:
        """Return whether compiling a program failed."""
        ...

    @property
    def version(self) -> int:
        """Changes whenever a program is added or removed."""
        ...

    def request(self, shape: StepShape) -> None:
        """Queue a program for compilation, ahead of the warm-up."""
        ...


class EveryProgram:
    """All programs, each compiled when it is launched."""

    version = 0

    def __contains__(self, shape: StepShape) -> bool:
        return True

    def has_failed(self, shape: StepShape) -> bool:
        """Return False, because a failed compilation raises in the launch."""
        return False

    def request(self, shape: StepShape) -> None:
        """Do nothing, because the launch compiles its program."""


class Selection(NamedTuple):
    """Programs for launches of one kind.

    Attributes:
        shape: The best compiled one; None if there is none.
        missing: A better one, to be requested; None if there is none.
    """

    shape: StepShape | None
    missing: StepShape | None


class Shapes:
    """The sizes of an engine's launches, and the compiled program for each.

    `select` requests no compile: callers pass missing programs to `request_compile`.

    Attributes:
        max_tiles: Maximum number of prompt tiles in one launch.
        draft_prefills: Draft prefill programs, the smallest first; none without a draft
            model.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: SpeculationPolicy,
        programs: Programs | None = None,
    ):
        self._config, self._policy = config, policy
        self._template = template_of(config.speculative)
        self._programs = EveryProgram() if programs is None else programs
        self._largest_chunk = largest_chunk(
            config.max_num_batched_tokens,
            num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            is_invariant=config.batch_invariant,
        )
        self._chunk = min(self._largest_chunk, FIRST_CHUNK)
        self.max_tiles = self._largest_chunk // TILE
        self._found: dict[tuple, Selection] = {}
        self._requested: set[StepShape] = set()
        self._held: dict[StepShape, None] | None = None  # None: programs do not wait
        self._with_prompts: dict[tuple, list[StepShape]] = {}
        self._found_version = -1
        self._forms = self._all_programs()
        self._on_demand = self._compiled_on_demand()
        self.draft_prefills: list[StepShape] = []
        if config.draft_model_config is not None and len(policy.compiled_levels) > 1:
            chunk = self._chunk
            sizes = {chunk} if config.batch_invariant else {_tiled(chunk // 8), chunk}
            self.draft_prefills = [
                StepShape.draft_prefill(size) for size in sorted(sizes)
            ]

    def _all_programs(self) -> dict[Features, list[StepShape]]:
        """Return the programs by their features, the cheapest features first.

        Logprobs and controls are compiled together, so that no mix of requests needs
        a program of its own. The first program of each list serves all its launches.
        """
        compiled, num_logprobs = self._policy.compiled_levels, self._config.num_logprobs
        seqs, levels = _power_of_two(self._config.max_num_seqs), compiled[-1]
        chunk = self._chunk
        small, single = (_tiled(chunk // part) for part in (8, 4))
        special = Features(has_controls=True, num_logprobs=num_logprobs)
        with_prompt = dataclasses.replace(special, num_prompt_logprobs=num_logprobs)
        largest, alone = (seqs, levels, chunk), (1, levels, 0)
        sizes_without = [(n, 0, 0) for n in _sizes_up_to(seqs)]
        drafting = [
            (n, num_levels, 0)
            for num_levels in compiled[:0:-1]
            for n, *_ in sizes_without
        ]
        # Sequences, levels of drafts, and prompt tokens.
        sizes: dict[Features, list[tuple[int, int, int]]] = {
            GREEDY: drafting + sizes_without,
            SAMPLED: [largest, (1, 0, single), (seqs, levels, small)]
            + drafting
            + [(seqs, 0, small)]
            + [(seqs, 0, 0), *(sizes_without if drafting else [(1, 0, 0)])],
            special: [largest, (seqs, levels, small), alone, (seqs, levels, 0)],
            # After its prompt, such a request decodes in `special` programs.
            with_prompt: [largest],
            dataclasses.replace(special, has_grammar=True): [
                largest,
                alone,
                (seqs, levels, 0),
            ],
            dataclasses.replace(with_prompt, has_grammar=True): [largest],
        }
        if self._config.batch_invariant:
            del sizes[GREEDY]
            sizes = dict.fromkeys(sizes, [largest])
        if self._largest_chunk > chunk:
            for listed in sizes.values():
                if largest in listed:
                    listed.append((seqs, levels, self._largest_chunk))
        rounds = self._config.num_scheduler_steps
        forms = {
            form: [
                StepShape(
                    num_seqs=n,
                    num_levels=num_levels,
                    max_prompt_tokens=num_tokens,
                    features=form,
                    max_rounds=rounds
                    if form in (GREEDY, SAMPLED) and not num_tokens
                    else 1,
                    template=self._template,
                )
                for n, num_levels, num_tokens in dict.fromkeys(listed)
            ]
            for form, listed in sizes.items()
        }
        if self.has_chains:
            for form in (GREEDY, SAMPLED):
                forms[form] += [
                    dataclasses.replace(shape, template=None)
                    for shape in forms[form]
                    if shape.num_levels and not shape.max_prompt_tokens
                ]
        return forms

    @property
    def has_chains(self) -> bool:
        """Whether rounds may also run without the side branches of the draft tree."""
        template, is_free = self._template, self._policy.is_adaptive
        if template is None or not is_free or self._config.batch_invariant:
            return False
        return template.main_chain.num_levels == template.num_levels

    def _is_chain(self, shape: StepShape) -> bool:
        """Return whether a program leaves out the engine tree's side branches."""
        return shape.template != self._template

    def _compiled_on_demand(self) -> set[StepShape]:
        """Return programs that are compiled on demand; larger ones serve until then.

        In engines that draft: programs without drafts, or without side branches. They
        are compiled when a launch would be faster in them, e.g. when drafts do not pay.
        Also programs for more prompt tokens than most launches have.
        """
        return {
            shape
            for form, shapes in self._forms.items()
            for shape in shapes
            if self._is_chain(shape)
            or shape.max_prompt_tokens > self._chunk
            or (
                form in (GREEDY, SAMPLED)
                and len(self._policy.compiled_levels) > 1
                and not shape.num_levels
                and (
                    shape.num_seqs > 1
                    or not (shape.max_prompt_tokens or form == GREEDY)
                )
            )
        }

    def tree(self, num_levels: int) -> Tree:
        """Return the tree whose rows a round with `num_levels` levels writes.

        The engine's whole tree, even if fewer levels are requested: rows of deeper
        levels may precede rows of requested ones.
        """
        if self._template is None or not num_levels:
            return Tree.chain(num_levels)
        return self._template

    def form(self, features: Features) -> Features:
        """Return the cheapest set of features with programs that serves `features`."""
        return next(form for form in self._forms if form.covers(features))

    def all(
        self,
        prompt_tokens: int | None = None,
        features: Iterable[Features] = (GREEDY, SAMPLED),
        *,
        with_on_demand: bool = False,
    ) -> list[StepShape]:
        """Return every program that launches can use, the most useful first.

        Of each set of features, the first program serves all launches.

        Args:
            prompt_tokens: Longest prompt to expect; None for any.
            features: Features that requests need; greedy and sampled by default.
            with_on_demand: Include programs that are otherwise compiled on first use:
                without drafts or side branches, in engines that have them, and for
                more than `FIRST_CHUNK` prompt tokens.
        """
        forms = list(dict.fromkeys(self.form(one) for one in features))
        # Sampled before greedy: programs that sample serve both.
        forms.sort(key=lambda form: form.all_greedy)
        lists = [self._forms[form] for form in forms]
        listed = [
            shapes[0] for shapes in lists if shapes and shapes[0].max_prompt_tokens
        ]
        if not self._policy.is_stopped:
            listed += self.draft_prefills  # needed for drafts
        listed += [shape for shapes in lists for shape in shapes]
        budget = self.max_tiles * TILE
        tokens = budget if prompt_tokens is None else prompt_tokens
        # Prompts share launches, each in tiles of its own.
        wanted = min(-(-tokens // TILE) * TILE * self._config.max_num_seqs, budget)
        chunks = sorted({shape.max_prompt_tokens for shape in listed})
        last = next((chunk for chunk in chunks if chunk >= wanted), chunks[-1])
        chosen = [shape for shape in listed if shape.max_prompt_tokens <= last]
        if not with_on_demand:
            chosen = [shape for shape in chosen if shape not in self._on_demand]
        return list(dict.fromkeys(chosen))

    def is_on_demand(self, shape: StepShape) -> bool:
        """Return whether a program is compiled on demand.

        A larger one serves until then.
        """
        return shape in self._on_demand

    @property
    def cannot_draft_prefill(self) -> bool:
        """Whether all draft prefill programs failed to compile."""
        shapes = self.draft_prefills
        return bool(shapes) and all(map(self._programs.has_failed, shapes))

    @property
    def can_draft_prefill(self) -> bool:
        """Whether a draft prefill program is compiled."""
        return any(shape in self._programs for shape in self.draft_prefills)

    @property
    def is_draft_prefill_held(self) -> bool:
        """Whether draft prefill has no program, and none is requested yet."""
        return self._held is not None and not self.can_draft_prefill

    def select_draft_prefill(self, num_tiles: int) -> Selection:
        """Return the draft prefill programs for a number of tiles.

        The best is the smallest with room for all tiles, else the largest.
        """
        fits = [shape for shape in self.draft_prefills if shape.num_tiles >= num_tiles]
        smaller = [shape for shape in self.draft_prefills if shape not in fits]
        ordered = [
            shape
            for shape in fits + smaller[::-1]
            if not self._programs.has_failed(shape)
        ]
        compiled = next((shape for shape in ordered if shape in self._programs), None)
        is_best = not ordered or compiled == ordered[0]
        return Selection(compiled, None if is_best else ordered[0])

    def select(
        self,
        num_seqs: int,
        num_draft_tokens: int,
        num_prompt_tokens: int = 0,
        features: Features = SAMPLED,
        *,
        may_request_on_demand: bool = True,
        has_side_branches: bool = True,
    ) -> Selection:
        """Return the programs that serve a launch.

        Args:
            num_prompt_tokens: Rounded up to tiles, and down to `max_tiles`.
            may_request_on_demand: The missing program may be one that is compiled on
                demand. If few such launches will follow, it must not, unless no other
                program serves.
            has_side_branches: The drafts include the engine's side branches. If not, a
                program with side branches serves until one without is compiled.
        """
        self._refresh()
        need = num_seqs, num_draft_tokens, num_prompt_tokens, features
        key = *need, may_request_on_demand, has_side_branches
        selection = self._found.get(key)
        if selection is None:
            selection = self._found[key] = self._select(
                *need, may_request_on_demand, has_side_branches
            )
        return selection

    def _select(
        self,
        num_seqs: int,
        num_draft_tokens: int,
        num_prompt_tokens: int,
        features: Features,
        may_request_on_demand: bool,
        has_side_branches: bool,
    ) -> Selection:
        tokens = min(-(-num_prompt_tokens // TILE), self.max_tiles) * TILE
        able = self._able(
            num_seqs, num_draft_tokens, tokens, features, has_side_branches
        )
        compiled = next((shape for shape in able if shape in self._programs), None)
        best = next(
            (
                shape
                for shape in able
                if may_request_on_demand or shape not in self._on_demand
            ),
            able[0],
        )
        is_better = compiled is None or able.index(best) < able.index(compiled)
        return Selection(compiled, best if is_better else None)

    def find(
        self,
        num_seqs: int,
        num_draft_tokens: int,
        num_prompt_tokens: int = 0,
        features: Features = SAMPLED,
        *,
        has_side_branches: bool = True,
    ) -> StepShape | None:
        """Return the best compiled program for a launch; None if there is none."""
        return self.select(
            num_seqs,
            num_draft_tokens,
            num_prompt_tokens,
            features,
            has_side_branches=has_side_branches,
        ).shape

    def request_compile(self, *shapes: StepShape | None, may_wait: bool = True) -> None:
        """Request programs; the last one is compiled first, each is requested once.

        Args:
            shapes: Programs; None is ignored.
            may_wait: Between `hold_drafts` and `release_drafts`, let programs with
                drafts wait.
        """
        held = self._held if may_wait else None
        for shape in shapes:
            if shape is None:
                continue  # the case in most rounds
            if held is not None and (shape.num_levels or shape.is_draft_prefill):
                held[shape] = None
                continue
            self._refresh()
            if shape not in self._requested:
                self._requested.add(shape)
                self._programs.request(shape)

    def hold_drafts(self) -> None:
        """Let programs with drafts wait for `release_drafts`."""
        self._held = {}

    def release_drafts(self) -> None:
        """Request the programs with drafts that waited, and let none wait any more.

        If drafting has stopped, they are dropped: without the proposers' state, draft
        prefill cannot be compiled.
        """
        held, self._held = self._held, None
        if held and not self._policy.is_stopped:
            self.request_compile(*held)

    def _refresh(self) -> None:
        if self._found_version != self._programs.version:
            self._found_version = self._programs.version
            self._found.clear()
            self._requested.clear()
            self._with_prompts.clear()

    def _able(
        self,
        num_seqs: int,
        num_draft_tokens: int,
        tokens: int,
        features: Features,
        has_side_branches: bool,
    ) -> list[StepShape]:
        """Return the programs that can serve a launch, the best first."""
        compiled = self._policy.compiled_for(num_draft_tokens)
        forms = [form for form in self._forms if form.covers(features)]
        if self._config.batch_invariant:
            del forms[1:]  # other programs may round differently
        able = [
            shape
            for form in forms
            for shape in self._forms[form]
            if shape.num_seqs >= num_seqs
            and shape.num_levels >= compiled
            and shape.max_prompt_tokens >= tokens
            and not (has_side_branches and self._is_chain(shape))
        ]
        assert able, f"no program for {num_seqs} sequences and {tokens} prompt tokens"
        # Stable sort: among equal sizes the cheapest features remain first.
        return sorted(
            able,
            key=lambda shape: (
                shape.num_levels,
                shape.max_prompt_tokens,
                shape.num_seqs,
                not self._is_chain(shape),
            ),
        )

    def with_prompts(
        self, num_seqs: int, num_draft_tokens: int, features: Features
    ) -> list[StepShape]:
        """Return the compiled programs with room for prompts, smallest chunk first."""
        self._refresh()
        need = num_seqs, num_draft_tokens, features
        if need not in self._with_prompts:
            able = self._able(num_seqs, num_draft_tokens, TILE, features, True)
            there = [shape for shape in able if shape in self._programs]
            # For each chunk size, the best program.
            chunks = {shape.max_prompt_tokens: shape for shape in reversed(there)}
            self._with_prompts[need] = [chunks[size] for size in sorted(chunks)]
        return self._with_prompts[need]


def largest_chunk(
    num_batched_tokens: int, *, num_seqs: int, max_model_len: int, is_invariant: bool
) -> int:
    """Return the number of prompt tokens that the largest program has room for.

    `num_batched_tokens`, or less: `FIRST_CHUNK`, or all prompt tokens that `num_seqs`
    sequences can have, if that is more.
    """
    if is_invariant:
        num_batched_tokens = min(num_batched_tokens, INVARIANT_CHUNK)
    longest = -(-max_model_len // TILE) * TILE * num_seqs
    return _tiled(min(num_batched_tokens, max(longest, FIRST_CHUNK)))


def _sizes_up_to(max_seqs: int) -> list[int]:
    """Return batch sizes from 1 to `max_seqs`, at about equal ratios."""
    power = max_seqs.bit_length() - 1
    steps = range(NUM_SIZES)
    exponents = {-(-power * step // (NUM_SIZES - 1)) for step in steps}
    # From both ends: single sequences and full batches are the most common.
    sizes = (1 << exponent for exponent in exponents)
    return sorted(sizes, key=lambda size: size not in (1, max_seqs))


def _tiled(tokens: int) -> int:
    return max(tokens // TILE, 1) * TILE


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
