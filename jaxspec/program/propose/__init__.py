"""Proposers make drafts inside the step program; `PROPOSERS` lists them."""

from collections.abc import Callable

from jaxspec.config.engine import EngineConfig
from jaxspec.program.propose.dflash import DFlash
from jaxspec.program.propose.draft_model import DraftModel
from jaxspec.program.propose.eagle import Eagle
from jaxspec.program.propose.eagle3 import Eagle3
from jaxspec.program.propose.medusa import Medusa
from jaxspec.program.propose.ngram import NGram
from jaxspec.program.propose.pard import Pard
from jaxspec.program.propose.proposal import (
    Observer,
    Proposal,
    Proposer,
    ProposerContext,
    Seen,
)
from jaxspec.program.propose.suffix import Suffix

__all__ = [
    "PROPOSERS",
    "ProposerContext",
    "DFlash",
    "DraftModel",
    "Eagle",
    "Eagle3",
    "Medusa",
    "NGram",
    "Observer",
    "Pard",
    "Proposal",
    "Proposer",
    "Seen",
    "Suffix",
    "proposers_of",
]

# Proposers by name. The method "ngram+draft_model" runs "ngram", then "draft_model".
PROPOSERS: dict[str, Callable[[EngineConfig], Proposer]] = {
    "draft_model": DraftModel.of,
    "pard": Pard.of,
    "ngram": NGram.of,
    "suffix": Suffix.of,
    "eagle": Eagle.of,
    "eagle3": Eagle3.of,
    "medusa": Medusa.of,
    "dflash": DFlash.of,
}


def proposers_of(config: EngineConfig) -> tuple[Proposer, ...]:
    """Return the proposers of an engine; none without speculation."""
    if config.speculative is None:
        return ()
    names = config.speculative.method.split("+")
    return tuple(PROPOSERS[name](config) for name in names)
