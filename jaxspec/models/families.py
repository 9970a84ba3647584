"""The families of networks that there are: one entry each.

The way from a model's `config.json` to whatever is particular to its family. Modules
that reach jax are named, not imported: whoever reads configs does without it.

To add a family: a folder beside `gemma` with its config and a network module, and an
entry below. `tests/models/llama.py` is one.
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
    """What writes conversations where a model has no chat template.

    Attributes:
        markers: Pieces that begin and end a turn.
        roles: That a message may have.
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
        """Write a checked conversation, what it says marked.

        Args:
            marks: `chat_turns.Marks`; None leaves the messages as they are.
            pieces: "bos_token" and the like, with their spelling.
            variables: Of templates.

        Raises:
            RequestError: The roles are not allowed or do not take turns.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to one family.

    Attributes:
        config: Its numbers, and how they are read.
        architecture: What HuggingFace calls the class of its models.
        network: Module with the functions of `jaxspec.models.network.Functions`.
        layout: The tensors of a checkpoint, and which sizes were published.
        turns: What writes chats where a model has no template, if anything does.
    """

    config: type[ModelConfig]
    architecture: str
    network: str
    layout: Layout
    turns: Turns | None = None


# Also of tokenizers that come without a model, and so without a family.
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
# By the `model_type` of HuggingFace's config.json.
FAMILIES = {name: one for one in _FAMILIES for name in one.layout.model_types}
# Relatives of these that people try, by the first part of their `model_type`.
_UNSUPPORTED = {
    "gemma3n": "Gemma 3n has layers of another kind (AltUp, embeddings per layer).",
    "gemma4": "Gemma 4 has layers of another kind (shared KV, embeddings per layer).",
    "t5gemma": "T5Gemma has an encoder.",
    "paligemma": "PaliGemma reads images.",
}


def family_of(config: ModelConfig) -> Family:
    """The family that a model's numbers are those of."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    raise TypeError(f"no family in FAMILIES has {type(config).__name__}")


def layouts() -> dict[str, Layout]:
    """The layouts of all families, by `model_type`."""
    return {name: family.layout for name, family in FAMILIES.items()}


def published_config(name: str) -> dict[str, Any] | None:
    """The `config.json` of a published model, by its name; None if there is none."""
    found = (layout.config_of(name) for layout in layouts().values())
    return next((config for config in found if config is not None), None)


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> Any:
    """Read the content of a HuggingFace `config.json`; a config of the model's family.

    End tokens in `generation`, that of `generation_config.json`, are added.

    Raises:
        ConfigError: Another architecture, or a size is missing.
        NotImplementedError: A variant that the family's network does not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        allowed = f"{one_of(FAMILIES)}, the architectures of this engine"
        for name, reason in _UNSUPPORTED.items():
            if str(model_type).startswith(name):
                raise wrong_argument(
                    UnsupportedError, "model_type", allowed, model_type, reason
                )
        raise wrong_argument(ConfigError, "model_type", allowed, model_type)
    return FAMILIES[model_type].config.from_hf(config, generation)


def config_from_folder(folder: str | Path) -> Any:
    """Read the config of a model folder, in any format of checkpoint.

    Where the weights have an `lm_head.weight`, it is compared with the embedding: the
    files' bytes decide whether the model has a head of its own.

    Raises:
        ConfigError: There is none, or it is of no family's; or a checkpoint with an
            `lm_head.weight` is damaged.
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
