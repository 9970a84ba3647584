"""The EAGLE head: run as EAGLE-3's, with the target's output matrix.

It reads the target's last hidden states after the final norm.
"""

from dataclasses import dataclass

from jaxtyping import Array, Float

from jaxspec.config.engine import EngineConfig
from jaxspec.models import cpu
from jaxspec.models.heads import eagle
from jaxspec.models.heads.config import EagleConfig
from jaxspec.models.params import Params
from jaxspec.models.trimmed import head_of
from jaxspec.program.propose.eagle3 import Eagle3
from jaxspec.program.propose.proposal import NORMALISED, ProposerContext


@dataclass(frozen=True, kw_only=True)
class Eagle(Eagle3):
    """One layer over the target's last hidden states, with pages of its own."""

    config: EagleConfig

    @classmethod
    def of(cls, config: EngineConfig) -> "Eagle":
        """Build the proposer from an engine's configuration."""
        assert config.speculative is not None
        return cls(
            config=config.head_config,
            target_layers=(NORMALISED,),
            drafts_argmax=config.speculative.drafts_argmax,
        )

    def _logits(
        self,
        params: Params,
        hidden: Float[Array, "row model"],
        context: ProposerContext,
    ) -> Float[Array, "row vocab"]:
        """Return logits by the target's output matrix."""
        assert context.target is not None, "the target's output matrix is missing"
        target = head_of(context.target)
        return cpu.with_pads(
            lambda rows: eagle.logits(self.config, params, rows, target), hidden
        )
