"""A trimmed vocabulary: the rows of a head that are kept, and its logits' way back.

A small model spends much of a pass on the logits of tokens that hardly ever come. Cut
to the most frequent ones, its head is a fraction of the matrix. Tokens without a row
have probability 0 in the draft's distribution, so rules that compare it with the
target's remain exact. Input tokens may be any: the embedding is whole.

References: Zhao et al. 2025, arXiv:2502.14856 (FR-Spec).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.config.model import ModelConfig
from jaxspec.models.params import Params, Specs
from jaxspec.sharding import put, replicated
from jaxspec_checkpoints import Tensor
from jaxspec_checkpoints.trimming import rows_of

# Places in a tree of parameters. A family's logits are products with the head where it
# has one, else with the embedding.
EMBEDDING, HEAD = "embedding", "head"
# Which of the target's tokens each row of a trimmed head stands for: int32, ascending.
TOKEN_IDS = "token_ids"
# Logits of tokens that a head cannot propose. Finite: where a grammar allows none of
# those that it can, one of the allowed is drawn, and not of nothing. By no temperature
# does a distribution see the difference.
LOWEST = -1e9


def head_of(params: Mapping[str, Any]) -> Any:
    """Return the matrix of logits: the head, or the embedding where they are one."""
    return params[HEAD] if HEAD in params else params[EMBEDDING]


def trimmed_specs(config: ModelConfig, specs: Specs) -> Specs:
    """The same parameters, of the head only the rows that the config keeps.

    Where embedding and head are one matrix, the head becomes a second one.
    """
    if config.draft_vocab_size is None:
        return specs
    whole = specs.get((HEAD,), specs[(EMBEDDING,)])
    (name,) = whole.tensors
    shape = config.draft_vocab_size, *whole.shape[1:]
    kept = replace(whole, shape=shape, tensors=(_kept(name),))
    return specs | {(HEAD,): kept}


def with_kept_rows(
    config: ModelConfig,
    specs: Specs,
    tensors: Mapping[str, Tensor],
    token_ids: Sequence[int] | None,
) -> Mapping[str, Tensor]:
    """A checkpoint's tensors and, of a trimmed head, what its rows are read from.

    Args:
        specs: Of the whole model.
        token_ids: What is kept, as many as the config says, ascending.
    """
    assert (config.draft_vocab_size is None) == (token_ids is None)
    if token_ids is None:
        return tensors
    assert config.draft_vocab_size == len(token_ids)
    (name,) = specs.get((HEAD,), specs[(EMBEDDING,)]).tensors
    return {**tensors, _kept(name): rows_of(tensors[name], token_ids)}


def _kept(name: str) -> str:
    """What a trimmed head is called among canonical tensors; no checkpoint has it."""
    return f"{name}, kept rows"


def put_token_ids(
    params: Params, token_ids: Sequence[int] | np.ndarray, mesh: Mesh
) -> None:
    """Add the table of a trimmed vocabulary to a tree, on every device."""
    ids = np.asarray(token_ids, np.int32)
    params[TOKEN_IDS] = put(ids, replicated(mesh))


def put_token_id_forms(params: Params, count: int, mesh: Mesh) -> None:
    """Add the shape of such a table to a tree of shapes."""
    params[TOKEN_IDS] = jax.ShapeDtypeStruct(
        (count,), jnp.int32, sharding=replicated(mesh)
    )


def to_target_vocab(
    params: Mapping[str, Any], logits: Float[Array, "row _"], vocab_size: int
) -> Float[Array, "row vocab"]:
    """Logits over the target's vocabulary: `LOWEST` for what a head cannot propose."""
    if TOKEN_IDS not in params:
        return logits
    nothing = jnp.full((logits.shape[0], vocab_size), LOWEST, logits.dtype)
    return nothing.at[:, params[TOKEN_IDS]].set(logits)
