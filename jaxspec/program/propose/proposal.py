"""The proposer protocol: its view of a launch, and the proposal it returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config.engine import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.heads.config import HeadConfig
from jaxspec.models.params import Params
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import PoolShape
from jaxspec.program.rows import Active
from jaxspec.program.tree.tree import Tree

# Stands for the state after all layers and the last norm, in place of a layer's number.
NORMALISED = -1


class Proposal(NamedTuple):
    """Draft tokens of one round, by node of a tree.

    Attributes:
        num_valid_drafts: Valid drafts of each sequence: columns at or past it are
            padding. In a tree: valid levels.
        probs: Distributions of the tokens after token controls, temperature, top-k,
            top-p and min-p; None if each is a point mass. In a tree: one per level, for
            the main chain.
        is_broken: Sequences for which a draft model computed NaN or infinity, whose
            drafts are not valid; None without a model.
    """

    tokens: Int[Array, "seq draft"]
    num_valid_drafts: Int[Array, " seq"]
    probs: Float[Array, "seq _ vocab"] | None = None
    is_broken: Bool[Array, " seq"] | None = None

    def first(self, count: int) -> "Proposal | None":
        """Return the first drafts of every sequence, a chain; None for `count` 0."""
        if not count:
            return None
        probs = None if self.probs is None else self.probs[:, :count]
        return self._replace(tokens=self.tokens[:, :count], probs=probs)


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """The part of a launch that proposers see.

    Attributes:
        tree: Shape of the drafts.
        wanted_levels: Number of levels of drafts that each sequence wants; 0 also for a
            sequence with draft lag.
        prompts: Tokens of the launch other than each sequence's newest: prompts, for
            observers of the target, or the tokens of a draft prefill. None in a launch
            that has neither.
        backend: Returns where a model runs, given the mesh axes that split it.
        adjuster: Returns the function that applies the requests' controls, given the
            mesh axes of the model.
        target: The target's parameters, whose matrices a head may share.
    """

    active: Active
    token_pages: Int[Array, "page page_size"]
    tree: Tree
    wanted_levels: Int[Array, " seq"]
    pool: PoolShape
    prompts: TokenBatch | None
    backend: Callable[[tuple[str, ...]], Backend]
    adjuster: Callable[[tuple[str, ...]], Adjust | None]
    target: Params | None = None

    @property
    def max_wanted_levels(self) -> Int[Array, ""]:
        """Largest number of levels that a sequence wants."""
        return self.wanted_levels.max(initial=0)


class Seen(NamedTuple):
    """The target's residual stream at a round's tokens.

    Attributes:
        nodes: The stream by layer: at each sequence's newest token, then at its drafts.
        tiles: The stream by layer, at prompt tokens; None in a launch without prompts.
        tree: Shape of the drafts.
        num_accepted: Accepted drafts of each sequence; later nodes are rejected.
        tree_row: Row in the tree of the last accepted draft; None in a chain.
        next_tokens: The token after each of `nodes`, the round's last one included.
        next_tile_tokens: The same for `tiles`.
        first_row: For each tile that ends a prompt, the row of its request; past the
            last row for others.
    """

    nodes: tuple[Float[Array, "seq node model"], ...]
    tiles: tuple[Float[Array, "tile token model"], ...] | None
    tree: Tree
    num_accepted: Int[Array, " seq"]
    tree_row: Int[Array, " seq"] | None
    next_tokens: Int[Array, "seq node"]
    next_tile_tokens: Int[Array, "tile token"] | None
    first_row: Int[Array, " tile"] | None


@runtime_checkable
class Proposer(Protocol):
    """Proposes drafts inside the step program: static, hashable, without arrays.

    The step folds over a tuple of proposers: each receives the proposal of those before
    it and replaces the padding by drafts of its own. Its state between launches is a
    pytree.
    """

    # Whether the proposer has parameters; if not, its entry in the list of all
    # proposers' parameters is None.
    has_params: ClassVar[bool]
    # Whether it may find no drafts for all sequences, or fewer than wanted: the program
    # then holds a narrower target pass for that case.
    may_find_none: ClassVar[bool]
    may_find_few: ClassVar[bool]
    # Whether rounds without drafts neither read nor change its parameters and state:
    # their programs do not take them.
    is_unused_without_drafts: ClassVar[bool]

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Return the shapes and placement of its state, which starts as zeros.

        Args:
            dtype: Type of the models' weights.
        """
        ...

    def draft_prefill(
        self,
        params: Params | None,
        state: Any,
        context: ProposerContext,
        active: Active,
        next_tokens: Int[Array, " token"],
    ) -> tuple[Any, Float[Array, " token"] | None]:
        """Prefill `context.prompts`: tokens that only the target has read.

        Args:
            active: The sequence of each of the launch's tokens, at the position where
                the token after it would have been drafted.
            next_tokens: The token after each; `NO_TOKEN` inside prompts and for pads,
                where no draft could be compared.

        Returns:
            The state, and the probability that a draft in that place would have been
            accepted, negative if unknown; None from a proposer without a model.
        """
        ...

    def propose(
        self,
        params: Params | None,
        state: Any,
        context: ProposerContext,
        before: Proposal | None,
    ) -> tuple[Proposal, Any]:
        """Return drafts for every node of the tree, and the state."""
        ...


@runtime_checkable
class Observer(Proposer, Protocol):
    """A proposer that reads the target's hidden states or tokens after a round."""

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Numbers of layers after which it reads the stream; 0 is the embedding.

        `NORMALISED` is the input of the logits.
        """
        ...

    def observe(
        self, params: Params | None, state: Any, context: ProposerContext, seen: Seen
    ) -> Any:
        """Process the target's results of a round; return the state.

        Called after every target pass: with drafts, without, and of prompts alone.
        """
        ...


class UpToDate:
    """A proposer without draft lag: stateless, or it observes every pass."""

    def draft_prefill(
        self,
        params: Params | None,
        state: Any,
        context: ProposerContext,
        active: Active,
        next_tokens: Int[Array, " token"],
    ) -> tuple[Any, None]:
        """Do nothing, because the proposer has no draft lag."""
        return state, None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Base of proposers that sample drafts from logits.

    They have parameters, and always find a draft.

    Attributes:
        drafts_argmax: Propose the argmax, a point mass, even if the request samples.
    """

    config: ModelConfig | HeadConfig
    drafts_argmax: bool = False

    has_params: ClassVar[bool] = True
    may_find_none: ClassVar[bool] = False
    may_find_few: ClassVar[bool] = False
    is_unused_without_drafts: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Head(UpToDate, Model):
    """A head on the target's hidden states, updated by `observe`."""

    config: HeadConfig


class Lookup(UpToDate):
    """Base of proposers that look drafts up in the known tokens, without a model."""

    has_params: ClassVar[bool] = False
    may_find_none: ClassVar[bool] = True
    is_unused_without_drafts: ClassVar[bool] = False

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Return None, because a lookup has no state."""
        return ()
