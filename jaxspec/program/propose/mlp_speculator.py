"""The MLP speculator proposes: stage by stage, each given the draft before it."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.config import EngineConfig
from jaxspec.models.heads import mlp_speculator
from jaxspec.models.heads.config import MlpSpeculatorConfig
from jaxspec.models.params import Params
from jaxspec.program.propose.last_row import LastRow, last_rows, pad_rows
from jaxspec.program.propose.levels import Levels, finite_rows
from jaxspec.program.propose.proposal import Context, Proposal


@dataclass(frozen=True, kw_only=True)
class MlpSpeculator(LastRow):
    """As many stages as there may be drafts in a row."""

    config: MlpSpeculatorConfig

    @classmethod
    def of(cls, config: EngineConfig) -> "MlpSpeculator":
        """What an engine's configuration asks for."""
        assert config.speculative is not None
        assert isinstance(config.head_config, MlpSpeculatorConfig)
        is_greedy = config.speculative.draft_sample_method == "greedy"
        return cls(config=config.head_config, is_greedy=is_greedy)

    def propose(
        self,
        params: Params | None,
        state: Array,
        context: Context,
        before: Proposal | None,
    ) -> tuple[Proposal, Array]:
        """Draw a chain of tokens per sequence, and the next best beside each."""
        assert params is not None, "a head came without parameters"
        assert not context.tree.has_side_paths, "only the spine is continued"
        own, config, active = params, self.config, context.active
        rows, seqs = last_rows(state, active), active.row.shape[0]
        start = mlp_speculator.start(config, pad_rows(rows))

        def run(stage: int, tokens: Array, before: Array) -> tuple:
            padded = pad_rows(tokens)
            made = mlp_speculator.forward(config, own, stage, padded, before)
            is_finite = jnp.isfinite(made).all(axis=1)
            made = finite_rows(made, is_finite)
            logits = mlp_speculator.logits(config, own, stage, made)
            return logits[:seqs], ~is_finite[:seqs], made

        def first(level: Array | int, drafts: Array, kept: Array) -> tuple:
            return run(0, active.last_tokens[:, 1], kept)

        # Every stage has parameters of its own, and the levels are one loop.
        stages = [functools.partial(run, one) for one in range(1, config.num_stages)]

        def following(level: Array | int, drafts: Array, kept: Array) -> tuple:
            return jax.lax.switch(level - 1, stages, drafts[:, level - 1], kept)

        levels = Levels(context, is_greedy=self.is_greedy, before=before)
        return levels.propose(first, following, start)[0], state
