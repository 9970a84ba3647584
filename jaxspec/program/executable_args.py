"""The lists of arrays that a compiled program is called with.

The host makes a call in every round. Flattening trees, class by class and dictionary by
dictionary, is a quarter of the call's time for six layers; and each array costs a
microsecond or two, even one that the program returns unchanged. So a program takes
lists, and a plain program takes no arrays of a draft model.
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

# The target's parameters, those of each proposer, and the state; or their shapes.
Arguments = tuple[Params, tuple[Params | None, ...], EngineState]


def used_arguments(
    proposers: Sequence[Proposer], shape: StepShape, arguments: Arguments
) -> Arguments:
    """Return the arrays that a program uses, with None in place of the others."""
    target, params, state = arguments
    if _is_drafting(shape):
        return arguments
    is_unused = [one.is_unused_without_drafts for one in proposers]

    def drop_unused(parts: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(is_unused, parts, strict=True)
        return tuple(None if unused else part for unused, part in pairs)

    params, used = drop_unused(params), drop_unused(state.proposers)
    state = dataclasses.replace(state, proposers=used, forced_acceptance=None)
    return target, params, state


def flatten(arguments: Arguments) -> tuple[list[Any], list[Any]]:
    """Flatten parameters and state into the two lists that a call takes."""
    return jax.tree.leaves(arguments[:2]), jax.tree.leaves(arguments[2])


def _is_drafting(shape: StepShape) -> bool:
    return shape.num_levels > 0 or shape.is_draft_prefill


class Arrays:
    """An engine's parameters and state, between calls.

    Calls use lists of them; the trees are rebuilt when they are read.
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
        # One entry for programs without drafts, then one for programs with drafts: the
        # parameters, and the number of state arrays used. State arrays that plain
        # programs do not use come last.
        self._calls: list[tuple[list[Array], int]] = []
        for num_levels in (0, 1):
            shape = StepShape(num_seqs=1, num_levels=num_levels, max_prompt_tokens=0)
            weights, _ = flatten(used_arguments(proposers, shape, (*params, state)))
            _, places = flatten(used_arguments(proposers, shape, (*params, numbers)))
            assert places == list(range(len(places))), "unused arrays are not last"
            self._calls.append((weights, len(places)))

    @property
    def params(self) -> tuple[Params, tuple[Params | None, ...]]:
        """Parameters of the target and of each proposer."""
        return self._params

    @property
    def state(self) -> EngineState:
        """The state after the last call."""
        return jax.tree.unflatten(self._structure, self._leaves)

    @property
    def is_state_consumed(self) -> bool:
        """Whether a call has consumed the state without storing a new one."""
        return self._leaves[0].is_deleted()

    def call(self, executable: Any, shape: StepShape, plan: Any) -> Array:
        """Call a program of a shape, store the new state, and return the result."""
        weights, count = self._calls[_is_drafting(shape)]
        rest = self._leaves[count:]
        made, result = executable(weights, self._leaves[:count], plan)
        # One assignment, so that an interrupt cannot separate the arrays.
        self._leaves = made + rest
        return result
