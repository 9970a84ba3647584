"""The config of a Gemma 2 or 3, read from a config.json."""

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

from jaxspec.config.model import (
    MASK_TOKEN,
    SIZES,
    ModelConfig,
    end_tokens,
    stored_dtype,
    stored_scheme,
)
from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    check_flag,
    check_integer,
    check_number,
    wrong_argument,
)
from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.gemma.published import GEMMA3

# The defaults of Gemma 2's format, for keys that writers may leave out.
_DEFAULTS: dict[str, Any] = {
    "query_pre_attn_scalar": 256.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
}
# Keys that a file may contain, and the only value that the model code computes.
_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1.0,
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Gemma 3's rotary bases if a file states none.
_THETAS = {_LOCAL: 10_000.0, _GLOBAL: 1_000_000.0}
# Gemma 3's layers repeat with this period: five local layers, then a global one.
_PERIOD = 6
_MAX_PERIOD = 1024


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of one kind of layers.

    Attributes:
        theta: Base of the rotary frequencies.
        factor: Positions are divided by this (linear scaling).
    """

    theta: float
    factor: float = 1.0

    @classmethod
    def read(cls, theta: object, factor: object = 1.0) -> "Rope":
        """Check the values of a file.

        Raises:
            ConfigError: A value is not a number above 0.
        """
        limits: Any = dict(low=0, open_low=True)
        return cls(
            theta=check_number(ConfigError, "rope_theta", theta, **limits),
            factor=check_number(ConfigError, "rope factor", factor, **limits),
        )


@no_type_check
@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ModelConfig, ABC):
    """The config of one Gemma network, of either generation.

    Attributes:
        query_pre_attn_scalar: Queries are divided by the root of this.
        attn_logit_softcapping: Cap c of `c * tanh(x / c)` on scores; None for no cap.
        final_logit_softcapping: Cap of the logits, likewise; None for no cap.
        sliding_window: Number of tokens that a local layer attends to, the query's own
            included.
        local_pattern: Whether each of the first layers is local; it repeats.
        local_rope, global_rope: Rotary embedding of local and of global layers.
        tie_word_embeddings: Whether the embedding is the LM head as well.
    """

    # Whether each head of queries and keys is normalized.
    has_qk_norm: ClassVar[bool]

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    sliding_window: int
    local_pattern: tuple[bool, ...]
    rms_norm_eps: float
    local_rope: Rope
    global_rope: Rope
    tie_word_embeddings: bool

    def __post_init__(self):
        ModelConfig.__post_init__(self)
        check_integer(ConfigError, "sliding_window", self.sliding_window, low=1)
        for name in ("query_pre_attn_scalar", "rms_norm_eps"):
            check_number(ConfigError, name, getattr(self, name), low=0, open_low=True)
        check_flag(ConfigError, "tie_word_embeddings", self.tie_word_embeddings)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = getattr(self, name)
            if cap is not None:
                check_number(ConfigError, name, cap, low=0, open_low=True)

    @property
    def period(self) -> int:
        """See `ModelConfig.period`."""
        return len(self.local_pattern)

    @property
    def rope_theta(self) -> float:
        """Rotary base of global layers."""
        return self.global_rope.theta

    def rope(self, layer: int) -> Rope:
        """Return the rotary embedding of layer `layer`."""
        return self.local_rope if self._is_local(layer) else self.global_rope

    def window(self, layer: int) -> int | None:
        """See `ModelConfig.window`."""
        return self.sliding_window if self._is_local(layer) else None

    def _is_local(self, layer: int) -> bool:
        return self.local_pattern[layer % self.period]


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """The config of one Gemma 2 network: local and global layers alternate."""

    has_qk_norm: ClassVar[bool] = False
    family: ClassVar[str] = "Gemma 2"
    draft_hint: ClassVar[str] = (
        "Of Gemma 2, these pairs work (target <- draft): 27b <- 9b, 27b <- 2b, "
        "9b <- 2b."
    )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "Gemma2Config":
        """See `ModelConfig.from_hf`."""
        missing = [name for name in SIZES if config.get(name) is None]
        if missing:
            raise ConfigError(
                f"A Gemma 2 config needs {', '.join(missing)}; it has only "
                f"{', '.join(sorted(config))}.",
                parameter=missing[0],
            )
        _check_fixed(config)
        _check_alternating(config)
        rope = _gemma2_rope(config)
        return cls(
            **_values(config, _DEFAULTS, generation or {}),
            local_pattern=(True, False),
            local_rope=rope,
            global_rope=rope,
        )


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """The config of the text network of one Gemma 3."""

    has_qk_norm: ClassVar[bool] = True
    family: ClassVar[str] = "Gemma 3"
    draft_hint: ClassVar[str] = (
        "Of Gemma 3, 270m and 1b draft for every larger model (target <- draft: "
        "27b <- 270m, 12b <- 1b), instruction-tuned for instruction-tuned."
    )
    float16_error: ClassVar[str | None] = (
        "Even in the smallest Gemma 3 model, hidden states exceed 65,504, the "
        "largest float16. Use 'bfloat16' or 'float32'."
    )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "Gemma3Config":
        """See `ModelConfig.from_hf`."""
        try:
            text = GEMMA3.text_config(config)
        except CheckpointError as error:
            name = "text_config"
            raise ConfigError(
                f"{error}.", parameter=name, value=config.get(name)
            ) from error
        _check_fixed(text)
        # Ignore a soft cap of attention scores, as transformers does for Gemma 3.
        text = {**text, "attn_logit_softcapping": None}
        caps = dict(final_logit_softcapping=None)
        # All other keys with defaults are in the text config.
        return cls(
            **_values(text, _DEFAULTS | caps, generation or {}),
            local_pattern=_local_pattern(text),
            local_rope=_gemma3_rope(text, _LOCAL),
            global_rope=_gemma3_rope(text, _GLOBAL),
        )


def _values(
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields that both generations read alike."""
    values = {ours: config[theirs] for theirs, ours in SIZES.items()}
    values |= {name: config.get(name, value) for name, value in defaults.items()}
    if values["tie_word_embeddings"] is None:  # as if left out
        values["tie_word_embeddings"] = _DEFAULTS["tie_word_embeddings"]
    for name, value in values.items():
        if isinstance(_DEFAULTS.get(name), float) and type(value) is int:
            values[name] = float(value) if value < 1e308 else math.inf
    return values | dict(
        eos_token_ids=end_tokens(config, generation),
        mask_token_id=config.get(MASK_TOKEN),
        stored_dtype=stored_dtype(config),
        quantization=stored_scheme(config),
    )


