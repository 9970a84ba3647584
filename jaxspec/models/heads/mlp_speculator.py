"""The MLP speculator: a chain of stages, each over the stage before and a token.

The first looks at the target's last hidden state, normalised, and at the next token;
stage i proposes the token i + 1 places after that, from what the stage before it made
and the token that it proposed. References: Wertheimer et al. 2024, arXiv:2404.19124.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.heads.config import MlpSpeculatorConfig
from jaxspec.models.layers import mean_square
from jaxspec.models.params import Params, ParamSpec, Specs

_EPSILON = 1e-6  # of every norm; no config.json has another


def param_specs(config: MlpSpeculatorConfig) -> Specs:
    """Every parameter; tied stages share those of the first, the second for `proj`."""
    inner, specs = config.inner_size, Specs()
    vocab = (config.vocab_size, inner), ("vocab", "model")
    for stage in range(_num_own(config, "proj")):
        width = config.target_hidden_size if stage == 0 else inner
        _add(specs, "proj", stage, "weight", (inner, width), ("model", "model"))
    for stage in range(_num_own(config, "head")):
        _add(specs, "emb", stage, "weight", *vocab)
        _add(specs, "head", stage, "weight", *vocab)
        for name in ("weight", "bias"):
            _add(specs, "ln", stage, name, (inner,), ("model",))
    return specs


def _add(
    specs: Specs,
    part: str,
    stage: int,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> None:
    tensors = (f"{part}.{stage}.{name}",)
    specs[part, str(stage), name] = ParamSpec(shape=shape, axes=axes, tensors=tensors)


def _num_own(config: MlpSpeculatorConfig, part: str) -> int:
    """How many stages have parameters of their own."""
    if not config.is_tied:
        return config.num_stages
    return min(2 if part == "proj" else 1, config.num_stages)


def start(
    config: MlpSpeculatorConfig, rows: Float[Array, "row model"]
) -> Float[Array, "row model"]:
    """What the first stage is given of the target's normalised last hidden states."""
    if not config.scale_input:
        return rows
    return _normalise(rows) * 2**-0.5


def forward(
    config: MlpSpeculatorConfig,
    params: Params,
    stage: int,
    tokens: Int[Array, " row"],
    state: Float[Array, "row features"],
) -> Float[Array, "row inner"]:
    """One stage: its state, of the newest token and the state before."""

    def own(part: str) -> Params:
        return params[part][str(min(stage, _num_own(config, part) - 1))]

    # How much of the state is left after all stages is the same for any number of them.
    kept = 0.5 ** (0.5 / config.num_stages)
    added = math.sqrt((1 - kept**2) * (config.inner_size / 2))
    state = own("proj")["weight"].multiply(state)
    state += own("emb")["weight"].rows(tokens) * (added / kept)
    norm = own("ln")
    scale, shift = (norm[name].astype(jnp.float32)[None] for name in ("weight", "bias"))
    return jax.nn.gelu(_normalise(state) * scale + shift, approximate=False)


def logits(
    config: MlpSpeculatorConfig,
    params: Params,
    stage: int,
    state: Float[Array, "row inner"],
) -> Float[Array, "row vocab"]:
    """Logits of a stage's state."""
    number = min(stage, _num_own(config, "head") - 1)
    return params["head"][str(number)]["weight"].multiply(state)


def _normalise(rows: Float[Array, "row features"]) -> Float[Array, "row features"]:
    return rows * jax.lax.rsqrt(mean_square(rows) + _EPSILON)
