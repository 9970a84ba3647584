"""The target's part of a round: one pass over drafts and prompts, and the verdict.

A round whose drafts are looked up has two forms in one program, and runs the plain one
when nothing was found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import Network
from jaxspec.program import logprobs
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import TILE, PoolShape, StepShape
from jaxspec.program.propose.proposal import Proposal
from jaxspec.program.region import join, make_region
from jaxspec.program.rows import Active
from jaxspec.program.verify import place_next, verify

Pages = tuple[Array, ...]


class Judged(NamedTuple):
    """What the target made of a round; K + 1 tokens wide, however many were fed."""

    tokens: Int[Array, "seq width"]  # accepted drafts, then the target's own
    num_accepted: Int[Array, " seq"]
    is_broken: Bool[Array, " seq"]  # NaN or infinity where a token was decided
    tile_logits: Float[Array, "tile vocab"]
    is_tile_broken: Bool[Array, " tile"]  # the same in the tile's last row
    logprobs: Int[Array, "seq width column"] | None
    prompt_logprobs: Int[Array, "tile token column"] | None
    pages: Pages


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Round:
    """What the two forms of a round share.

    Attributes:
        num_draft: Drafts of each sequence that count.
        may_be_plain: Drafts may be missing altogether, which the device alone knows.
        prompts: Tiles that ride along.
        after_prompts: The token after each tile's last, where prompts are told about.
        adjust: What requests ask of single tokens; None where none asks anything.
        forced_acceptance: Chance of each draft to stay; None lets the rules decide.
    """

    target: Network
    active: Active
    num_draft: Int[Array, " seq"]
    may_be_plain: bool
    prompts: TokenBatch | None
    after_prompts: Int[Array, " tile"] | None
    adjust: Adjust | None
    backend: Backend
    pool: PoolShape
    shape: StepShape
    forced_acceptance: Float[Array, " chance"] | None = None

    def judge(self, proposal: Proposal | None, pages: Pages) -> Judged:
        """Feed the newest tokens and their drafts, and decide."""
        tokens = self.active.last_tokens[:, 1:]
        if proposal is not None:
            tokens = jnp.concatenate([tokens, proposal.tokens], axis=1)
        if proposal is None or not self.may_be_plain or self.prompts is not None:
            return self._run(proposal, tokens, pages)
        has_drafts = (self.num_draft > 0).any()
        judged = Judged(
            tokens=tokens,
            num_accepted=jnp.zeros_like(self.num_draft),
            is_broken=jnp.zeros_like(self.active.is_active),
            is_tile_broken=jnp.zeros(0, bool),
            tile_logits=jnp.zeros((0, self.target.config.vocab_size), jnp.float32),
            logprobs=logprobs.blank(tokens, shape=self.shape),
            prompt_logprobs=None,
            pages=pages,
        )
        # The tokens fed come from the loop's state, so that XLA cannot take what is
        # computed from them out of the loop, and do it in every round.
        judged = _run_if(
            has_drafts,
            lambda judged: self._run(proposal, judged.tokens, judged.pages),
            judged,
        )
        return _run_if(
            ~has_drafts,
            lambda judged: self._run(None, judged.tokens[:, :1], judged.pages),
            judged,
        )

    def _run(
        self, proposal: Proposal | None, tokens: Int[Array, "seq width"], pages: Pages
    ) -> Judged:
        active, shape, backend = self.active, self.shape, self.backend
        seqs, width = tokens.shape
        is_written = jnp.broadcast_to(active.is_active[:, None], (seqs, width))
        kv_len = active.num_tokens + width - 1
        batches = [
            make_region(tokens, kv_len, active.page_table, is_written, self.pool)
        ]
        if self.prompts is not None:
            batches.append(self.prompts)
        hidden, pages = self.target.hidden(join(batches), pages)
        logits, tile_logits = logits_of(self.target, hidden.rows, seqs * width)
        verdict = verify(
            proposal,
            logits,
            self.num_draft,
            active,
            backend,
            adjust=self.adjust,
            forced_acceptance=self.forced_acceptance,
        )
        tokens = place_next(tokens[:, 1:], verdict)
        told = logprobs.tell_some(logits, tokens, shape=shape, backend=backend)
        most = shape.tree.max_emitted
        tokens = _widen(tokens, most)
        told = None if told is None else _widen(told, most)
        prompt_told = None
        if self.prompts is not None and self.after_prompts is not None:
            prompt_told = logprobs.tell_prompt(
                self.target,
                hidden.rows[seqs * width :],
                self.prompts.tokens,
                self.after_prompts,
                shape=shape,
                backend=backend,
            )
        is_broken, is_tile_broken = _broken(
            hidden.is_finite, verdict.num_accepted, width
        )
        return Judged(
            tokens=tokens,
            num_accepted=verdict.num_accepted,
            is_broken=is_broken,
            tile_logits=tile_logits,
            is_tile_broken=is_tile_broken,
            logprobs=told,
            prompt_logprobs=prompt_told,
            pages=pages,
        )


def logits_of(
    model: Network, hidden: Float[Array, "token model"], num_decode: int
) -> tuple[Float[Array, "decode vocab"], Float[Array, "tile vocab"]]:
    """Logits of all decode rows and of the last row of every tile."""
    last = hidden[num_decode:].reshape(-1, TILE, hidden.shape[1])[:, -1]
    logits = model.logits(jnp.concatenate([hidden[:num_decode], last]))
    return logits[:num_decode], logits[num_decode:]


def _broken(
    is_finite: Bool[Array, " token"], num_accepted: Int[Array, " seq"], width: int
) -> tuple[Bool[Array, " seq"], Bool[Array, " tile"]]:
    """Whether tokens were decided by what is no number, in sequences and tiles."""
    is_broken, seqs = ~is_finite, num_accepted.shape[0]
    decode = is_broken[: seqs * width].reshape(seqs, width)
    is_used = jnp.arange(width)[None] <= num_accepted[:, None]
    tiles = is_broken[seqs * width :].reshape(-1, TILE)
    return (decode & is_used).any(axis=1), tiles[:, -1]


def _widen(part: Array, width: int) -> Array:
    """Pads after a round's tokens, up to K + 1 of them."""
    pads = [(0, 0), (0, width - part.shape[1])] + [(0, 0)] * (part.ndim - 2)
    return jnp.pad(part, pads)


def _run_if(
    is_wanted: Bool[Array, ""], function: Callable[[Judged], Judged], value: Judged
) -> Judged:
    """`function(value)` where that is wanted, else `value`: a loop of one turn or none.

    Not `cond`: XLA copies what both of its branches write to in place.
    """

    def turn(carry: tuple[Array, Judged]) -> tuple[Array, Judged]:
        return jnp.zeros_like(is_wanted), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (is_wanted, value))[1]
