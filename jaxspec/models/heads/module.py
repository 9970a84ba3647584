"""Heads as Flax modules, for inspection, training and composition.

The engine and the trainer do not use them: they run the same functions over a plain
tree.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.heads import eagle, eagle3, medusa
from jaxspec.models.heads.config import (
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
)
from jaxspec.models.heads.weights import functions_of_head
from jaxspec.models.matrices import DenseMatrix
from jaxspec.models.params import Params
from jaxspec.models.variables import as_module, as_variables, bound_params
from jaxspec_kernels.bits import KvPages


class _Head(nnx.Module):
    """Parameters under the names of the tree: `module.parameters["fc"]`."""

    def __init__(self, config: HeadConfig, dtype: jnp.dtype):
        self.config = config
        specs = functions_of_head(config).param_specs(config)
        self.parameters = as_module(as_variables(specs, dtype))

    def params(self) -> Params:
        """Return the parameter tree that the network's functions take."""
        specs = functions_of_head(self.config).param_specs(self.config)
        return bound_params(self.parameters, specs)


class Eagle3(_Head):
    """See `jaxspec.models.heads.eagle3`."""

    config: Eagle3Config

    def fuse(
        self, streams: Sequence[Float[Array, "row target_model"]]
    ) -> Float[Array, "row model"]:
        """Fuse the target's residual streams, the lowest first."""
        return eagle3.fuse(self.config, self.params(), streams)

    def __call__(
        self,
        batch: TokenBatch,
        hidden: Float[Array, "row model"],
        kv_pages: KvPages,
        embedding: Float[Array, "vocab model"],
        backend: Backend = Backend(),  # noqa: B008 frozen
    ) -> tuple[Float[Array, "row model"], KvPages]:
        """Run the layer; its output and the updated pages.

        Args:
            embedding: The target's, for a head that has none.
        """
        params = self.params()
        embedded = eagle3.embed(params, batch.tokens, DenseMatrix(embedding))
        return eagle3.forward(
            self.config, params, batch, embedded, hidden, kv_pages, backend
        )

    def logits(
        self, hidden: Float[Array, "row model"]
    ) -> Float[Array, "row draft_vocab"]:
        """Return logits of the layer's output, over the head's own vocabulary."""
        return eagle3.logits(self.config, self.params(), hidden)


class Eagle(_Head):
    """See `jaxspec.models.heads.eagle`."""

    config: EagleConfig

    def __call__(
        self,
        batch: TokenBatch,
        hidden: Float[Array, "row model"],
        kv_pages: KvPages,
        embedding: Float[Array, "vocab model"],
        backend: Backend = Backend(),  # noqa: B008 frozen
    ) -> tuple[Float[Array, "row model"], KvPages]:
        """Run the layer; its output and the updated pages.

        Args:
            embedding: The target's, for a head that has none.
        """
        params = self.params()
        embedded = eagle.embed(params, batch.tokens, DenseMatrix(embedding))
        return eagle.forward(
            self.config, params, batch, embedded, hidden, kv_pages, backend
        )

    def logits(
        self,
        hidden: Float[Array, "row model"],
        embedding: Float[Array, "vocab model"],
    ) -> Float[Array, "row vocab"]:
        """Return logits of the layer's output, by the target's output matrix."""
        target = DenseMatrix(embedding)
        return eagle.logits(self.config, self.params(), hidden, target)


class Medusa(_Head):
    """See `jaxspec.models.heads.medusa`."""

    config: MedusaConfig

    def __call__(
        self,
        rows: Float[Array, "row model"],
        embedding: Float[Array, "vocab model"],
    ) -> tuple[Float[Array, "row draft_vocab"], ...]:
        """Return logits of every head.

        Args:
            embedding: The target's output matrix.
        """
        params = self.params()
        rows_by_head = medusa.forward(self.config, params, rows)
        return tuple(
            medusa.logits(self.config, params, head, head_rows, DenseMatrix(embedding))
            for head, head_rows in enumerate(rows_by_head)
        )
