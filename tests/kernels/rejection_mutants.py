"""Known bugs of rejection sampling, inserted into the code one at a time.

See `tests/support/mutation.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec_kernels.rejection_sampling import (
    BLOCK,
    draw,
    gpu,
    passes,
    reference,
    tpu,
)
from jaxspec_kernels.rejection_sampling.reference import Kernels
from tests.kernels.aot_tpu import no_compilation_cache
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import (
    GREEDY,
    Round,
    by_loops,
    make_round,
    sliced,
    verdict_of,
    with_kind,
)
from tests.support.mutation import Mutant

PACKAGE = "jaxspec_kernels.rejection_sampling"
VOCAB, COLUMNS = 290, 296  # padding has larger logits than any token


def padded(one: Round) -> tuple:
    tokens, draft, logits, num_valid_drafts, sampling_values = one.arrays
    pads = ((0, 0), (0, 0), (0, COLUMNS - VOCAB))
    logits = jnp.pad(logits, pads, constant_values=50.0)
    return tokens, jnp.pad(draft, pads), logits, num_valid_drafts, sampling_values


def by_reference(**settings: Any) -> Callable:
    """Return `Kernels` with the reference's current functions.

    The defaults of `Kernels` are bound at import, before a mutant replaces a function.
    """
    own = (
        passes.statistics,
        passes.mass_above,
        passes.gumbel_argmax,
        passes.residual_mass,
    )
    kernels = Kernels(*own, probabilities=passes.probabilities, draw=draw.draw)
    return partial(reference.rejection_sampling, kernels=kernels, **settings)


IMPLEMENTATIONS: dict[str, Callable[[], Callable]] = {
    "reference": lambda: by_reference(tile=64),
    "tpu": lambda: partial(tpu.rejection_sampling, tile=128, interpret=True),
    "gpu": lambda: partial(gpu.rejection_sampling, tile=128, interpret=True),
}


@cache
def rounds() -> tuple[tuple[tuple, dict, Any], ...]:
    """Return arguments, and verdicts of loops, computed once without a mutant.

    The rounds are a mixed batch with equal logits, in which several tokens are the
    argmax; the same batch with random logits; and a batch of the block rule.
    """
    mixed = make_round(48, vocab=VOCAB, seed=3)
    logits = np.where(mixed.kind[:, None, None] == GREEDY, 4.0, mixed.logits)
    every = (
        replace(mixed, logits=logits.astype(np.float32)),
        mixed,
        *(with_kind(make_round(48, vocab=VOCAB, seed=4 + n), BLOCK) for n in range(4)),
    )
    return tuple((padded(one), one.numbers, by_loops(one)) for one in every)


def check_rounds(implementation: str) -> None:
    """Check that all rounds get the tokens that `by_loops` accepts and samples."""
    run = partial(IMPLEMENTATIONS[implementation](), vocab_size=VOCAB, axis_name=None)
    run = jax.jit(run, compiler_options=UNOPTIMISED)
    for arrays, numbers, verdict in rounds():
        np.testing.assert_array_equal(run(*arrays, **numbers), verdict)


def check_slices() -> None:
    """Check that two devices, with half of the columns each, find the same verdicts."""
    run = sliced(by_reference(tile=64), vocab_size=VOCAB)
    arrays, numbers, verdict = rounds()[1]
    with no_compilation_cache():
        found = run(*arrays, numbers)
    np.testing.assert_array_equal(found, verdict)


def check_limits() -> None:
    """Check cases that random rounds lack: equal products, empty residuals, zeros."""

    def verdict(*given: Any, **more: Any) -> tuple[int, int]:
        # Use a new jit, because a cached trace would not contain the bug.
        run = by_reference(vocab_size=2**30, axis_name=None)
        return verdict_of(jax.jit(run, compiler_options=UNOPTIMISED), *given, **more)

    none = -np.inf
    draft = [1.0, 0, 0, 0]
    assert verdict([0.0, 0.0, none, none], [0], u=0.5, draft=draft) == (0, 1)
    assert verdict([none, 1.0, none], [0]) == (0, 1)
    draft = [0.5] * 4
    assert verdict([0.0, 0.0, none, 0.0], [0], u=0.99, v=0.4, draft=draft) == (0, 1)
    assert verdict([none, none, 1.0], [2], u=0.5) == (1, 2)


def mutant(
    name: str, place: str, old: str, new: str, check: Callable | None = None
) -> Mutant:
    module, function = place.split(".")
    implementation = module if module in IMPLEMENTATIONS else "reference"
    return Mutant(
        name=f"{module}: {name}",
        module=f"{PACKAGE}.{module}",
        function=function,
        old=old,
        new=new,
        check=check or CHECKS[implementation],
    )


CHECKS = {name: partial(check_rounds, name) for name in IMPLEMENTATIONS}
G_TOTAL = "total * passes.to_weights(maximum, distribution)"
MUTANTS = [
    mutant(
        "shared noise",
        "passes.gumbel_argmax",
        "words[:, :1], words",
        "words[:1, :1], words",
    ),
    mutant("shared noise", "gpu._gumbel_argmax", "(words, row, i)", "(words, 0, i)"),
    mutant("noise without ids", "noise.uniform", "ids.astype", "(0 * ids).astype"),
    mutant(
        "not strict",
        "reference._verify_sampled",
        "accept_uniform * draft_token_probs < target_token_probs",
        "accept_uniform * draft_token_probs <= target_token_probs",
        check_limits,
    ),
    mutant(
        "no prefix",
        "reference._prefix_length",
        "jnp.cumprod(is_accepted.astype(jnp.int32), axis=1)",
        "is_accepted.astype(jnp.int32)",
    ),
    mutant(
        "residual without max",
        "draw.draw",
        "jnp.maximum(joint[:, None] * target - draft_probs, 0.0)",
        "joint[:, None] * target - draft_probs",
    ),
    mutant(
        "residual with the token's joint",
        "draw.draw",
        "joint[:, None] * target",
        "target",
    ),
    mutant(
        "empty residual drawn from",
        "draw.draw",
        "is_rejected & (shard.psum(residual.sum(axis=(1, 2))) > 0)",
        "is_rejected",
        check_limits,
    ),
    mutant(
        "bonus from the residual",
        "reference._verify_sampled",
        "is_rejected=num_accepted < num_valid_drafts",
        "is_rejected=num_accepted <= num_valid_drafts",
    ),
    mutant(
        "weight of 0 drawn",
        "draw._descend",
        "has_weight & (sums > goal[:, None])",
        "sums >= goal[:, None]",
        check_limits,
    ),
    mutant(
        "threshold off by one",
        "search._narrowed",
        "masses >= wanted[:, None]",
        "masses > wanted[:, None]",
    ),
    mutant(
        "search ends early", "search.search", ">= 2 * token_mass", ">= 3 * token_mass"
    ),
    mutant(
        "top-p of more than the mass",
        "reference._filter",
        "sampling_values.top_p * distribution.total",
        "sampling_values.top_p * distribution.total * 1.02",
    ),
    mutant(
        "sum with the dropped tokens",
        "reference._filter",
        "jnp.where(by_p, mass, distribution.total)",
        "distribution.total",
    ),
    mutant(
        "pad counted",
        "passes.clean",
        "jnp.isnan(logits) | (ids == NO_ID)",
        "jnp.isnan(logits)",
    ),
    mutant("pad counted", "tpu._kernel", "& (ids < vocab_size)", ""),
    mutant("pad counted", "gpu._read", "& (ids < vocab_size)", ""),
    mutant(
        "combined without rescale",
        "passes.combine",
        "local.total * to_weights(local.maximum[:, None], distribution)[:, 0]",
        "local.total",
        check_slices,
    ),
    mutant(
        "tiles without rescale",
        "passes.statistics",
        "total * to_weights(maximum[:, None], distribution)",
        "total",
    ),
    mutant(
        "tiles without rescale",
        "tpu._kernel",
        "total[...] * jnp.exp((before - finite_top) / temperature[...])",
        "total[...]",
    ),
    mutant("splits without rescale", "gpu.statistics", G_TOTAL, "total"),
    mutant(
        "highest id of equals", "gpu._statistics", "passes.NO_ID).min()", "-1).max()"
    ),
    mutant(
        "block row off by one",
        "passes.residual_mass",
        "[:, 1:-1]",
        "[:, 2:]",
    ),
    mutant(
        "block row off by one",
        "gpu._residual_mass",
        "(inner + 2) + index",
        "(inner + 2)",
    ),
]
