"""Training methods: heads, and draft models.

A method defines which of the target's layers it reads, its initial parameters, its
output for rows of text in each of its passes, and how the trained model is written to a
folder. Pass i, at token t, proposes the token at t + `offset` + i + 1.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
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
from jaxspec.models.heads import dflash, eagle3, medusa
from jaxspec.models.heads.config import (
    DFlashConfig,
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
from jaxspec.models.trimmed import (
    EMBEDDING,
    HEAD,
    TOKEN_IDS,
    head_of,
    put_token_ids,
)
from jaxspec.models.weights import load_params, tensors_of
from jaxspec.sharding import TARGET_MESH_AXES
from jaxspec.train.rows import (
    BlocksBackend,
    RowsBackend,
    no_keys,
    rows_batch,
    shifted,
)
from jaxspec.train.start import (
    STREAM_SCALE,
    Examples,
    Fit,
    fit_next_states,
    start_dflash,
    start_eagle3,
    without_scale,
)
from jaxspec.train.target import States, Target
from jaxspec_checkpoints import Checkpoint, Tensor, in_memory, model_files
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.gguf.file import read_gguf
from jaxspec_checkpoints.gguf.reading import tokenizer_files
from jaxspec_checkpoints.gguf.writing import tokenizer_metadata, write_gguf
from jaxspec_checkpoints.reading import GGUF
from jaxspec_checkpoints.trimming import IDS
from jaxspec_checkpoints.writing import write_checkpoint

# Types of the parameters: first during training, then in the folder that an engine
# loads.
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
# Formats of the trained model's files.
SAFETENSORS, SPECFORGE, GGUF_FILE = "safetensors", "specforge", "gguf"
EXPORTS = (SAFETENSORS, SPECFORGE, GGUF_FILE)


@runtime_checkable
class Method(Protocol):
    """The interface of a method to the trainer."""

    # Pass 0 at token t proposes token t + 1 if this is 0, and token t + 2 if it is 1.
    # It is 1 for heads: their first draft follows a round's newest token, which the
    # target has not read yet.
    offset: ClassVar[int]

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the target's layers after which the residual stream is read."""
        ...

    @property
    def num_passes(self) -> int: ...

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        """Make initial float32 parameters, placed on the target's mesh."""
        ...

    def warm_start(
        self, params: Params, target: Target, batches: Iterable[Examples]
    ) -> Params:
        """Return better initial parameters, from what the target computes for text.

        Parameters named `STREAM_SCALE` are not trained.
        """
        ...

    def hidden(
        self,
        params: Params,
        embedding: Matrix,
        tokens: Int[Array, "row token"],
        states: States,
    ) -> list[Float[Array, "row_token model"]]:
        """Return the output of each pass for all rows, before logits."""
        ...

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        """Return logits of a pass's output."""
        ...

    def save(
        self,
        folder: Path,
        params: Params,
        target: Target,
        *,
        token_ids: np.ndarray | None,
        export: str,
    ) -> None:
        """Write a folder that an engine loads.

        Args:
            token_ids: The tokens of a trimmed vocabulary, most frequent first.
            export: One of `EXPORTS`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _Head:
    """Base of the methods for heads."""

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

    def warm_start(
        self, params: Params, target: Target, batches: Iterable[Examples]
    ) -> Params:
        return params

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        network = functions_of_head(self.config)
        return network.logits(self.config, params, hidden, head)

    def save(
        self,
        folder: Path,
        params: Params,
        target: Target,
        *,
        token_ids: np.ndarray | None = None,
        export: str = SAFETENSORS,
    ) -> None:
        assert export in (SAFETENSORS, SPECFORGE), export
        save_head(
            folder,
            self.config,
            without_scale(params),
            dtype=BFLOAT16,
            target_name=target.name,
            architecture=family_of(target.config).architecture,
            is_specforge=export == SPECFORGE,
        )


@dataclass(frozen=True, kw_only=True)
class _LayerMethod(_Head):
    """Base of EAGLE methods: each pass reads the output of the pass before it.

    Attributes:
        num_passes: Number of consecutive drafts that are trained.
    """

    config: LayerConfig
    num_passes: int = 3

    def _rows(self, params: Params, states: States) -> Float[Array, "row_token model"]:
        """Return the target's hidden states that the first pass takes."""
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
    """Trains the layer to predict the target's logits by the target's output matrix."""

    config: EagleConfig

    def _rows(self, params: Params, states: States) -> Float[Array, "row_token model"]:
        return states.rows.reshape(-1, states.rows.shape[-1]).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Eagle3Method(_LayerMethod):
    """Trains a layer over three of the target's hidden states, with its own LM head."""

    config: Eagle3Config

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.config.target_layers is not None
        return self.config.target_layers

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        """Start with a copy of the target's output matrix and of the norm before it."""
        params = super().init(target, seed, token_ids)
        return _with_output_of(target, params)

    def warm_start(
        self, params: Params, target: Target, batches: Iterable[Examples]
    ) -> Params:
        """Start with a linear fit of the target's next hidden states."""
        return start_eagle3(
            self.config, params, _fit(target, batches, reads_token=True)
        )

    def _rows(self, params: Params, states: States) -> Float[Array, "row_token model"]:
        return eagle3.fuse(self.config, params, _streams(states, params))


