"""Gemma as a Flax module, for inspection, training and composition.

The engine does not use it: it runs the same functions over a plain tree.
"""

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.gemma import network
from jaxspec.models.gemma.config import GemmaConfig
from jaxspec.models.network import ForwardOutput, Network, Pages
from jaxspec.models.variables import as_module, as_variables, bound_params


class Gemma(nnx.Module):
    """The whole network; its parameters are zeros until they are replaced.

    They are `nnx.Param`s with the metadata `axes` and `unit`, named as in the engine's
    tree: `model.layers[0].attention.kv_proj`.
    """

    def __init__(
        self,
        config: GemmaConfig,
        dtype: jnp.dtype,
        backend: Backend = Backend(),  # noqa: B008 frozen
    ):
        if config.scan_layers:  # a module for every layer: nothing can be scanned
            config = replace(config, scan_layers=False)
        self.config, self._backend = config, backend
        tree = as_variables(network.param_specs(config), dtype)
        self.embedding, self.final_norm = tree["embedding"], tree["final_norm"]
        if "head" in tree:
            self.head = tree["head"]
        self.layers = nnx.List(map(as_module, tree["layers"].values()))

    def forward(
        self, batch: TokenBatch, kv_pages: Pages
    ) -> tuple[ForwardOutput, Pages]:
        """Run all layers; return their output and the updated pages per layer."""
        return self._bound().forward(batch, kv_pages)

    def logits(self, hidden: Float[Array, "row model"]) -> Float[Array, "row vocab"]:
        """Return float32 logits of normalised rows; see `network.logits`."""
        return self._bound().logits(hidden)

    def _bound(self) -> Network:
        params = bound_params(self, network.param_specs(self.config))
        return Network(
            config=self.config,
            params=params,
            backend=self._backend,
            functions=network,
        )
