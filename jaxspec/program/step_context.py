"""Settings of an engine's programs, and the current launch: arguments of a step."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxspec.config.engine import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.params import Params
from jaxspec.program import controls, grammar, logprobs
from jaxspec.program.plan import PoolShape, StepShape
from jaxspec.program.propose.proposal import Observer, Proposer, ProposerContext
from jaxspec.program.rows import Active, Rows, Tiles, apply_plan, gather, read_tiles
from jaxspec.program.state import EngineState
from jaxspec.program.token_batch import make_token_batch
from jaxspec.program.wire import PlanLayout
from jaxspec.sharding import TARGET_MESH_AXES
from jaxspec_kernels.dispatch import implementation_for


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """Settings that all executables of an engine share.

    Attributes:
        proposers: Make the drafts, in this order: each completes the proposal of those
            before it. Empty is plain decoding.
        mesh: The devices, whose platform chooses the kernels.
        mask_source: Host callback that returns grammar masks; None without grammars.
        max_draft_tokens: Maximum number of drafts in a row, of all executables.
    """

    target: ModelConfig
    proposers: tuple[Proposer, ...] = ()
    pool: PoolShape
    mesh: Mesh
    mask_source: grammar.MaskSource | None = None
    max_draft_tokens: int = 0

    def backend(self, mesh_axes: tuple[str, ...]) -> Backend:
        """Return where a model runs whose heads are split over these axes."""
        platform = self.mesh.devices.flat[0].platform
        return Backend(
            implementation=implementation_for(platform),
            mesh=self.mesh,
            mesh_axes=mesh_axes,
        )

    @property
    def target_layers(self) -> frozenset[int]:
        """Numbers of layers after which proposers read the residual stream."""
        observers = [one for one in self.proposers if isinstance(one, Observer)]
        return frozenset().union(*(one.target_layers for one in observers))


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """One launch: its static sizes, its plan, and the rows after applying the plan.

    Attributes:
        fields: Arrays of the plan, by name.
        tiles: Prompt tiles.
        active: The sequences that decode; in `_finish_prompts`, those that start to.
    """

    config: ProgramConfig
    shape: StepShape
    fields: dict[str, Array]
    tiles: Tiles
    rows: Rows
    token_pages: Int[Array, "page page_size"]
    active: Active

    @classmethod
    def read(
        cls,
        config: ProgramConfig,
        shape: StepShape,
        state: EngineState,
        plan: Int[Array, " plan"],
    ) -> "StepContext":
        """Unpack a plan and apply it to the rows of the state."""
        fields = PlanLayout(shape, config.pool).read(plan)
        tiles = read_tiles(fields)
        rows, token_pages = apply_plan(
            state.rows, state.token_pages, fields, tiles, config.pool
        )
        active = gather(
            rows,
            token_pages,
            fields["decode_row"],
            all_greedy=shape.features.all_greedy,
        )
        return cls(
            config=config,
            shape=shape,
            fields=fields,
            tiles=tiles,
            rows=rows,
            token_pages=token_pages,
            active=active,
        )

    def next_round(self, state: EngineState) -> "StepContext":
        """Return the same launch after one of its rounds."""
        active = gather(
            state.rows,
            state.token_pages,
            self.fields["decode_row"],
            all_greedy=self.shape.features.all_greedy,
        )
        return dataclasses.replace(
            self, rows=state.rows, token_pages=state.token_pages, active=active
        )

    @property
    def pool(self) -> PoolShape:
        """The static sizes of the engine's state."""
        return self.config.pool

    @property
    def backend(self) -> Backend:
        """Where the target runs."""
        return self.config.backend(TARGET_MESH_AXES)

    def prompts(self) -> TokenBatch | None:
        """The prompt tiles as a batch for a model; None in a program without tiles."""
        if not self.shape.max_prompt_tokens:
            return None
        tiles, pool = self.tiles, self.pool
        page_table = self.rows.page_table.at[tiles.row].get(mode="clip")
        local = self.rows.local_page_table
        if local is not None:
            local = local.at[tiles.row].get(mode="clip")
        is_row = tiles.row < pool.num_rows
        is_written = tiles.is_token & is_row[:, None]
        kv_len = jnp.where(is_row, tiles.start + tiles.length, 0)
        return make_token_batch(
            tiles.tokens,
            kv_len,
            page_table,
            is_written,
            pool,
            local_page_table=local,
        )

    def logprob_ids(self) -> Int[Array, "seq id"] | None:
        """Token ids whose logprobs requests return; see `logprobs.chosen_ids`."""
        return logprobs.chosen_ids(self.rows.controls, self.active, shape=self.shape)

    def adjuster(
        self, mesh_axes: tuple[str, ...] = TARGET_MESH_AXES
    ) -> controls.Adjust | None:
        """Return a function that applies the requests' controls and grammars to logits.

        Args:
            mesh_axes: Of the model whose logits are adjusted.

        Returns:
            None in a program without controls and grammars.
        """
        features, backend = self.shape.features, self.config.backend(mesh_axes)
        adjust = None
        if features.has_controls:
            adjust = controls.adjuster(
                self.rows.controls,
                self.token_pages,
                self.active,
                vocab_size=self.pool.vocab_size,
                backend=backend,
            )
        if features.has_grammar:
            assert self.config.mask_source is not None, "no source of grammar masks"
            adjust = grammar.adjuster(
                self.config.mask_source,
                self.fields["grammar_id"],
                self.token_pages,
                self.active,
                window=grammar.window_of(self.config.max_draft_tokens),
                inner=adjust,
                backend=backend,
            )
        return adjust

    def for_proposers(self, target: Params | None) -> ProposerContext:
        """Return the part of the launch that proposers read.

        Args:
            target: The target's parameters; None where it does not run.
        """
        return ProposerContext(
            active=self.active,
            token_pages=self.token_pages,
            tree=self.shape.tree,
            wanted_levels=self.fields["decode_wanted_levels"],
            pool=self.pool,
            prompts=self.prompts(),
            backend=self.config.backend,
            adjuster=self.adjuster,
            target=target,
        )
