"""Owns the numbers of a Gemma 2, and reads them from a config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    check_integer,
    check_number,
    wrong_argument,
)
from jaxspec.settings.model_config import (
    MASK_TOKEN,
    SIZES,
    ModelConfig,
    end_tokens,
    stored_dtype,
    stored_scheme,
)

# The defaults of the format, for keys that writers may leave out.
_DEFAULTS = {
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
# What a writer may put in the file, and the only value the model code computes.
_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,
}


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Gemma2Config(ModelConfig):
    """The numbers of one Gemma 2 network.

    Attributes:
        query_pre_attn_scalar: Queries are divided by the root of this.
        attn_logit_softcapping: Cap c of `c * tanh(x / c)` on scores; None for no cap.
        sliding_window: Tokens a local layer sees, the query's own included.
    """

    # A local layer and a global one.
    period: ClassVar[int] = 2

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    def __post_init__(self):
        ModelConfig.__post_init__(self)
        check_integer(ConfigError, "sliding_window", self.sliding_window, low=1)
        for name in ("query_pre_attn_scalar", "rms_norm_eps", "rope_theta"):
            check_number(ConfigError, name, getattr(self, name), low=0, open_low=True)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = getattr(self, name)
            if cap is not None:
                check_number(ConfigError, name, cap, low=0, open_low=True)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "Gemma2Config":
        """See `ModelConfig.from_hf`."""
        _check_variant(config)
        values = {ours: config[theirs] for theirs, ours in SIZES.items()}
        values |= {name: config.get(name, value) for name, value in _DEFAULTS.items()}
        for name, value in values.items():
            if isinstance(_DEFAULTS.get(name), float) and type(value) is int:
                values[name] = float(value) if value < 1e308 else math.inf
        return cls(
            **values,
            rope_theta=_rope_theta(config),
            eos_token_ids=end_tokens(config, generation or {}),
            mask_token_id=config.get(MASK_TOKEN),
            stored_dtype=stored_dtype(config),
            quantization=stored_scheme(config),
        )

    def window(self, layer: int) -> int | None:
        """Return how many tokens layer `layer` sees, None for all of them.

        Gemma 2 alternates: even layers are local, odd ones global.
        """
        return self.sliding_window if layer % 2 == 0 else None


def _check_variant(config: Mapping[str, Any]) -> None:
    missing = [name for name in SIZES if config.get(name) is None]
    if missing:
        raise ConfigError(
            f"A Gemma 2 config needs {', '.join(missing)}; given were "
            f"{', '.join(sorted(config))}.",
            parameter=missing[0],
        )
    for name, computed in _FIXED.items():
        if config.get(name, computed) not in (computed, None):
            hint = "The model code computes nothing else."
            raise wrong_argument(
                UnsupportedError, name, repr(computed), config[name], hint
            )
    expected = ["sliding_attention", "full_attention"]
    layers = config.get("layer_types") or []
    for layer, kind in enumerate(layers if isinstance(layers, list) else [layers]):
        if kind != expected[layer % 2]:
            name, allowed = f"layer_types[{layer}]", repr(expected[layer % 2])
            hint = "Even layers are local, odd ones global."
            raise wrong_argument(UnsupportedError, name, allowed, kind, hint)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Find the rotary base in both generations of the file's layout."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise wrong_argument(ConfigError, "rope_parameters", "an object", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        hint = "Gemma 2 was trained without scaling of positions."
        raise wrong_argument(UnsupportedError, "rope_type", "'default'", kind, hint)
    theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
    return check_number(ConfigError, "rope_theta", theta, low=0, open_low=True)
