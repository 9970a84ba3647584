"""The quantization kinds that a user may select, and the models that support them.

The arithmetic is in `jaxspec_checkpoints.quantization`.
"""

from dataclasses import replace
from typing import Any

from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError, UnsupportedError, named_in, wrong_argument
from jaxspec_checkpoints.quantization import GGUF, METHODS, VALUE_TYPES, named_scheme

# Kinds to quantize to while loading, and vLLM's names of quantized checkpoints.
QUANTIZATIONS = (*VALUE_TYPES, *METHODS, GGUF)


def check_quantization(name: str, value: Any) -> None:
    """Reject an unknown quantization kind.

    Raises:
        NotImplementedError: The kind is not one of `QUANTIZATIONS`.
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
    """Return the model with the quantization of the user, or of its checkpoint.

    Args:
        kind: One of `QUANTIZATIONS`; None: that of the checkpoint.
        has_embedding: Store the embedding in int8 as well, if matrices are quantized.
        argument: Name of the argument, for errors.

    Raises:
        ConfigError: The checkpoint has another quantization already, or none, or groups
            do not divide its matrices.
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