@dataclass(frozen=True, kw_only=True)
class DFlashMethod(_Head):
    """Trains layers to fill in a block of masks after every token of a row."""

    config: DFlashConfig

    @property
    def layers(self) -> tuple[int, ...]:
        return self.config.target_layers

    @property
    def num_passes(self) -> int:
        return self.config.max_draft_tokens

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        """Start with a copy of the norm before the target's output matrix.

        A drafter with a matrix of its own starts with a copy of the target's.
        """
        return _with_output_of(target, super().init(target, seed, token_ids))

    def warm_start(
        self, params: Params, target: Target, batches: Iterable[Examples]
    ) -> Params:
        """Start with a linear fit of the target's next hidden states."""
        return start_dflash(
            self.config, params, _fit(target, batches, reads_token=False)
        )

    def hidden(
        self,
        params: Params,
        embedding: Matrix,
        tokens: Int[Array, "row token"],
        states: States,
    ) -> list[Float[Array, "row_token model"]]:
        config, places = self.config, self.config.block_size
        keys = no_keys(
            tokens,
            config.num_kv_heads,
            config.head_dim,
            FLOAT32,
            num_passes=1 + places,
        )
        text, pages = rows_batch(tokens), (keys,) * config.num_layers
        where = text.positions, text.slot_mapping
        pages = dflash.write_context(
            config, params, _streams(states, params), *where, pages, RowsBackend()
        )
        masks = jnp.full_like(tokens, config.mask_token_id)
        blocks = [shifted(tokens, 1), *[masks] * (places - 1)]
        batch = dataclasses.replace(
            rows_batch(jnp.concatenate(blocks)),
            positions=jnp.concatenate(
                [rows_batch(tokens, 1 + place).positions for place in range(places)]
            ),
        )
        embedded = dflash.embed(config, params, batch.tokens, embedding)
        found, _ = dflash.forward(
            config, params, batch, embedded, pages, BlocksBackend()
        )
        return list(found.reshape(places, tokens.size, -1)[1:])


@dataclass(frozen=True, kw_only=True)
class MedusaMethod(_Head):
    """Trains several heads that all read the same hidden state of the target."""

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

    A model that proposes several drafts at once (PARD) is trained in one pass per
    draft. The first pass reads the text, the others mask tokens in place of drafts: the
    masks that follow token t attend to the text up to t and to the masks of earlier
    passes at t.

    Attributes:
        hf_config: Content of its config.json.
        start: Initial canonical tensors; None draws random ones.
        is_embedding_shared: Whether embedding and output matrix are the target's, and
            are not trained.
        draft_vocab_size: Number of tokens that it can propose, the most frequent ones,
            if it shares the target's embedding; None for all.
        num_passes: Drafts that it proposes at once; if more than one, the config has a
            mask token.

    References: An et al. 2025, arXiv:2504.18583.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    start: Mapping[str, Tensor] | None = None
    is_embedding_shared: bool = False
    draft_vocab_size: int | None = None
    num_passes: int = 1

    offset: ClassVar[int] = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def init(self, target: Target, seed: int, token_ids: np.ndarray | None) -> Params:
        """Return the parameters of `start`, or random matrices with an embedding.

        The embedding is the target's, projected onto its main directions.
        """
        assert (token_ids is None) == (self.draft_vocab_size is None)
        if self.start is not None:
            params = _dense(
                load_params(
                    self.config,
                    self.start,
                    dtype=FLOAT32,
                    mesh=target.mesh,
                    is_trained=True,
                )
            )
            if self.is_embedding_shared:
                params = {
                    name: part
                    for name, part in params.items()
                    if name not in (EMBEDDING, HEAD)
                }
            if token_ids is not None:
                put_token_ids(params, np.sort(token_ids), target.mesh)
            return params
        random, flat = np.random.default_rng(seed), {}
        for path, spec in functions_of(self.config).param_specs(self.config).items():
            if len(spec.shape) == 1:
                # The norms after a layer's blocks start small, so that the layer starts
                # near the identity.
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

    def warm_start(
        self, params: Params, target: Target, batches: Iterable[Examples]
    ) -> Params:
        return params

    def hidden(
        self,
        params: Params,
        embedding: Matrix,
        tokens: Int[Array, "row token"],
        states: States,
    ) -> list[Float[Array, "row_token model"]]:
        config, count = self.config, self.num_passes
        if self.is_embedding_shared:
            params = {**params, EMBEDDING: embedding}
        keys = no_keys(
            tokens, config.num_kv_heads, config.head_dim, FLOAT32, num_passes=count
        )
        pages, found = (keys,) * config.num_layers, []
        for number in range(count):
            if number:
                assert config.mask_token_id is not None
                tokens = jnp.full_like(tokens, config.mask_token_id)
            network = build_network(config, params, RowsBackend(number=number))
            output, pages = network.forward(rows_batch(tokens, number), pages)
            found.append(output.hidden_states)
        return found

    def logits(
        self,
        params: Params,
        head: Matrix,
        number: int,
        hidden: Float[Array, "row_token model"],
    ) -> Float[Array, "row_token draft_vocab"]:
        if self.is_embedding_shared:
            params = {EMBEDDING: head, HEAD: head}
        return functions_of(self.config).logits(self.config, params, hidden)

    def save(
        self,
        folder: Path,
        params: Params,
        target: Target,
        *,
        token_ids: np.ndarray | None = None,
        export: str = SAFETENSORS,
    ) -> None:
        """Write a model with the target's tokenizer and chat template.

        `safetensors` is a HuggingFace folder, `gguf` a folder with a file that
        llama.cpp reads too. Both have the token map of a trimmed vocabulary.
        """
        tensors = self._tensors(params)
        made = {} if token_ids is None else {TOKEN_MAP: token_map(token_ids)}
        folder.parent.mkdir(parents=True, exist_ok=True)
        if export == GGUF_FILE:
            write_gguf(
                folder,
                self.hf_config,
                tensors,
                tokenizer=tokenizer_metadata(target.folder),
                made_files=made,
            )
            return
        files = dict(model_files(target.folder))
        files.pop("config.json", None)
        gguf = files.pop(GGUF, None)
        if gguf is not None:
            made |= tokenizer_files(read_gguf(gguf))
        checkpoint = Checkpoint(
            format="hf",
            layout=family_of(self.config).layout,
            folder=target.folder,
            config=self.hf_config,
            generation_config={},
            tensors=tensors,
            side_files={name: path for name, path in files.items() if name not in made},
            made_files=made,
        )
        write_checkpoint(checkpoint, folder, to="hf", dtype="bfloat16", progress=False)

    def _tensors(self, params: Params) -> dict[str, Tensor]:
        """Return canonical tensors, including those that are shared and not trained."""
        specs = functions_of(self.config).param_specs(self.config)
        if not self.is_embedding_shared:
            return in_memory(tensors_of(specs, params))
        assert self.start is not None
        own = {path: spec for path, spec in specs.items() if path[0] in params}
        shared = (spec for path, spec in specs.items() if path not in own)
        names = [name for spec in shared for name in spec.tensors]
        return {
            **in_memory(tensors_of(own, params)),
            **{name: self.start[name] for name in names},
        }


