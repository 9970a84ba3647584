"""Owns `FlexibleArgumentParser`, with which scripts for vLLM define their own flags."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jaxspec.command_line import dashed, without_dots
from jaxspec.errors import ConfigError


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts all spellings of flags that the server accepts."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse a command line; `parse_args` calls this."""
        known = self._option_string_actions
        given = list(sys.argv[1:] if args is None else args)
        spelled = [
            one if one.partition("=")[0] in known else dashed(one) for one in given
        ]
        try:
            spelled = without_dots(spelled)
        except ConfigError as error:
            self.error(str(error))
        return super().parse_known_args(spelled, namespace)
