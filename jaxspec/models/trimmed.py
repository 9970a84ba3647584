"""A trimmed vocabulary: keep some rows of a draft's head, and widen its logits again.

A small model spends much of a pass on the logits of rare tokens. A head with the rows
of the most frequent tokens only is a fraction of the matrix. Tokens without a row have
probability 0 in the draft's distribution, so rules that compare it with the target's
remain exact. Any token may be an input: the embedding is complete.

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

# Keys in a tree of parameters. A network multiplies by the head to get logits if the
# tree has one, else by the embedding.
EMBEDDING, HEAD = "embedding", "head"
# Key of the target's token id for each row of a trimmed head: int32, ascending.
TOKEN_IDS = "token_ids"
# Logit of tokens that a head cannot propose. Finite, so that some token can be sampled
# when a grammar allows none that the head can propose. At every temperature its
# probability is 0.
LOWEST = -1e9


def head_of(params: Mapping[str, Any]) -> Any:
    """Return the output matrix: the head, or the embedding if they are tied."""
    return params[HEAD] if HEAD in params else params[EMBEDDING]


def trimmed_specs(config: ModelConfig, specs: Specs) -> Specs:
    """Trim the declared head to the rows that the config keeps.

    A head tied to the embedding becomes a separate matrix.
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
    """Add the kept rows of a trimmed head to a checkpoint's tensors.

    Args:
        specs: Declarations of all parameters of the model.
        token_ids: The tokens kept, ascending; their number is the config's.
    """
    assert (config.draft_vocab_size is None) == (token_ids is None)
    if token_ids is None:
        return tensors
    assert config.draft_vocab_size == len(token_ids)
    (name,) = specs.get((HEAD,), specs[(EMBEDDING,)]).tensors
    return {**tensors, _kept(name): rows_of(tensors[name], token_ids)}


def _kept(name: str) -> str:
    """Return the name of a trimmed head among tensors; no checkpoint contains it."""
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
    """Widen logits to the target's vocabulary: `LOWEST` for tokens without a row."""
    if TOKEN_IDS not in params:
        return logits
    nothing = jnp.full((logits.shape[0], vocab_size), LOWEST, logits.dtype)
    return nothing.at[:, params[TOKEN_IDS]].set(logits)
