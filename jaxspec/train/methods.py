"""What is trained: heads, and draft models.

A method says which of the target's layers it looks at, how its parameters begin, what
it makes of rows of text in each of its passes, and how it is written to a folder. Pass
i, at token t, proposes the token at t + `offset` + i + 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Float, Int

from jaxspec.config.model import ModelConfig
from jaxspec.models.families import family_of
from jaxspec.models.heads import eagle, eagle3, medusa
from jaxspec.models.heads.config import (
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    LayerConfig,
    MedusaConfig,
)
from jaxspec.models.heads.weights import (
    functions_of_head,
    init_head,
    save_head,
)
from jaxspec.models.matrices import DenseMatrix, Matrix
from jaxspec.models.network import build_network, functions_of
from jaxspec.models.params import Params
from jaxspec.models.trimmed import TOKEN_IDS, head_of
from jaxspec.models.weights import load_params, tensors_of
from jaxspec.sharding import TARGET_MESH_AXES
from jaxspec.train.rows import RowsBackend, no_keys, rows_batch, shifted
from jaxspec.train.target import States, Target
from jaxspec_checkpoints import Checkpoint, Tensor, in_memory, model_files
from jaxspec_checkpoints.gguf.file import read_gguf
from jaxspec_checkpoints.gguf.reading import tokenizer_files
from jaxspec_checkpoints.reading import GGUF
from jaxspec_checkpoints.writing import write_checkpoint

# Of parameters while they are trained, and in the folder that an engine loads.
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@runtime_checkable
class Method(Protocol):
    """What the trainer asks of whatever it trains."""

    # 0 proposes the token after the one it is made at; 1 the one behind that, which is
    # what a round asks for: the next token is known when it begins.
    offset: ClassVar[int]

    @property
    def layers(self) -> tuple[int, ...]:
        """After how many layers the target's residual stream is wanted."""
        ...

    @property
    def num_passes(self) -> int: ...

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        """Float32 parameters to begin with, placed on the target's mesh."""
        ...

    def hidden(
        self,
        params: Params,
        embedding: Matrix,
        tokens: Int[Array, "row token"],
        states: States,
    ) -> list[Float[Array, "row_token model"]]:
        """What each pass makes of all rows, before logits."""
        ...

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        """Logits of what a pass has made."""
        ...

    def save(self, folder: Path, params: Params, target: Target) -> None:
        """Write a folder that an engine loads."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What heads have in common."""

    config: HeadConfig

    offset: ClassVar[int] = 1

    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        return init_head(
            self.config,
            seed=seed,
            mesh=target.mesh,
            mesh_axes=TARGET_MESH_AXES,
            token_ids=token_ids,
        )

    def save(self, folder: Path, params: Params, target: Target) -> None:
        save_head(
            folder,
            self.config,
            params,
            dtype=BFLOAT16,
            target_name=target.name,
            architecture=family_of(target.config).architecture,
        )


@dataclass(frozen=True, kw_only=True)
class _LayerMethod(_Head):
    """Training-time test: each pass goes on from what the one before it made.

    Attributes:
        num_passes: How many drafts ahead are trained.
    """

    config: LayerConfig
    num_passes: int = 3

    def _rows(self, params: Params, states: States) -> Float[Array, "row_token model"]:
        """What the first pass is given of the target."""
        raise NotImplementedError

    def hidden(
        self,
        params: Params,
        embedding: Matrix,
        tokens: Int[Array, "row token"],
        states: States,
    ) -> list[Float[Array, "row_token model"]]:
        config, network = self.config, functions_of_head(self.config)
        row = self._rows(params, states)
        keys = no_keys(
            tokens,
            config.num_kv_heads,
            config.head_dim,
            FLOAT32,
            num_passes=self.num_passes,
        )
        found = []
        for number in range(self.num_passes):
            batch = rows_batch(shifted(tokens, self.offset + number), number)
            embedded = network.embed(params, batch.tokens, embedding)
            row, keys = network.forward(
                config, params, batch, embedded, row, keys, RowsBackend(number=number)
            )
            found.append(row)
        return found


@dataclass(frozen=True, kw_only=True)
class EagleMethod(_LayerMethod):
    """What the layer makes is to stand for the target's last hidden states."""

    config: EagleConfig

    def _rows(self, params: Params, states: States) -> Float[Array, "row_token model"]:
        return states.rows.reshape(-1, states.rows.shape[-1]).astype(jnp.float32)

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        return eagle.logits(self.config, params, hidden, head)


@dataclass(frozen=True, kw_only=True)
class Eagle3Method(_LayerMethod):
    """The layer sees three of the target's, and has a matrix of logits of its own."""

    config: Eagle3Config

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.config.target_layers is not None
        return self.config.target_layers

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        """The matrix of logits begins as the target's, with the norm before it."""
        params = super().init(target, seed, token_ids)
        if self.config.hidden_size == target.config.hidden_size:
            table, placed = _values(head_of(target.params)), _values(params["lm_head"])
            if TOKEN_IDS in params:
                table = table[params[TOKEN_IDS]]
            # A copy: training writes into the memory of its parameters.
            table = jnp.array(table, jnp.float32, copy=True)
            table = jax.device_put(table, placed.sharding)
            params["lm_head"] = DenseMatrix(table)
            scale = 1 + target.params["final_norm"].astype(jnp.float32)
            params["norm"] = jax.device_put(scale, params["norm"].sharding)
        return params

    def _rows(self, params: Params, states: States) -> Float[Array, "row_token model"]:
        width = states.streams.shape[-1]
        streams = [
            states.streams[:, :, layer].reshape(-1, width).astype(jnp.float32)
            for layer in range(states.streams.shape[2])
        ]
        return eagle3.fuse(self.config, params, streams)

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        return eagle3.logits(self.config, params, hidden)


