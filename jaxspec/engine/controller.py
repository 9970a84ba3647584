"""How many drafts the next launch makes."""

import logging

from jaxspec.speculation import SpeculativeConfig

_log = logging.getLogger(__name__)


class Controller:
    """Picks K by the number of running requests and what they ask for.

    Attributes:
        is_stopped: Nothing is drafted any more: drafting has failed.
    """

    def __init__(self, speculative: SpeculativeConfig | None):
        self.speculative = speculative
        configured = speculative.num_speculative_tokens if speculative else 0
        # For which executables are built: how many drafts each sequence has is data.
        self.ladder = (0, configured) if configured else (0,)
        self.is_stopped = False

    def stop(self, reason: str) -> None:
        """Draft no more."""
        if self.speculative is not None and not self.is_stopped:
            self.is_stopped = True
            _log.error("Going on without speculation: %s", reason)

    def limit(self, num_running: int) -> int:
        """Most drafts per sequence with this many requests running; 0 is off."""
        if self.speculative is None or self.is_stopped:
            return 0
        threshold = self.speculative.disable_by_batch_size
        if threshold is not None and num_running > threshold:
            return 0
        return self.speculative.num_speculative_tokens

    def rung(self, wanted: int) -> int:
        """The smallest K of the ladder that serves `wanted` drafts."""
        return next(rung for rung in self.ladder if rung >= wanted)
