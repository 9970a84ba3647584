"""One launch as the host sees it: its plan, whom that is about, what came of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxspec.engine.request import Request
from jaxspec.program.plan import StepPlan, StepShape
from jaxspec.program.wire import TokenLogprobs


class LaunchError(Exception):
    """A launch or its read failed.

    Attributes:
        reason: What was raised.
    """

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.reason = reason


@contextlib.contextmanager
def on_device() -> Iterator[None]:
    """Tell failures of what is done here from those of the host."""
    try:
        yield
    except Exception as error:
        raise LaunchError(error) from error


@dataclass(kw_only=True)
class Launch:
    """A plan, and whom its entries belong to.

    Attributes:
        rows: Decoding rows, in the order of the plan.
        owners: Whose they were, as `RowTable.owner`.
        drafts: Drafts of each.
        tiled: The requests of the plan's tiles.
        registered: Pages that can be found since, and hold nothing before it has run.
        charged_s: What `Pacer` counts for it.
    """

    plan: StepPlan
    shape: StepShape
    rows: np.ndarray
    owners: np.ndarray
    drafts: np.ndarray
    decoding: list[Request]
    tiled: list[Request]
    registered: list[int]
    charged_s: float | None = None

    @property
    def num_fed(self) -> int:
        """Tokens of prompts."""
        return sum(len(tile.tokens) for tile in self.plan.tiles)


@dataclass(kw_only=True, slots=True)
class Progress:
    """What a launch added to one request.

    Attributes:
        is_broken: What the model made is NaN or infinite: the request cannot go on.
        logprobs: Of `token_ids`, one entry per token, where the request wants any.
        prompt_logprobs: The same for the next prompt tokens of which nothing has been
            told yet, in order, from the prompt's second token on.
    """

    request: Request
    token_ids: list[int]
    is_done: bool
    is_broken: bool = False
    num_draft_tokens: int = 0
    num_accepted: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