def token_map(token_ids: np.ndarray) -> Callable[[], bytes]:
    """Return a function that makes a token map's file, most frequent first."""
    return lambda: (json.dumps({IDS: token_ids.tolist()}) + "\n").encode()


def _streams(states: States, params: Params) -> list[Float[Array, "row_token model"]]:
    """Return the target's residual streams, one array for each layer that is read."""
    width = states.streams.shape[-1]
    streams = states.streams.astype(jnp.float32)
    if STREAM_SCALE in params:
        streams /= params[STREAM_SCALE][None, None]
    return [
        streams[:, :, layer].reshape(-1, width) for layer in range(streams.shape[2])
    ]


def _fit(target: Target, batches: Iterable[Examples], *, reads_token: bool) -> Fit:
    """Fit the target's next hidden states; see `fit_next_states`."""
    table = np.asarray(_values(target.embedding))
    return fit_next_states(batches, table, reads_token=reads_token)


def _with_output_of(target: Target, params: Params) -> Params:
    """Copy the target's last norm, and its output matrix if the head has one.

    A head of another width keeps its own.
    """
    norm = params["norm"]
    if norm.shape[0] != target.config.hidden_size:
        return params
    if "lm_head" in params:
        table, placed = _values(head_of(target.params)), _values(params["lm_head"])
        if TOKEN_IDS in params:
            table = table[params[TOKEN_IDS]]
        # A copy: training updates its parameters in place.
        table = jnp.array(table, jnp.float32, copy=True)
        params["lm_head"] = DenseMatrix(jax.device_put(table, placed.sharding))
    scale = 1 + target.params["final_norm"].astype(jnp.float32)
    params["norm"] = jax.device_put(scale, norm.sharding)
    return params


def _values(matrix: Any) -> Array:
    """Return a matrix as one array, however it is stored."""
    return matrix.values


def _dense(params: Params) -> Params:
    """Return the parameters with every matrix as a plain array, for training."""
    return jax.tree.map(
        lambda node: DenseMatrix(_values(node)) if isinstance(node, Matrix) else node,
        params,
        is_leaf=lambda node: isinstance(node, Matrix),
    )


def main_directions(table: np.ndarray, width: int, *, size: float = 0.02) -> np.ndarray:
    """Project an embedding to fewer dimensions, with entries of a given size.

    This projection preserves inner products best; the tied output layer computes them.
    """
    assert width <= table.shape[1]
    _, directions = np.linalg.eigh(table.T @ table)  # ascending eigenvalues
    projected = table @ directions[:, -width:]
    projected *= size / np.std(projected)
    return projected
