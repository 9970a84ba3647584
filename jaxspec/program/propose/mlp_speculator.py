"""The MLP speculator proposes: stage by stage, each given the draft before it."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models import cpu
from jaxspec.models.heads import mlp_speculator
from jaxspec.models.heads.config import MlpSpeculatorConfig
from jaxspec.models.params import Params
from jaxspec.program.propose.last_row import LastRow
from jaxspec.program.propose.levels import Continue, finite_rows
from jaxspec.program.propose.proposal import Context


@dataclass(frozen=True, kw_only=True)
class MlpSpeculator(LastRow):
    """As many stages as there may be drafts in a row."""

    config: MlpSpeculatorConfig

    def levels(
        self, params: Params, rows: Float[Array, "row model"], context: Context
    ) -> tuple[Continue, Continue, Array]:
        """A stage for every level."""
        assert not context.tree.has_side_paths, "only the spine is continued"
        config, active = self.config, context.active
        seqs = active.row.shape[0]
        start = mlp_speculator.start(config, rows)

        def run(stage: int, tokens: Array, before: Array) -> tuple:
            padded = cpu.pad_rows(tokens)
            made = mlp_speculator.forward(config, params, stage, padded, before)
            is_finite = jnp.isfinite(made).all(axis=1)
            made = finite_rows(made, is_finite)
            logits = mlp_speculator.logits(config, params, stage, made)
            return logits[:seqs], ~is_finite[:seqs], made

        def first(level: Array | int, drafts: Array, kept: Array) -> tuple:
            return run(0, active.last_tokens[:, 1], kept)

        # Every stage has parameters of its own, and the levels are one loop.
        stages = [functools.partial(run, one) for one in range(1, config.num_stages)]

        def following(level: Array | int, drafts: Array, kept: Array) -> tuple:
            return jax.lax.switch(level - 1, stages, drafts[:, level - 1], kept)

        return first, following, start
