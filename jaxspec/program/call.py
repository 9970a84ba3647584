"""What a compiled program is called with: lists of the arrays that it takes.

The host makes a call in every round. To take trees apart, class by class and dictionary
by dictionary, is a quarter of the call's time for six layers; and each array costs a
microsecond or two, also one that the program hands back as it was. So a program is
given lists, and a plain one nothing of a draft model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxspec.models.params import Params
from jaxspec.program.plan import StepShape
from jaxspec.program.propose.proposal import Proposer
from jaxspec.program.state import EngineState

# The target's parameters, those of each proposer, and the state: or their forms.
Arguments = tuple[Params, tuple[Params | None, ...], EngineState]


def taken(
    proposers: Sequence[Proposer], shape: StepShape, arguments: Arguments
) -> Arguments:
    """The part of an engine's arrays that a program takes; None is the rest."""
    target, params, state = arguments
    if _is_drafting(shape):
        return arguments
    rest = [one.rests_without_drafts for one in proposers]
    params = tuple(
        None if rests else own for rests, own in zip(rest, params, strict=True)
    )
    kept = tuple(
        None if rests else own for rests, own in zip(rest, state.proposers, strict=True)
    )
    state = dataclasses.replace(state, proposers=kept, forced_acceptance=None)
    return target, params, state


def flat(arguments: Arguments) -> tuple[list[Any], list[Any]]:
    """Parameters and state as a call takes them."""
    return jax.tree.leaves(arguments[:2]), jax.tree.leaves(arguments[2])


def _is_drafting(shape: StepShape) -> bool:
    return shape.num_draft_tokens > 0 or shape.is_catch_up


class Arrays:
    """An engine's parameters and state, between calls.

    Calls want lists of them, and whoever else looks wants the trees. These are made
    when they are asked for.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        params: tuple[Params, tuple[Params | None, ...]],
        state: EngineState,
    ):
        self._params = params
        self._leaves, self._structure = jax.tree.flatten(state)
        numbers = jax.tree.unflatten(self._structure, range(len(self._leaves)))
        # Of programs without drafts, and of those with them: the parameters, and how
        # many arrays of the state are given. What rests lies behind all that does not.
        self._calls: list[tuple[list[Array], int]] = []
        for num_drafts in (0, 1):
            shape = StepShape(num_seqs=1, num_draft_tokens=num_drafts, chunk=0)
            weights, _ = flat(taken(proposers, shape, (*params, state)))
            _, places = flat(taken(proposers, shape, (*params, numbers)))
            assert places == list(range(len(places))), "what rests is not at the end"
            self._calls.append((weights, len(places)))

    @property
    def params(self) -> tuple[Params, tuple[Params | None, ...]]:
        """Of the target and of each proposer."""
        return self._params

    @property
    def state(self) -> EngineState:
        """As the last call has left it."""
        return jax.tree.unflatten(self._structure, self._leaves)

    @property
    def are_given_away(self) -> bool:
        """Whether a call has taken the state, and what it made was never kept."""
        return self._leaves[0].is_deleted()

    def call(self, executable: Any, shape: StepShape, plan: Any) -> Array:
        """Call a program of a shape; returns its result, and keeps the state."""
        weights, count = self._calls[_is_drafting(shape)]
        rest = self._leaves[count:]
        made, result = executable(weights, self._leaves[:count], plan)
        # At once, so that no interrupt falls between two of them.
        self._leaves = made + rest
        return result
