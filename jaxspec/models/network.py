"""The interface of a network to the program: tokens in, rows and logits out.

Families provide plain functions over a tree of parameters, such as
`jaxspec.models.gemma.network`; `build_network` binds them to the parameters of a
launch.
"""

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.config.model import ModelConfig
from jaxspec.models import cpu
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.families import family_of
from jaxspec.models.matrices import Matrix
from jaxspec.models.params import Params, Specs
from jaxspec.models.trimmed import to_target_vocab
from jaxspec_kernels.bits import KvPools

Pages = KvPools

# With XLA's products, a pass over this number of rows takes as long as over one row, so
# the rows that would be padding may have tokens. With products in C++, a pass takes
# somewhat longer per row, and nothing is padded.
FREE_ROWS = cpu.MIN_ROWS


class ForwardOutput(NamedTuple):
    """Result of a forward pass.

    Attributes:
        hidden_states: Output of the last layer, after the final norm.
        is_finite: Rows computed without NaN or infinity.
        streams: The residual stream, before the first layer and after each. XLA drops
            the unused ones.
    """

    hidden_states: Float[Array, "token model"]
    is_finite: Bool[Array, " token"]
    streams: tuple[Float[Array, "token model"], ...]


@runtime_checkable
class Functions(Protocol):
    """The functions of a family's network module; `config` is the family's."""

    def param_specs(self, config: Any) -> Specs:
        """Declare all parameters, in the order in which random ones are numbered."""
        ...

    def forward(
        self,
        config: Any,
        params: Params,
        batch: TokenBatch,
        kv_pages: Pages,
        backend: Backend,
    ) -> tuple[ForwardOutput, Pages]:
        """Run all layers; return their output and the updated pages per layer."""
        ...

    def logits(
        self, config: Any, params: Params, rows: Float[Array, "row model"]
    ) -> Float[Array, "row _"]:
        """Return float32 logits of normalised rows, a column for each row of the head.

        The head is `params["head"]` if present, else the embedding.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Network:
    """A family's functions over one model's parameters: a target or a draft."""

    config: ModelConfig
    params: Params
    backend: Backend
    functions: Functions

    def forward(
        self, batch: TokenBatch, kv_pages: Pages
    ) -> tuple[ForwardOutput, Pages]:
        """Run all layers; return their output and the updated pages per layer."""
        count = batch.tokens.shape[0]
        padded = batch
        if not are_rows_independent(self.params):
            padded = cpu.pad_batch(batch, kv_pages[0].shape[0] * kv_pages[0].shape[1])
        output, kv_pages = self.functions.forward(
            self.config, self.params, padded, kv_pages, self.backend
        )
        if self.backend.has_blocks and padded.is_used is not None:
            # Products in C++ leave out rows of zeros: the logits cost nothing there.
            rows = jnp.where(padded.is_used[:, None], output.hidden_states, 0.0)
            output = output._replace(hidden_states=rows)
        return jax.tree.map(lambda part: part[:count], output), kv_pages

    def logits(self, rows: Float[Array, "row model"]) -> Float[Array, "row vocab"]:
        """Return float32 logits of normalised rows, over the whole vocabulary."""

        def multiply(rows: Array) -> Array:
            return self.functions.logits(self.config, self.params, rows)

        if are_rows_independent(self.params):
            logits = multiply(rows)
        else:
            logits = cpu.with_pads(multiply, rows)
        return to_target_vocab(self.params, logits, self.config.vocab_size)


def are_rows_independent(params: Params) -> bool:
    """Return whether all products are in C++, so that rows need no padding.

    A row's bits are independent of the number of rows, and a pass leaves out rows that
    are not used.
    """
    matrices = jax.tree.leaves(params, is_leaf=_is_matrix)
    return all(
        isinstance(leaf, cpu.NativeMatrix) for leaf in matrices if _is_matrix(leaf)
    )


def _is_matrix(node: Any) -> bool:
    return isinstance(node, Matrix)


def build_network(
    config: ModelConfig,
    params: Params,
    backend: Backend = Backend(),  # noqa: B008 frozen
) -> Network:
    """Make the network of a config over its parameters; usable inside jit."""
    functions = functions_of(config)
    return Network(config=config, params=params, backend=backend, functions=functions)


def functions_of(config: ModelConfig) -> Functions:
    """Return the functions of a config's family."""
    module: Any = importlib.import_module(family_of(config).network)
    return module
