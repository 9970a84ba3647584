"""Owns a Gemma 2 network's numbers, and reads them from a checkpoint's config.json.

Knows nothing of the engine that runs the network.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, no_type_check

from jaxspec.errors import (
    ArgumentError,
    ConfigError,
    UnsupportedError,
    check_integer,
    check_number,
    wrong_argument,
)
from jaxspec_checkpoints import CheckpointError, read_config

# Sizes have no sensible default. The other keys of a Gemma 2 config.json have the
# defaults of the format, which writers may leave out.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_q_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
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


# No checks by jaxtyping in the tests: the class has its own, with better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The numbers of one Gemma 2 network.

    Attributes:
        query_pre_attn_scalar: Queries are divided by the root of this.
        attn_logit_softcapping: Cap c of `c * tanh(x / c)` on scores; None for no cap.
        sliding_window: Tokens a local layer sees, the query's own included.
        eos_token_ids: Any of these ends a text.
    """

    model_type: ClassVar[str] = "gemma2"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    sliding_window: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    pad_token_id: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool

    def __post_init__(self):
        for name in (*_SIZES.values(), "sliding_window", "max_position_embeddings"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        for name in ("query_pre_attn_scalar", "rms_norm_eps", "rope_theta"):
            check_number(ConfigError, name, getattr(self, name), low=0, open_low=True)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = getattr(self, name)
            if cap is not None:
                check_number(ConfigError, name, cap, low=0, open_low=True)
        for name in ("pad_token_id", "bos_token_id"):
            self._check_token_id(name, getattr(self, name))
        for token in self.eos_token_ids:
            self._check_token_id("eos_token_id", token)
        if self.num_q_heads % self.num_kv_heads:
            allowed = f"a multiple of num_key_value_heads={self.num_kv_heads}"
            raise wrong_argument(
                ConfigError, "num_attention_heads", allowed, self.num_q_heads
            )
        if self.head_dim % 2:
            allowed = "even, because rotary embeddings turn pairs"
            raise wrong_argument(ConfigError, "head_dim", allowed, self.head_dim)

    def _check_token_id(self, name: str, token: object) -> None:
        check_integer(ConfigError, name, token, low=0, high=self.vocab_size - 1)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read the content of a Hugging Face `config.json`.

        End tokens in `generation`, that of `generation_config.json`, are added.

        Raises:
            ConfigError: Another architecture, or a size is missing.
            NotImplementedError: A Gemma 2 variant that the model code does not compute.
        """
        _check_architecture(config)
        values = {ours: config[theirs] for theirs, ours in _SIZES.items()}
        values |= {name: config.get(name, value) for name, value in _DEFAULTS.items()}
        for name, value in values.items():
            if isinstance(_DEFAULTS.get(name), float) and type(value) is int:
                values[name] = float(value) if value < 1e308 else math.inf
        return cls(
            **values,
            rope_theta=_rope_theta(config),
            eos_token_ids=_end_tokens(config, generation or {}),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read the config of a model folder, in any format of checkpoint.

        Raises:
            ConfigError: There is none, or it is no Gemma 2's.
        """
        try:
            config, generation = read_config(folder)
        except CheckpointError as error:
            name = str(folder)
            raise ConfigError(str(error), parameter="model", value=name) from error
        try:
            return cls.from_hf(config, generation)
        except ArgumentError as error:
            raise type(error)(
                f"config.json of {folder}: {error}",
                parameter=error.parameter,
                value=error.value,
            ) from error

    def window(self, layer: int) -> int | None:
        """Return how many tokens layer `layer` sees, None for all of them.

        Gemma 2 alternates: even layers are local, odd ones global.
        """
        return self.sliding_window if layer % 2 == 0 else None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def _check_architecture(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type != "gemma2":
        allowed = "'gemma2', the one architecture of this engine"
        raise wrong_argument(ConfigError, "model_type", allowed, model_type)
    missing = [name for name in _SIZES if config.get(name) is None]
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


def _end_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Join the end tokens of both files: copies of one model differ in theirs."""
    tokens: list[Any] = []
    for source in (config, generation):
        given = source.get("eos_token_id")
        given = given if isinstance(given, list) else [given]
        tokens += [token for token in given if token is not None]
    first = [token for at, token in enumerate(tokens) if token not in tokens[:at]]
    # 1 is the format's default, for folders where neither file names one.
    return tuple(first) or (1,)
