"""The families of networks that there are: one entry each.

An entry names modules that reach jax instead of importing them: whoever reads configs
does without it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to one family.

    Attributes:
        network: Module with the functions of `jaxspec.models.network.Functions`.
    """

    network: str


# By the `model_type` of HuggingFace's config.json.
FAMILIES = {"gemma2": Family(network="jaxspec.models.gemma2.network")}
