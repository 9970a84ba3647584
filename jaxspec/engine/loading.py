"""Owns what happens once, at the start: files to a tokenizer and to a runner."""

from collections.abc import Mapping

from jaxspec.config import EngineConfig
from jaxspec.engine.runner import (
    Runner,
    build_mesh,
    choose_dtype,
    use_compilation_cache,
)
from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.models.weights import Params, load_params
from jaxspec.sharding import DRAFT_MESH_AXES, Mesh
from jaxspec.tokenizer import Tokenizer, check_same_tokenizer
from jaxspec_checkpoints import CheckpointError, Tensor, model_files, open_checkpoint
from jaxspec_checkpoints.layout import EMBEDDING

# vLLM's names, and the formats of checkpoints that they mean.
_LOAD_FORMATS = {
    "auto": ("hf", "kaggle", "orbax"),
    "safetensors": ("hf",),
    "orbax": ("kaggle", "orbax"),
}


def read_tokenizer(config: EngineConfig) -> Tokenizer:
    """Read the target's tokenizer, and check that the draft's is the same one.

    Raises:
        ConfigError: A tokenizer cannot be read, or they differ.
    """
    tokenizer = Tokenizer.from_folder(config.tokenizer, config.chat_template)
    num_rows = config.model_config.vocab_size
    if tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"The tokenizer of {config.tokenizer} has {tokenizer.vocab_size} pieces, "
            f"and the network of {config.model} has vocab_size={num_rows}: they are "
            "not of one model. Pass the model's own as tokenizer.",
            parameter="tokenizer",
            value=config.tokenizer,
        )
    folder = config.speculative and config.speculative.model
    if folder is not None:
        # A draft without a tokenizer of its own was trained for the target's.
        if {"tokenizer.model", "tokenizer.json"} & model_files(folder).keys():
            check_same_tokenizer(tokenizer, Tokenizer.from_folder(folder))
    return tokenizer


def make_runner(config: EngineConfig) -> Runner:
    """Load both models onto the mesh that the configuration asks for.

    Raises:
        ConfigError: A checkpoint is incomplete or damaged.
    """
    store = use_compilation_cache(config.compilation_cache_dir)
    mesh = build_mesh(config)
    runner = Runner(config, mesh, *load_weights(config, mesh))
    runner.store = store
    return runner


def load_weights(config: EngineConfig, mesh: Mesh) -> tuple[Params, Params | None]:
    """Read the weights of target and draft.

    Raises:
        ConfigError: A checkpoint is incomplete or damaged.
    """
    dtype = choose_dtype(config.dtype, mesh)
    # Both are checked before either is read: a wrong draft must not cost minutes.
    tensors = _open(config, config.model, "model")
    draft_tensors = None
    folder = config.speculative and config.speculative.model
    if folder is not None:
        draft_tensors = _open(config, folder, "speculative_model")
    draft = None
    try:
        target = load_params(
            config.model_config,
            tensors,
            dtype=dtype,
            mesh=mesh,
            progress="Loading target",
        )
        if config.draft_model_config is not None and draft_tensors is not None:
            draft = load_params(
                config.draft_model_config,
                draft_tensors,
                dtype=dtype,
                mesh=mesh,
                mesh_axes=DRAFT_MESH_AXES,
                progress="Loading draft",
            )
    except CheckpointError as error:
        raise ConfigError(str(error), parameter="model") from error
    return target, draft


def _open(config: EngineConfig, folder: str, argument: str) -> Mapping[str, Tensor]:
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        # Target and draft are read alike: say which of them this is.
        message = f"{argument}: {error}"
        raise ConfigError(message, parameter=argument, value=folder) from error
    load_format = config.load_format
    if checkpoint.format not in _LOAD_FORMATS[load_format]:
        allowed = f"'auto' for {folder}, which holds format {checkpoint.format!r},"
        raise wrong_argument(ConfigError, "load_format", allowed, load_format)
    # Rows of padding that the other model of the pair does not have are left out.
    num_rows = config.model_config.vocab_size
    embedding = checkpoint.tensors[EMBEDDING]
    if embedding.shape[0] <= num_rows:
        return checkpoint.tensors
    return {**checkpoint.tensors, EMBEDDING: embedding.head(num_rows)}