@dataclass(frozen=True, kw_only=True)
class MedusaMethod(_Head):
    """All heads look at the same hidden state."""

    config: MedusaConfig

    @property
    def num_passes(self) -> int:
        return self.config.num_heads

    def hidden(
        self,
        params: Params,
        embedding: Matrix,
        tokens: Int[Array, "row token"],
        states: States,
    ) -> list[Float[Array, "row_token model"]]:
        rows = states.rows.reshape(-1, states.rows.shape[-1]).astype(jnp.float32)
        return list(medusa.forward(self.config, params, rows))

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        return medusa.logits(self.config, params, number, hidden, head)


@dataclass(frozen=True, kw_only=True)
class DraftMethod:
    """A small model of the target's family, distilled from it.

    One that is to make several drafts at once (PARD) has as many passes over a text. In
    the first it is given the text; in the others masks, each in the place of a draft:
    behind a token t they see what came up to t, and the masks of the passes before.

    Attributes:
        hf_config: Content of its config.json.
        start: Canonical tensors to begin with; None draws random ones.
        num_passes: Drafts that it makes at once; of more than one, the config has a
            mask token.

    References: An et al. 2025, arXiv:2504.18583.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    start: Mapping[str, Tensor] | None = None
    num_passes: int = 1

    offset: ClassVar[int] = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        """Those to begin with; or random matrices, and the target's embedding.

        The embedding is projected onto its main directions.
        """
        assert token_ids is None, "a draft model has the target's vocabulary"
        if self.start is not None:
            return _dense(
                load_params(
                    self.config,
                    self.start,
                    dtype=FLOAT32,
                    mesh=target.mesh,
                    is_trained=True,
                )
            )
        random, flat = np.random.default_rng(seed), {}
        for path, spec in functions_of(self.config).param_specs(self.config).items():
            if len(spec.shape) == 1:
                # Outputs begin small, so that a layer begins near the identity.
                is_after = path[-1].startswith("post_")
                values = np.full(spec.shape, -0.7 if is_after else 0.0)
            elif path == ("embedding",):
                values = main_directions(
                    np.asarray(_values(target.embedding), np.float32), spec.shape[1]
                )
            else:
                values = random.standard_normal(spec.shape) / spec.shape[1] ** 0.5
            placement = spec.sharding(target.mesh, TARGET_MESH_AXES)
            values = jax.device_put(np.asarray(values, np.float32), placement)
            flat[path] = spec.wrap(values)
        return unflatten_dict(flat)

    def hidden(
        self,
        params: Params,
        embedding: Matrix,
        tokens: Int[Array, "row token"],
        states: States,
    ) -> list[Float[Array, "row_token model"]]:
        config, count = self.config, self.num_passes
        keys = no_keys(
            tokens, config.num_kv_heads, config.head_dim, FLOAT32, num_passes=count
        )
        pages, found = (keys,) * config.num_layers, []
        for number in range(count):
            if number:
                assert config.mask_token_id is not None
                tokens = jnp.full_like(tokens, config.mask_token_id)
            network = build_network(config, params, RowsBackend(number=number))
            hidden, pages = network.hidden(rows_batch(tokens, number), pages)
            found.append(hidden.rows)
        return found

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        return build_network(self.config, params, RowsBackend()).logits(hidden)

    def save(self, folder: Path, params: Params, target: Target) -> None:
        """A HuggingFace folder with the target's tokenizer and chat template."""
        specs = functions_of(self.config).param_specs(self.config)
        files = dict(model_files(target.folder))
        files.pop("config.json", None)
        gguf = files.pop(GGUF, None)
        checkpoint = Checkpoint(
            format="hf",
            layout=family_of(self.config).layout,
            folder=target.folder,
            config=self.hf_config,
            generation_config={},
            tensors=in_memory(tensors_of(specs, params)),
            side_files=files,
            made_files={} if gguf is None else tokenizer_files(read_gguf(gguf)),
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(checkpoint, folder, to="hf", dtype="bfloat16", progress=False)


def _values(matrix: Any) -> Array:
    """The numbers of a matrix, whatever other forms it has beside them."""
    return matrix.values


def _dense(params: Params) -> Params:
    """The same tree with every matrix in its plain form, as training wants it."""
    return jax.tree.map(
        lambda node: DenseMatrix(_values(node)) if isinstance(node, Matrix) else node,
        params,
        is_leaf=lambda node: isinstance(node, Matrix),
    )


def main_directions(table: np.ndarray, width: int, *, size: float = 0.02) -> np.ndarray:
    """An embedding in fewer dimensions, with entries of a size.

    The projection keeps its inner products best, and the output layer is made of those.
    """
    assert width <= table.shape[1]
    _, directions = np.linalg.eigh(table.T @ table)  # eigenvalues rise
    projected = table @ directions[:, -width:]
    projected *= size / np.std(projected)
    return projected