def _check_fixed(config: Mapping[str, Any]) -> None:
    for name, computed in _FIXED.items():
        if config.get(name, computed) not in (computed, None):
            hint = "The model code computes nothing else."
            if name == "use_bidirectional_attention":
                hint = (
                    "EmbeddingGemma and others with it make embeddings; they do not "
                    "generate text."
                )
            raise wrong_argument(
                UnsupportedError, name, repr(computed), config[name], hint
            )


def _check_alternating(config: Mapping[str, Any]) -> None:
    expected = [_LOCAL, _GLOBAL]
    layers = config.get("layer_types") or []
    for layer, kind in enumerate(layers if isinstance(layers, list) else [layers]):
        if kind != expected[layer % 2]:
            name, allowed = f"layer_types[{layer}]", repr(expected[layer % 2])
            hint = "Even layers are local, odd ones global."
            raise wrong_argument(UnsupportedError, name, allowed, kind, hint)


def _local_pattern(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers are local.

    The file has a list of the layers' kinds, or the period of global layers.
    """
    kinds, num_layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        names = "sliding_window_pattern", "_sliding_window_pattern"
        name = next((one for one in names if config.get(one) is not None), names[0])
        period = config.get(name, _PERIOD)
        check_integer(ConfigError, name, period, low=1, high=_MAX_PERIOD)
        return (True,) * (period - 1) + (False,)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        allowed = f"a list of num_hidden_layers={num_layers} kinds"
        raise wrong_argument(ConfigError, "layer_types", allowed, kinds)
    for layer, kind in enumerate(kinds):
        if kind not in (_LOCAL, _GLOBAL):
            name, allowed = f"layer_types[{layer}]", f"{_LOCAL!r} or {_GLOBAL!r}"
            raise wrong_argument(UnsupportedError, name, allowed, kind)
    local = tuple(kind == _LOCAL for kind in kinds)
    # Take the shortest repeating pattern. The layers of a small model may fit longer
    # patterns too.
    period = next(
        count
        for count in range(1, num_layers + 1)
        if all(local[layer] == local[layer % count] for layer in range(num_layers))
    )
    return local[:period]


def _gemma3_rope(config: Mapping[str, Any], kind: str) -> Rope:
    """Read the rotary embedding of one kind of layers, in either spelling."""
    rope_parameters = _mapping("rope_parameters", config.get("rope_parameters"))
    if rope_parameters and not rope_parameters.keys() & {_LOCAL, _GLOBAL}:
        allowed = f"an object with {_LOCAL!r} and {_GLOBAL!r}"
        raise wrong_argument(
            ConfigError, "rope_parameters", allowed, dict(rope_parameters)
        )
    kind_parameters = _scaling(f"rope_parameters[{kind!r}]", rope_parameters.get(kind))
    if kind == _GLOBAL and config.get("rope_scaling") is not None:
        kind_parameters |= _scaling("rope_scaling", config["rope_scaling"])
    outer = "rope_theta" if kind == _GLOBAL else "rope_local_base_freq"
    theta = _first(kind_parameters.get("rope_theta"), config.get(outer), _THETAS[kind])
    scaling = kind_parameters["rope_type"]
    has_factor = kind_parameters.get("factor") not in (None, 1, 1.0)
    if kind_parameters.keys() & {_LOCAL, _GLOBAL} or (
        scaling == "default" and has_factor
    ):
        allowed = "an object with 'rope_type' and 'factor'"
        hint = (
            "Set different values for kinds of layers in rope_parameters, under "
            f"{_LOCAL!r} and {_GLOBAL!r}."
        )
        raise wrong_argument(
            ConfigError, "rope_scaling", allowed, kind_parameters, hint
        )
    if scaling not in ("linear", "default"):
        hint = "Gemma 3 was trained with linear scaling of positions, or none."
        raise wrong_argument(
            UnsupportedError, "rope_type", "'linear' or 'default'", scaling, hint
        )
    return Rope.read(
        theta, kind_parameters.get("factor") if scaling == "linear" else 1.0
    )


def _first(*values: object) -> object:
    """Return the first value that is given."""
    return next(value for value in values if value is not None)


def _scaling(name: str, value: object) -> dict[str, Any]:
    """Return rotary parameters with `rope_type`, which older files call `type`."""
    given = _mapping(name, value)
    kind = given.get("rope_type") or given.get("type") or "default"
    return {**given, "rope_type": kind}


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong_argument(ConfigError, name, "an object", value)
    return value


def _gemma2_rope(config: Mapping[str, Any]) -> Rope:
    """Read the rotary base, from either layout that Gemma 2's files have used."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise wrong_argument(ConfigError, "rope_parameters", "an object", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        hint = "Gemma 2 was trained without scaling of positions."
        raise wrong_argument(UnsupportedError, "rope_type", "'default'", kind, hint)
    theta = _first(config.get("rope_theta"), rope.get("rope_theta"), 10000.0)
    return Rope.read(theta)
