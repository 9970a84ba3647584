"""The quantization kinds that a user may select, and the models that support them.

The arithmetic is in `jaxspec_checkpoints.quantization`.
"""

from dataclasses import replace
from typing import Any

from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError, UnsupportedError, named_in, wrong_argument
from jaxspec_checkpoints.quantization import GGUF, METHODS, VALUE_TYPES, named_scheme

# While loading, or as vLLM names what a checkpoint was quantized by.
QUANTIZATIONS = (*VALUE_TYPES, *METHODS, GGUF)


def check_quantization(name: str, value: Any) -> None:
    """Reject an unknown quantization kind.

    Raises:
        NotImplementedError: It is none of `QUANTIZATIONS`.
    """
    if value not in (None, *QUANTIZATIONS):
        kinds = ", ".join(map(repr, VALUE_TYPES))
        hint = (
            f"Weights are quantized to {kinds} while they are loaded; checkpoints that "
            f"are quantized already are read by "
            f"{', '.join(map(repr, (*METHODS, GGUF)))}."
        )
        allowed = f"None or one of {', '.join(map(repr, QUANTIZATIONS))}"
        raise wrong_argument(UnsupportedError, name, allowed, value, hint)


def quantize_model(
    model: ModelConfig,
    kind: str | None,
    *,
    has_embedding: bool,
    argument: str,
    folder: str,
) -> ModelConfig:
    """The model with its matrices kept as the user, or its own checkpoint, says.

    Args:
        kind: One of `QUANTIZATIONS`; None: what the checkpoint says.
        has_embedding: Keep the embedding in int8 as well, if matrices are quantized.
        argument: What `kind` was given as.

    Raises:
        ConfigError: The checkpoint is quantized already, or otherwise than said, or
            groups do not divide its matrices.
    """
    scheme = model.quantization
    if kind is not None and kind != (scheme and scheme.method):
        if scheme is not None:
            raise wrong_argument(
                ConfigError,
                argument,
                f"left out for {folder}",
                kind,
                f"It is quantized already: {scheme.describe()}.",
            )
        if kind not in VALUE_TYPES:
            allowed = f"left out, or one of {', '.join(map(repr, VALUE_TYPES))}"
            hint = f"The weights of {folder} are not quantized."
            raise wrong_argument(ConfigError, argument, allowed, kind, hint)
        scheme = named_scheme(kind)
    if scheme is not None and has_embedding:
        scheme = replace(scheme, has_embedding=True)
    with named_in(f"{argument} of {folder}"):
        return replace(model, quantization=scheme)
