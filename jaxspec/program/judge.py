"""What the target's logits decide: which drafts stay and which token follows."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.models.network import Network
from jaxspec.program import randomness
from jaxspec.program.accept import accept
from jaxspec.program.active import Active
from jaxspec.program.choose import choose_token, forbid_early_stop
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import TILE
from jaxspec.program.propose import Proposal
from jaxspec_kernels.rejection_sampling import Verdict


def logits_of(
    model: Network, hidden: Float[Array, "token model"], num_decode: int
) -> tuple[Float[Array, "decode vocab"], Float[Array, "tile vocab"]]:
    """Logits of all decode rows and of the last row of every tile."""
    last = hidden[num_decode:].reshape(-1, TILE, hidden.shape[1])[:, -1]
    logits = model.logits(jnp.concatenate([hidden[:num_decode], last]))
    return logits[:num_decode], logits[num_decode:]


def judge(
    proposal: Proposal | None,
    logits: Float[Array, "token vocab"],
    num_draft: Int[Array, " seq"],
    active: Active,
    backend: Backend,
    *,
    adjust: Adjust | None,
    forced_acceptance: Float[Array, " chance"] | None = None,
) -> Verdict:
    """Decide a round, with drafts or without.

    Args:
        logits: The model's own: row i of a sequence follows its i-th draft.
        adjust: What requests ask of single tokens; None where none asks anything.
        forced_acceptance: As for `accept`.
    """
    if proposal is None:
        token = choose_next(logits, active, adjust=adjust)
        return Verdict(jnp.zeros_like(token), token)
    if adjust is not None:
        seqs, draft = proposal.tokens.shape
        rows = logits.reshape(seqs, draft + 1, -1)
        logits = adjust(rows, proposal.tokens).reshape(logits.shape)
    return accept(
        proposal,
        logits,
        num_draft,
        active,
        backend,
        forced_acceptance=forced_acceptance,
    )


def choose_next(
    logits: Float[Array, "seq vocab"], active: Active, *, adjust: Adjust | None
) -> Int[Array, " seq"]:
    """The token after the known ones, without drafts."""
    if adjust is not None:
        no_drafts = jnp.zeros((logits.shape[0], 0), jnp.int32)
        logits = adjust(logits[:, None], no_drafts)[:, 0]
    logits = forbid_early_stop(logits, active.num_tokens, active)
    token, _ = choose_token(logits, active.num_tokens, active, role=randomness.SAMPLE)
    return token


def place_next(
    drafts: Int[Array, "seq draft"], verdict: Verdict
) -> Int[Array, "seq draft+1"]:
    """Accepted drafts, then the target's token."""
    seqs = drafts.shape[0]
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    row = jnp.arange(seqs, dtype=jnp.int32)
    return padded.at[row, verdict.num_accepted].set(verdict.next_token)
