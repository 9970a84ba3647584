"""Owns what an idle engine does to free the devices' memory, and to come back."""

from typing import no_type_check

from jaxspec.config import EngineConfig
from jaxspec.engine.loading import load_weights
from jaxspec.engine.runner import Runner
from jaxspec.errors import (
    RequestError,
    check_choice,
    check_integer,
    wrong_argument,
)

_PARTS: tuple[str, ...] = ("weights", "kv_cache")


def check_level(level: int) -> int:
    """Return the level of a sleep, if it is one."""
    return check_integer(RequestError, "level", level, low=1, high=2)


class Sleep:
    """Which parts of a runner are off the devices.

    Attributes:
        level: 0 awake; 1 the weights are on the host; 2 they are nowhere.
    """

    def __init__(self, config: EngineConfig, runner: Runner):
        self._config, self._runner = config, runner
        self._asleep: set[str] = set()
        self.level = 0

    def begin(self, level: int) -> None:
        """Free weights and pages; nothing happens to an engine that sleeps.

        Raises:
            RequestError: Another level than 1 or 2.
        """
        level = check_level(level)
        if self._asleep:
            return
        self._runner.drop_pages()
        self._runner.drop_weights(keep=level == 1)
        self._asleep, self.level = set(_PARTS), level

    @no_type_check  # it has its own check, with a better error
    def end(self, tags: list[str] | None) -> None:
        """Bring back the parts named in `tags`, or (None) all that are missing.

        Raises:
            RequestError: A tag is no part.
        """
        wanted = _PARTS if tags is None else tags
        if not isinstance(wanted, (list, tuple)):
            allowed = "a list of 'weights' and 'kv_cache', or None for both"
            raise wrong_argument(RequestError, "tags", allowed, tags)
        for tag in wanted:
            check_choice(RequestError, "tags", tag, _PARTS)
        if "weights" in self._asleep.intersection(wanted):
            mesh = self._runner.mesh
            again = None if self.level == 1 else load_weights(self._config, mesh)
            self._runner.restore_weights(again)
        if "kv_cache" in self._asleep.intersection(wanted):
            self._runner.restore_pages()
        self._asleep.difference_update(wanted)
        if not self._asleep:
            self.level = 0
