"""Registry of model families, and the lookup of a `config.json`'s family.

Modules that import jax are given by name, so that configs can be read without jax.

To add a family: a folder next to `gemma` with its config and a network module, and an
entry below. `tests/models/llama.py` is an example.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxspec.config.model import ModelConfig
from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    named_in,
    one_of,
    wrong_argument,
)
from jaxspec.models.gemma.config import Gemma2Config, Gemma3Config
from jaxspec.models.gemma.turns import GemmaTurns
from jaxspec_checkpoints import (
    CheckpointError,
    Layout,
    lists_head,
    open_checkpoint,
    read_config,
)
from jaxspec_checkpoints.gemma.published import GEMMA2, GEMMA3


@runtime_checkable
class Turns(Protocol):
    """Formats conversations as prompts, for a model without a chat template.

    Attributes:
        markers: Pieces that begin and end a turn.
        roles: Roles that a message may have.
    """

    @property
    def markers(self) -> tuple[str, str]: ...

    @property
    def roles(self) -> tuple[str, ...]: ...

    def write(
        self,
        messages: list[dict[str, Any]],
        *,
        marks: Any,
        pieces: Mapping[str, str],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Write a checked conversation, with its texts marked.

        Args:
            marks: `chat_turns.Marks`; None leaves the messages unmarked.
            pieces: Spelling of "bos_token" and other special tokens, by name.
            variables: Template variables.

        Raises:
            RequestError: The roles are not allowed or do not alternate.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything specific to one family.

    Attributes:
        config: Its config class, which also reads `config.json`.
        architecture: HuggingFace's class name of its models.
        network: Module with the functions of `jaxspec.models.network.Functions`.
        layout: The tensors of a checkpoint, and which sizes were published.
        turns: Formats chats for a model without a template; None if not supported.
    """

    config: type[ModelConfig]
    architecture: str
    network: str
    layout: Layout
    turns: Turns | None = None


# Turns for a tokenizer that is used without a model, so that the family is unknown.
DEFAULT_TURNS = GemmaTurns()

_FAMILIES = (
    Family(
        config=Gemma2Config,
        architecture="Gemma2ForCausalLM",
        network="jaxspec.models.gemma.network",
        layout=GEMMA2,
        turns=DEFAULT_TURNS,
    ),
    Family(
        config=Gemma3Config,
        architecture="Gemma3ForCausalLM",
        network="jaxspec.models.gemma.network",
        layout=GEMMA3,
        turns=GemmaTurns(folds_system=True),
    ),
)
# Families by the `model_type` of HuggingFace's config.json.
FAMILIES = {name: one for one in _FAMILIES for name in one.layout.model_types}
# Reasons why related models are not supported, by the first part of their `model_type`.
_UNSUPPORTED = {
    "gemma3n": "Gemma 3n has layers of another kind (AltUp, embeddings per layer).",
    "gemma4": "Gemma 4 has layers of another kind (shared KV, embeddings per layer).",
    "t5gemma": "T5Gemma has an encoder.",
    "paligemma": "PaliGemma reads images.",
}


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model's config."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    raise TypeError(f"no family in FAMILIES has {type(config).__name__}")


def layouts() -> dict[str, Layout]:
    """Return the layouts of all families, by `model_type`."""
    return {name: family.layout for name, family in FAMILIES.items()}


def published_config(name: str) -> dict[str, Any] | None:
    """Return the `config.json` of a published model by its name; None if unknown."""
    found = (layout.config_of(name) for layout in layouts().values())
    return next((config for config in found if config is not None), None)


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> Any:
    """Read the content of a HuggingFace `config.json`; returns its family's config.

    End tokens in `generation`, the content of `generation_config.json`, are added.

    Raises:
        ConfigError: The architecture is not supported, or a size is missing.
        NotImplementedError: A variant that the family's network does not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        allowed = f"{one_of(FAMILIES)}, which are the supported architectures"
        for name, reason in _UNSUPPORTED.items():
            if str(model_type).startswith(name):
                raise wrong_argument(
                    UnsupportedError, "model_type", allowed, model_type, reason
                )
        raise wrong_argument(ConfigError, "model_type", allowed, model_type)
    return FAMILIES[model_type].config.from_hf(config, generation)


def config_from_folder(folder: str | Path) -> Any:
    """Read the config of a model folder, in any format of checkpoint.

    If the weights have an `lm_head.weight`, it is compared with the embedding: the
    files' bytes decide whether the model has a separate LM head.

    Raises:
        ConfigError: There is no config, or its family is unknown; or a checkpoint with
            an `lm_head.weight` is damaged.
    """
    try:
        config, generation = read_config(folder, layouts())
    except CheckpointError as error:
        name = str(folder)
        raise ConfigError(str(error), parameter="model", value=name) from error
    with named_in(f"config.json of {folder}"):
        found = config_from_hf(config, generation)
    if not lists_head(folder):
        return found
    try:
        config = open_checkpoint(folder, layouts()).resolved().config
    except CheckpointError as error:
        name = str(folder)
        raise ConfigError(str(error), parameter="model", value=name) from error
    return config_from_hf(config, generation)
