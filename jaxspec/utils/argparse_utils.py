"""Owns `FlexibleArgumentParser`, with which scripts for vLLM define their own flags."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jaxspec.serve.flags import dashed


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts flags with underscores in place of dashes, as the server does."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse a command line; `parse_args` calls this."""
        known = self._option_string_actions
        given = list(sys.argv[1:] if args is None else args)
        spelled = [
            one if one.partition("=")[0] in known else dashed(one) for one in given
        ]
        return super().parse_known_args(spelled, namespace)
