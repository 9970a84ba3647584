"""Proposers: each makes a `Proposal` inside the step program."""

from jaxspec.program.propose.proposal import Proposal

__all__ = ["Proposal"]
