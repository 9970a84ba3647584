"""Which sizes launches have: few, since every size is a program to compile."""

import dataclasses

from jaxspec.config import EngineConfig
from jaxspec.engine.controller import Controller
from jaxspec.program.plan import TILE, Features, StepShape

# Prompt tokens per launch for which executables may be built.
CHUNK_LADDER = (0, 32, 128, 512, 2048)


class Shapes:
    """The sizes of an engine's launches.

    Sequences alone have the smallest of all powers of two and all rungs of K. Where
    prompts ride along, which is rarer and costs the most for the prompts, there are
    one sequence or all, and no drafts or the most: that saves more than half of the
    programs.

    Attributes:
        most_tiles: Of prompts, in one launch.
    """

    def __init__(self, config: EngineConfig, controller: Controller):
        self._controller = controller
        budget = min(config.max_num_batched_tokens, CHUNK_LADDER[-1])
        self.most_tiles = max(budget // TILE, 1)
        self._max_num_seqs = config.max_num_seqs
        self._most_seqs = _power_of_two(config.max_num_seqs)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Prompt tokens that a launch may take along, without 0."""
        return tuple(c for c in CHUNK_LADDER if 0 < c <= self.most_tiles * TILE)

    def num_draft(self, wanted: int, *, may_feed: bool) -> int:
        """K for the most drafts that anybody wants.

        Args:
            may_feed: Prompts may ride along. Pages are taken before that is known.
        """
        rung = self._controller.rung(wanted)
        return self._controller.ladder[-1] if rung and may_feed else rung

    def of(
        self,
        num_seqs: int,
        num_draft_tokens: int,
        num_prompt_tokens: int = 0,
        features: Features | None = None,
    ) -> StepShape:
        """The smallest size that serves a launch.

        Args:
            num_draft_tokens: Of `num_draft`.
        """
        size = _power_of_two(max(num_seqs, 1))
        return StepShape(
            num_seqs=self._most_seqs if num_prompt_tokens and size > 1 else size,
            num_draft_tokens=num_draft_tokens,
            chunk=next(c for c in CHUNK_LADDER if c >= num_prompt_tokens),
            features=features or Features(),
        )

    def with_prompts(self, plain: StepShape, chunk: int) -> StepShape:
        """The size of the same launch with prompt tokens."""
        num_seqs = self._most_seqs if plain.num_seqs > 1 else 1
        return dataclasses.replace(plain, num_seqs=num_seqs, chunk=chunk)

    def all(
        self, prompt_tokens: int | None = None, features: Features | None = None
    ) -> list[StepShape]:
        """Every size that a launch can have, for prompts up to a length.

        Args:
            prompt_tokens: None for as many as a launch takes.
            features: What requests will need; nothing special by default.
        """
        budget = self.most_tiles * TILE
        # Prompts come together, each in tiles of its own.
        tiles = -(-(budget if prompt_tokens is None else prompt_tokens) // TILE)
        wanted = tiles * TILE * self._max_num_seqs
        last = next(c for c in CHUNK_LADDER if c >= min(wanted, budget))
        ladder = self._controller.ladder
        alone = [1 << power for power in range(self._most_seqs.bit_length())]
        sizes = [(seqs, draft, 0) for seqs in alone for draft in ladder]
        sizes += [
            (seqs, draft, chunk)
            for seqs in sorted({1, self._most_seqs})
            for draft in sorted({0, ladder[-1]})
            for chunk in CHUNK_LADDER
            if 0 < chunk <= last
        ]
        return [self.of(*size, features=features) for size in sizes]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
