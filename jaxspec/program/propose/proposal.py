"""What a proposer is given of a launch and hands to verification, and its protocol."""

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

# In place of a number of layers: after all of them, and the last norm.
NORMALISED = -1


class Proposal(NamedTuple):
    """Draft tokens of one round, by node of a tree.

    Attributes:
        num_drafts: Of each sequence, how many tokens count: the first ones; of a tree
            how many levels.
        probs: What the tokens were drawn from, after all sampling controls; None where
            each was certain: a point mass. Of a tree: one per level, for its spine.
        is_broken: Sequences of which a draft model made NaN or infinity, whose tokens
            do not count; None where there is no model.
    """

    tokens: Int[Array, "seq draft"]
    num_drafts: Int[Array, " seq"]
    probs: Float[Array, "seq _ vocab"] | None = None
    is_broken: Bool[Array, " seq"] | None = None

    def first(self, count: int) -> "Proposal | None":
        """The first drafts of every sequence, a chain; of none, no proposal."""
        if not count:
            return None
        probs = None if self.probs is None else self.probs[:, :count]
        return self._replace(tokens=self.tokens[:, :count], probs=probs)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The part of a launch that proposers see.

    Attributes:
        tree: Room for drafts.
        wanted: Drafts, one after the other, that each sequence wants; 0 also where the
            model that makes them lacks tokens.
        prompts: Tokens of the launch that are no sequence's newest: of prompts, for
            whoever looks into the target, or what a draft model has to catch up with.
            None in a launch without.
        backend: Where models run, by the axes of the mesh that split them.
        adjuster: What requests ask of single tokens, for a model that the axes split.
        target: The target's parameters, whose matrices a head may share.
    """

    active: Active
    token_pages: Int[Array, "page page_size"]
    tree: Tree
    wanted: Int[Array, " seq"]
    pool: PoolShape
    prompts: TokenBatch | None
    backend: Callable[[tuple[str, ...]], Backend]
    adjuster: Callable[[tuple[str, ...]], Adjust | None]
    target: Params | None = None

    @property
    def num_wanted(self) -> Int[Array, ""]:
        """The most that any sequence wants."""
        return self.wanted.max(initial=0)


class Seen(NamedTuple):
    """The target's residual stream at a round's tokens.

    Attributes:
        nodes: By layer: of each sequence's newest token, then of its drafts.
        tiles: By layer: of prompt tokens; None in a launch without prompts.
        tree: The drafts, as the target was fed them.
        num_accepted: Drafts of each sequence that stayed; what comes after them is of
            tokens that did not.
        row: The tree's, of the last of them; None in a chain.
        next_tokens: After each of `nodes`, the token that came: those of a round, its
            last one included.
        next_tile_tokens: The same for `tiles`.
        first_row: Of each tile the row whose prompt it ends, which has its first token
            now; past the last row for others.
    """

    nodes: tuple[Float[Array, "seq node model"], ...]
    tiles: tuple[Float[Array, "tile token model"], ...] | None
    tree: Tree
    num_accepted: Int[Array, " seq"]
    row: Int[Array, " seq"] | None
    next_tokens: Int[Array, "seq node"]
    next_tile_tokens: Int[Array, "tile token"] | None
    first_row: Int[Array, " tile"] | None


@runtime_checkable
class Proposer(Protocol):
    """Proposes drafts inside the step program: static, hashable, without arrays.

    The step folds over a tuple of proposers: each is given what those before it have
    proposed, and returns the proposal with its own drafts in place of those that do not
    count. What it keeps between launches is a pytree of its own.
    """

    # Whether it has a draft model's parameters; None stands for them otherwise.
    has_params: ClassVar[bool]
    # Whether a round may turn out to have no drafts, for any sequence; or few of those
    # that are wanted. The program has a narrower form of the round for each.
    may_find_none: ClassVar[bool]
    may_find_few: ClassVar[bool]
    # Whether rounds without drafts neither read nor change its parameters and state:
    # their programs are not given them.
    rests_without_drafts: ClassVar[bool]

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Shapes and placement of its state, which begins as zeros.

        Args:
            dtype: Of the models' weights.
        """
        ...

    def catch_up(
        self,
        params: Params | None,
        state: Any,
        context: Context,
        active: Active,
        following: Int[Array, " token"],
    ) -> tuple[Any, Float[Array, " token"] | None]:
        """Take in `context.prompts`: what the target was fed or made without drafts.

        Args:
            active: The sequence of each of the launch's tokens, as it was when the
                token after it was to be drafted.
            following: What came instead; `NO_TOKEN` where that is nothing a draft could
                have been compared with: inside prompts, and pads.

        Returns:
            The state, and how likely a draft in that place would have been accepted,
            negative where that cannot be said; None from a proposer without a model.
        """
        ...

    def propose(
        self,
        params: Params | None,
        state: Any,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Any]:
        """Drafts for every node of the tree, and the state."""
        ...


@runtime_checkable
class Observer(Proposer, Protocol):
    """A proposer that looks into the target: a head on its hidden states."""

    @property
    def target_layers(self) -> tuple[int, ...]:
        """After how many layers the residual stream is wanted; 0: the embedding.

        `NORMALISED` is what logits are made of.
        """
        ...

    def observe(
        self, params: Params | None, state: Any, context: Context, seen: Seen
    ) -> Any:
        """Take in what the target made of a round, at those layers; the state.

        After every pass of the target: with drafts, without, and of prompts alone.
        """
        ...


class UpToDate:
    """What never has to catch up: it keeps nothing, or sees whatever is fed."""

    def catch_up(
        self,
        params: Params | None,
        state: Any,
        context: Context,
        active: Active,
        following: Int[Array, " token"],
    ) -> tuple[Any, None]:
        """Nothing to do."""
        return state, None


@dataclass(frozen=True, kw_only=True)
class Model:
    """What proposers share that draw drafts of logits: parameters, and always a draft.

    Attributes:
        is_greedy: Propose the argmax, a point mass, also where the request samples.
    """

    config: ModelConfig | HeadConfig
    is_greedy: bool = False

    has_params: ClassVar[bool] = True
    may_find_none: ClassVar[bool] = False
    may_find_few: ClassVar[bool] = False
    rests_without_drafts: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Head(UpToDate, Model):
    """One that is shown the target's hidden states: `observe` has seen it all."""

    config: HeadConfig


class Lookup(UpToDate):
    """What proposers share that look drafts up: no model, and nothing of their own.

    The known tokens that they look into are the rows'.
    """

    has_params: ClassVar[bool] = False
    may_find_none: ClassVar[bool] = True
    rests_without_drafts: ClassVar[bool] = False

    def state_forms(self, dtype: jnp.dtype, pool: PoolShape, mesh: Mesh) -> Any:
        """Nothing is kept."""
        return ()
