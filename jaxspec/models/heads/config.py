"""The config of a head, read from its config.json, and the target it is for."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, no_type_check

from jaxspec.config.model import ModelConfig
from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    check_flag,
    check_integer,
    check_number,
    named_in,
    wrong_argument,
)
from jaxspec_checkpoints import CheckpointError, Tensor
from jaxspec_checkpoints.heads import (
    DFLASH,
    EAGLE,
    EAGLE3,
    MEDUSA,
    open_head,
    read_head_config,
)
from jaxspec_checkpoints.tensor import with_copies

# Layers of the target whose hidden states an EAGLE-3 head reads.
NUM_TARGET_LAYERS = 3


@no_type_check
@dataclass(frozen=True, kw_only=True)
class HeadConfig(ABC):
    """Base of the configs of heads.

    Attributes:
        target_hidden_size, vocab_size: Hidden size and vocabulary size of the target.
        draft_vocab_size: Tokens that the head can propose; fewer than the target's if
            the vocabulary is trimmed.
    """

    kind: ClassVar[str]
    # Whether the head's keys and values at a position depend on the token after it.
    reads_next_token: ClassVar[bool] = False

    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int

    def __post_init__(self):
        for name in ("target_hidden_size", "vocab_size"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        check_integer(
            ConfigError,
            "draft_vocab_size",
            self.draft_vocab_size,
            low=1,
            high=self.vocab_size,
        )

    @property
    def is_trimmed(self) -> bool:
        """Whether the head can propose only some of the target's tokens."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def max_draft_tokens(self) -> int | None:
        """Maximum number of drafts in a row that it can propose; None: no limit."""
        return None

    def kv_bytes_per_token(self, dtype_bytes: int, scale_bytes: int = 0) -> int:
        """See `ModelConfig.kv_bytes_per_token`."""
        return 0

    def describe(self) -> str:
        """Describe the head in one line."""
        description = f"{self.kind} head for hidden_size={self.target_hidden_size}"
        if self.is_trimmed:
            description += f", {self.draft_vocab_size:,} of {self.vocab_size:,} tokens"
        return description

    @classmethod
    @abstractmethod
    def from_file(
        cls, config: Mapping[str, Any], names: Collection[str]
    ) -> "HeadConfig":
        """Read the content of a `config.json`, of any writer.

        Args:
            names: Names of the folder's tensors: some properties are not in the file.

        Raises:
            ConfigError: A size is missing or not a positive integer.
            NotImplementedError: A variant that the network does not compute.
        """

    @abstractmethod
    def to_file(self) -> dict[str, Any]:
        """Return vLLM's `config.json` of such a head, without the target's name."""

    def without_pads(self, target: ModelConfig, pad_rows: int) -> "HeadConfig":
        """Leave out rows after the target's vocabulary.

        A head's `vocab_size` includes these rows if the target's file does: multimodal
        Gemma 3 has 64 rows after its vocabulary, for images and padding.

        Args:
            pad_rows: Maximum number of such rows (`Layout.pad_rows`).
        """
        vocab_size = target.vocab_size
        if not 0 < self.vocab_size - vocab_size <= pad_rows:
            return self
        draft_vocab_size = self.draft_vocab_size if self.is_trimmed else vocab_size
        return replace(self, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)

    def check_target(self, target: ModelConfig, name: str = "the target") -> None:
        """Reject a target that the head was not trained for.

        Args:
            name: Name of the target, for the error.

        Raises:
            ConfigError: The target's hidden size, vocabulary or layers differ.
        """
        for size, theirs in (
            ("target_hidden_size", target.hidden_size),
            ("vocab_size", target.vocab_size),
        ):
            ours = getattr(self, size)
            if ours != theirs:
                raise ConfigError(
                    f"This {self.kind} head is for another target: it has {size}="
                    f"{ours}, and {name} has {theirs}. A head works with the model "
                    "that it was trained for, and with no other.",
                    parameter=size,
                    value=ours,
                )


@no_type_check
@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """A head that is a Llama or Qwen3 decoder layer, with its own keys and values.

    Attributes:
        has_embedding: Whether it has its own token embeddings; else the target's.
        has_qk_norm: Whether queries and keys are normalized, as in Qwen3.
    """

    reads_next_token: ClassVar[bool] = True

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    has_embedding: bool = False
    has_qk_norm: bool = False
    max_position_embeddings: int = 8192

    def __post_init__(self):
        super().__post_init__()
        for name in (*_LAYER_SIZES.values(), "num_kv_heads", "head_dim"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        check_flag(ConfigError, "has_embedding", self.has_embedding)
        check_flag(ConfigError, "has_qk_norm", self.has_qk_norm)
        check_number(ConfigError, "rms_norm_eps", self.rms_norm_eps, low=0)
        check_number(ConfigError, "rope_theta", self.rope_theta, low=0, open_low=True)
        if self.num_q_heads % self.num_kv_heads:
            allowed = f"a multiple of num_key_value_heads={self.num_kv_heads}"
            raise wrong_argument(
                ConfigError, "num_attention_heads", allowed, self.num_q_heads
            )
        if not self.has_embedding and self.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"This {self.kind} head has no embed_tokens.weight, so it uses the "
                "target's embeddings: hidden_size must be "
                f"{self.target_hidden_size}, got {self.hidden_size}.",
                parameter="hidden_size",
                value=self.hidden_size,
            )

    def kv_bytes_per_token(self, dtype_bytes: int, scale_bytes: int = 0) -> int:
        """See `HeadConfig.kv_bytes_per_token`."""
        head_bytes = self.head_dim * dtype_bytes + scale_bytes
        return 2 * self.num_kv_heads * head_bytes

    def layer_to_file(self) -> dict[str, Any]:
        """Return the layer's sizes under the names of HuggingFace's Llama config."""
        layer = {theirs: getattr(self, ours) for theirs, ours in _LAYER_SIZES.items()}
        return layer | dict(
            model_type=_QWEN3 if self.has_qk_norm else _LLAMA,
            architectures=[
                "Qwen3ForCausalLM" if self.has_qk_norm else "LlamaForCausalLM"
            ],
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            num_hidden_layers=1,
            hidden_act="silu",
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            max_position_embeddings=self.max_position_embeddings,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
        )


def _check_shared_head(config: Any) -> None:
    """Reject a head that uses the target's output matrix, but has another width."""
    if config.has_lm_head or config.hidden_size == config.target_hidden_size:
        return
    raise ConfigError(
        f"This {config.kind} head has no lm_head.weight, so it uses the target's "
        f"output matrix: hidden_size must be {config.target_hidden_size}, got "
        f"{config.hidden_size}.",
        parameter="hidden_size",
        value=config.hidden_size,
    )


def _layer_from_file(
    config: Mapping[str, Any],
    names: Collection[str],
    *model_types: str,
    num_layers: int | None = 1,
) -> tuple[dict[str, Any], bool]:
    """Read a `config.json`'s layer, and whether the library speculators wrote it.

    Args:
        model_types: The supported kinds of layers, as `model_type` names them.
        num_layers: The supported number of layers; None for any.
    """
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, Mapping):
        allowed = "an object"
        raise wrong_argument(ConfigError, "transformer_layer_config", allowed, layer)
    is_speculators = layer is not config
    model_type = layer.get("model_type") or _LLAMA
    if model_type not in model_types:
        allowed = " or ".join(map(repr, model_types))
        raise wrong_argument(UnsupportedError, "model_type", allowed, model_type)
    fixed = _FIXED if num_layers is None else _FIXED | {"num_hidden_layers": num_layers}
    _refuse_variants(fixed, layer, config)
    if is_speculators:
        layer = _DEFAULT_SIZES[model_type] | dict(layer)
    _require(layer, *_LAYER_SIZES, "vocab_size")
    if num_layers is None:
        has_window = any(_windows(layer))
    else:
        has_window = False
        _layer_types(layer, num_layers, _FULL)
    values = {ours: layer[theirs] for theirs, ours in _LAYER_SIZES.items()}
    kv_heads = layer.get("num_key_value_heads") or layer["num_attention_heads"]
    width = layer["hidden_size"] // max(1, layer["num_attention_heads"])
    values |= dict(
        num_kv_heads=kv_heads,
        head_dim=layer.get("head_dim") or width,
        vocab_size=layer["vocab_size"],
        has_embedding="embed_tokens.weight" in names,
        has_qk_norm=model_type == _QWEN3,
        rms_norm_eps=check_number(
            ConfigError, "rms_norm_eps", layer.get("rms_norm_eps", 1e-6), low=0
        ),
        rope_theta=_rope_theta(layer, has_window),
        max_position_embeddings=layer.get("max_position_embeddings") or 8192,
    )
    return values, is_speculators


@no_type_check
@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """A layer over a token's embedding and the target's last hidden state.

    Attributes:
        has_bias: Whether the matrix that fuses the two has a bias.
    """

    kind: ClassVar[str] = EAGLE

    has_bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_flag(ConfigError, "has_bias", self.has_bias)
        if self.hidden_size != self.target_hidden_size:
            allowed = f"target_hidden_size={self.target_hidden_size}"
            hint = "The head's output replaces the target's hidden states."
            raise wrong_argument(
                ConfigError, "hidden_size", allowed, self.hidden_size, hint
            )
        if self.is_trimmed:
            allowed = f"vocab_size={self.vocab_size}"
            hint = "The head uses the target's output matrix."
            raise wrong_argument(
                ConfigError, "draft_vocab_size", allowed, self.draft_vocab_size, hint
            )

    @classmethod
    def from_file(
        cls, config: Mapping[str, Any], names: Collection[str]
    ) -> "EagleConfig":
        """See `HeadConfig.from_file`."""
        values, _ = _layer_from_file(config, names, _LLAMA)
        return cls(
            **values,
            draft_vocab_size=values["vocab_size"],
            target_hidden_size=values["hidden_size"],
            has_bias="fc.bias" in names or bool(config.get("fusion_bias")),
        )

    def to_file(self) -> dict[str, Any]:
        # `bias` is the key that the code of the EAGLE paper reads.
        return self.layer_to_file() | dict(bias=self.has_bias)


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """A layer over a token's embedding and fused hidden states.

    Attributes:
        target_layers: Numbers of target layers after which the residual stream is read;
            None if the file leaves it to the target's size.
        norm_before_residual: Whether the residual is the normalized hidden state.
        has_lm_head: Whether it has an output matrix of its own; else the target's.
    """

    kind: ClassVar[str] = EAGLE3

    target_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    has_lm_head: bool = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("norm_before_residual", "has_lm_head"):
            check_flag(ConfigError, name, getattr(self, name))
        if self.is_trimmed and not self.has_lm_head:
            raise ConfigError(
                f"This eagle3 head has draft_vocab_size={self.draft_vocab_size}, so it "
                "needs an lm_head of its own, but has none.",
                parameter="draft_vocab_size",
                value=self.draft_vocab_size,
            )
        _check_shared_head(self)
        if self.target_layers is not None and (
            len(self.target_layers) != NUM_TARGET_LAYERS
            or any(type(layer) is not int or layer < 0 for layer in self.target_layers)
        ):
            allowed = f"{NUM_TARGET_LAYERS} numbers of layers"
            raise wrong_argument(
                ConfigError, _LAYER_IDS, allowed, list(self.target_layers)
            )

    @classmethod
    def from_file(
        cls, config: Mapping[str, Any], names: Collection[str]
    ) -> "Eagle3Config":
        """See `HeadConfig.from_file`."""
        values, is_speculators = _layer_from_file(config, names, _LLAMA, _QWEN3)
        nested = config.get("eagle_config") or {}
        if isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False:
            raise UnsupportedError(
                "eagle_config.use_aux_hidden_state=false: the head reads no hidden "
                "states of target layers, but jaxspec's EAGLE-3 network needs those "
                "of three layers.",
                parameter="use_aux_hidden_state",
                value=False,
            )
        draft_vocab_size = config.get("draft_vocab_size") or values["vocab_size"]
        return cls(
            **values,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=config.get("target_hidden_size")
            or values["hidden_size"],
            target_layers=_target_layers(config),
            # If a config.json that the library speculators wrote has no such key, vLLM
            # assumes true.
            norm_before_residual=bool(
                config.get("norm_before_residual", is_speculators)
            ),
            has_lm_head="lm_head.weight" in names
            or draft_vocab_size != values["vocab_size"],
        )

    def to_file(self) -> dict[str, Any]:
        content: dict[str, Any] = dict(
            architectures=["Eagle3Speculator"],
            speculators_model_type=EAGLE3,
            transformer_layer_config=self.layer_to_file(),
            draft_vocab_size=self.draft_vocab_size,
            target_hidden_size=self.target_hidden_size,
            norm_before_residual=self.norm_before_residual,
        )
        if self.target_layers is not None:
            content[_LAYER_IDS] = list(self.target_layers)
        return content

    def to_specforge(self) -> dict[str, Any]:
        """Return the `config.json` that SpecForge writes and SGLang reads.

        Raises:
            NotImplementedError: The form has no key for a property of the head.
        """
        layers = self.target_layers
        if layers is not None and 0 in layers:
            hint = "The form numbers layers by their outputs; 0 is the embedding."
            allowed = "numbers of at least 1"
            raise wrong_argument(
                UnsupportedError, _LAYER_IDS, allowed, list(layers), hint
            )
        fixed = {"has_qk_norm": False, "norm_before_residual": False}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise wrong_argument(UnsupportedError, name, repr(value), not value)
        content = self.layer_to_file() | dict(
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=self.draft_vocab_size,
            target_hidden_size=self.target_hidden_size,
        )
        if layers is not None:
            # Layers count from 0 here: see `_target_layers`.
            numbers = [layer - 1 for layer in layers]
            content["eagle_config"] = {
                _LAYER_IDS: numbers,
                "use_aux_hidden_state": True,
            }
        return content

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return numbers of target layers after which the residual stream is read."""
        if self.target_layers is not None:
            return self.target_layers
        return default_layers(target.num_layers)

    def check_target(self, target: ModelConfig, name: str = "the target") -> None:
        """See `HeadConfig.check_target`."""
        super().check_target(target, name)
        layers = self.layers_of(target)
        if max(layers) > target.num_layers:
            raise ConfigError(
                f"This eagle3 head is for another target: it has {_LAYER_IDS}="
                f"{list(layers)}, and {name} has {target.num_layers} layers.",
                parameter=_LAYER_IDS,
                value=list(layers),
            )


_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Keys of the layer's sizes in config.json, and the fields of `LayerConfig` for them.
_LAYER_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_q_heads",
}
# Kinds of layers, as `model_type` names them, and their sizes in transformers. The
# library speculators writes only values that differ from these.
_LLAMA, _QWEN3 = "llama", "qwen3"
# Types of layers, as `layer_types` names them.
_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_SIZES = {
    _LLAMA: dict(
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        vocab_size=32000,
    ),
    _QWEN3: dict(
        hidden_size=4096,
        intermediate_size=22016,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        vocab_size=151936,
    ),
}
# Keys that change what the network computes, and the one supported value of each.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
    "layernorms": False,
}


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that vLLM and SGLang use by default: low, middle, high.

    If two of them would be the same, in a target of few layers, they are spaced evenly.
    """
    layers = 2, num_layers // 2, num_layers - 3
    if len(set(layers)) == len(layers) and min(layers) > 0:
        return layers
    low = min(1, num_layers - 1)
    return low, max(low, num_layers // 2), max(low, num_layers - 1)


def _target_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Read layer numbers as vLLM counts them: 1 means after the first layer.

    The numbers index `streams` of our networks, the residual streams; 0 is the
    embedding. HuggingFace's `hidden_states` have the same values, except for the last
    layer's: they are after the final norm, `streams` before it. The library speculators
    writes these numbers, at the top level. SpecForge and SafeAILab write
    `eagle_config`, which numbers the layers whose outputs are read from 0: its 1 is our
    2. SGLang adds one, too.
    """
    own = config.get(_LAYER_IDS)
    if own is not None:
        return _as_layers(own)
    nested = config.get("eagle_config") or {}
    named = nested.get(_LAYER_IDS) if isinstance(nested, Mapping) else None
    if named is None:
        return None
    return tuple(layer + 1 for layer in _as_layers(named))


def _as_layers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(
        type(one) is not int for one in value
    ):
        allowed = f"{NUM_TARGET_LAYERS} numbers of layers"
        raise wrong_argument(ConfigError, _LAYER_IDS, allowed, value)
    return tuple(value)


def _refuse_variants(fixed: Mapping[str, Any], *places: Mapping[str, Any]) -> None:
    """Reject other values than the supported ones, wherever a file has them."""
    for name, computed in fixed.items():
        value = next((place[name] for place in places if name in place), computed)
        if value not in (computed, None):
            hint = "This is the only value that the head's network supports."
            raise wrong_argument(UnsupportedError, name, repr(computed), value, hint)


def _rope_theta(layer: Mapping[str, Any], has_window: bool) -> float:
    """Return the rotary base of all layers.

    Args:
        has_window: Whether a layer has a sliding window.
    """
    name = "rope_parameters" if layer.get("rope_parameters") else "rope_scaling"
    rope = layer.get(name) or {}
    if not isinstance(rope, Mapping):
        raise wrong_argument(ConfigError, name, "an object", rope)
    theta = layer.get("rope_theta")
    if any(isinstance(one, Mapping) for one in rope.values()):
        # One entry per layer type. The library speculators uses this one in all layers.
        only = rope.get(_SLIDING)
        if not has_window or not isinstance(only, Mapping):
            allowed = f"one object for all layers, or have {_SLIDING!r} for a window"
            raise wrong_argument(UnsupportedError, name, allowed, rope)
        rope, theta = only, only.get("rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", None):
        hint = "Heads have no scaled positions."
        raise wrong_argument(UnsupportedError, "rope_type", "'default'", kind, hint)
    _refuse_variants({"partial_rotary_factor": 1.0}, rope)
    theta = theta or rope.get("rope_theta") or 10000.0
    return check_number(ConfigError, "rope_theta", theta, low=0, open_low=True)


def _layer_types(layer: Mapping[str, Any], count: int, *known: str) -> list[str]:
    """Return the type of each of `count` layers; all are in `known`."""
    types, hint = layer.get("layer_types"), ""
    has_window = layer.get("use_sliding_window") and layer.get("sliding_window")
    if types is None and has_window:
        hint = "use_sliding_window is true, so the file must name the layers' types."
    elif types is None:
        return [_FULL] * count
    allowed = f"a list of num_hidden_layers={count} of {' or '.join(map(repr, known))}"
    is_list = isinstance(types, list | tuple)
    if not is_list or len(types) != count:
        raise wrong_argument(ConfigError, "layer_types", allowed, types, hint)
    if any(one not in known for one in types):
        raise wrong_argument(UnsupportedError, "layer_types", allowed, types)
    return list(types)


def _require(config: Mapping[str, Any], *names: str) -> None:
    for name in names:
        check_integer(ConfigError, f"config.json: {name}", config.get(name), low=1)


@no_type_check
@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """One residual network for each position after the next token.

    Attributes:
        num_heads: Head i proposes the token i + 2 positions after the one whose hidden
            state it reads.
        num_blocks: Residual blocks of a head.
        has_bias: Whether their matrices have a bias.
        lm_heads: Number of own output matrices: one for each head, one for all, or
            none; then the target's is used.
    """

    kind: ClassVar[str] = MEDUSA

    num_heads: int
    num_blocks: int = 1
    has_bias: bool = False
    lm_heads: int = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_heads", "num_blocks"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        if self.lm_heads not in (0, 1, self.num_heads):
            allowed = f"0, 1 or num_heads={self.num_heads}"
            raise wrong_argument(ConfigError, "lm_heads", allowed, self.lm_heads)
        if self.is_trimmed and not self.lm_heads:
            raise ConfigError(
                f"This medusa head has truncated_vocab_size={self.draft_vocab_size}, "
                "so it needs an lm_head of its own, but has none.",
                parameter="truncated_vocab_size",
                value=self.draft_vocab_size,
            )

    @property
    def max_draft_tokens(self) -> int:
        """One draft per head."""
        return self.num_heads

    @classmethod
    def from_file(
        cls, config: Mapping[str, Any], names: Collection[str]
    ) -> "MedusaConfig":
        """See `HeadConfig.from_file`."""
        # vLLM, the library speculators and the code of the Medusa paper use different
        # keys.
        hidden: Any = config.get("hidden_size") or config.get("medusa_hidden_size")
        vocab: Any = config.get("vocab_size") or config.get("medusa_vocab_size")
        heads: Any = config.get("num_heads") or config.get("medusa_num_heads")
        is_own = "medusa_num_heads" in config
        blocks = config.get("num_hidden_layers") or config.get("medusa_num_layers") or 1
        lm_heads = heads if "lm_heads.0.weight" in names else 0
        if "lm_head.weight" in names:
            lm_heads = 1
        given = dict(hidden_size=hidden, vocab_size=vocab, num_heads=heads)
        _require(given, *given)
        return cls(
            target_hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=config.get("truncated_vocab_size") or vocab,
            num_heads=heads,
            num_blocks=blocks,
            has_bias=bool(config.get("medusa_fc_bias", is_own)),
            lm_heads=lm_heads,
        )

    def to_file(self) -> dict[str, Any]:
        return dict(
            architectures=["MedusaModel"],
            model_type=MEDUSA,
            hidden_size=self.target_hidden_size,
            vocab_size=self.vocab_size,
            truncated_vocab_size=self.draft_vocab_size,
            num_heads=self.num_heads,
            num_hidden_layers=self.num_blocks,
            medusa_fc_bias=self.has_bias,
            original_lm_head=self.lm_heads < 2,
        )


@no_type_check
@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """Layers that fill in a block of mask tokens, over the target's hidden states.

    Attributes:
        target_layers: Numbers of target layers after which the residual stream is read.
        block_size: Tokens of a block: the newest token, and one mask for each draft.
        mask_token_id: Token in the place of each draft.
        windows: For each layer, None if it sees the whole block and all tokens before
            it; or the tokens that a token sees, its own and earlier ones.
        num_target_layers: Number of the target's layers; None if the file has none.
        has_lm_head: Whether it has an output matrix of its own; else the target's.
        embedding_scale: Multiplies rows of the embedding.
        logit_soft_cap: With cap c, logits become `c * tanh(logit / c)`; None for none.
    """

    kind: ClassVar[str] = DFLASH
    reads_next_token: ClassVar[bool] = False

    target_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    windows: tuple[int | None, ...]
    num_target_layers: int | None = None
    has_lm_head: bool = False
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_integer(ConfigError, "block_size", self.block_size, low=2)
        most = self.vocab_size - 1
        check_integer(ConfigError, _MASK, self.mask_token_id, low=0, high=most)
        name, scale = "input_embedding_scale", self.embedding_scale
        check_number(ConfigError, name, scale, low=0, open_low=True)
        if self.num_target_layers is not None:
            name = "num_target_layers"
            check_integer(ConfigError, name, self.num_target_layers, low=1)
        if self.logit_soft_cap is not None:
            name = "final_logit_softcapping"
            check_number(ConfigError, name, self.logit_soft_cap, low=0, open_low=True)
        if self.is_trimmed and not self.has_lm_head:
            raise ConfigError(
                f"This dflash head has draft_vocab_size={self.draft_vocab_size}, so it "
                "needs an lm_head of its own, but has none.",
                parameter="draft_vocab_size",
                value=self.draft_vocab_size,
            )
        _check_shared_head(self)
        if not self.target_layers or min(self.target_layers) < 0:
            allowed = "numbers of layers"
            found = list(self.target_layers)
            raise wrong_argument(ConfigError, "target_layer_ids", allowed, found)

    @property
    def num_layers(self) -> int:
        """Number of the drafter's layers."""
        return len(self.windows)

    @property
    def max_draft_tokens(self) -> int:
        """All tokens of a block but the first, which is known."""
        return self.block_size - 1

    def kv_bytes_per_token(self, dtype_bytes: int, scale_bytes: int = 0) -> int:
        """See `HeadConfig.kv_bytes_per_token`."""
        return self.num_layers * super().kv_bytes_per_token(dtype_bytes, scale_bytes)

    @classmethod
    def from_file(
        cls, config: Mapping[str, Any], names: Collection[str]
    ) -> "DFlashConfig":
        """Read a file of z-lab and SpecForge, or of the library speculators.

        z-lab and SpecForge put some keys in `dflash_config`.
        """
        values, _ = _layer_from_file(config, names, _LLAMA, _QWEN3, num_layers=None)
        layer = config.get("transformer_layer_config", config)
        own = config.get("dflash_config") or {}
        if not isinstance(own, Mapping):
            raise wrong_argument(ConfigError, "dflash_config", "an object", own)
        windows = _windows(layer)
        fixed = _FIXED_DFLASH | {"attention_modes": ["gqa"] * len(windows)}
        if not any(windows):
            del fixed["sliding_window_non_causal"]
        _refuse_variants(fixed, own, config, layer)
        _check_causal(windows, own, config, layer)
        known = *_DFLASH_KEYS, *_CAUSAL, *_FIXED_DFLASH, "attention_modes"
        for name, value in own.items():
            if name not in known and value is not None:
                name, hint = f"dflash_config.{name}", "It may change the network."
                raise wrong_argument(UnsupportedError, name, "left out", value, hint)
        found: dict[str, Any] = {**layer, **config, **own}
        _require(found, "block_size")
        if found.get(_MASK) is None:
            hint = "The drafter reads this token in the place of each draft."
            place = f"{_MASK}, or dflash_config.{_MASK},"
            allowed = "the id of a token"
            raise wrong_argument(
                ConfigError, _MASK, allowed, None, hint, described_as=place
            )
        draft_vocab_size = found.get("draft_vocab_size") or values["vocab_size"]
        scale = found.get("input_embedding_scale")
        return cls(
            **values | dict(has_qk_norm=True),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=found.get("target_hidden_size") or values["hidden_size"],
            target_layers=_dflash_target_layers(config, own),
            block_size=found["block_size"],
            mask_token_id=found[_MASK],
            windows=windows,
            num_target_layers=found.get("num_target_layers"),
            has_lm_head="lm_head.weight" in names
            or draft_vocab_size != values["vocab_size"],
            embedding_scale=1.0 if scale is None else scale,
            logit_soft_cap=found.get("final_logit_softcapping") or None,
        )

    def to_file(self) -> dict[str, Any]:
        types = [_SLIDING if one else _FULL for one in self.windows]
        layer = self.layer_to_file() | dict(
            num_hidden_layers=self.num_layers,
            layer_types=types,
            sliding_window=next(filter(None, self.windows), None),
        )
        return dict(
            architectures=["DFlashDraftModel"],
            speculators_model_type=DFLASH,
            transformer_layer_config=layer,
            draft_vocab_size=self.draft_vocab_size,
            target_hidden_size=self.target_hidden_size,
            aux_hidden_state_layer_ids=list(self.target_layers),
            num_target_layers=self.num_target_layers,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            sliding_window_non_causal=False,
            dflash_config=dict(
                input_embedding_scale=self.embedding_scale,
                final_logit_softcapping=self.logit_soft_cap,
            ),
        )

    def check_target(self, target: ModelConfig, name: str = "the target") -> None:
        """See `HeadConfig.check_target`."""
        super().check_target(target, name)
        if self.num_target_layers not in (None, target.num_layers):
            raise ConfigError(
                f"This dflash head is for another target: it has num_target_layers="
                f"{self.num_target_layers}, and {name} has {target.num_layers} layers.",
                parameter="num_target_layers",
                value=self.num_target_layers,
            )
        if max(self.target_layers) > target.num_layers:
            raise ConfigError(
                "This dflash head is for another target: it reads hidden states after "
                f"layers {list(self.target_layers)} (counted from 1), and {name} has "
                f"{target.num_layers} layers.",
                parameter="target_layer_ids",
                value=list(self.target_layers),
            )


_MASK = "mask_token_id"
# Keys of DFlash and its variants, and the one supported value of each.
_FIXED_DFLASH: dict[str, Any] = {
    "projector_type": DFLASH,
    "shift_label": False,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "use_aux_hidden_state": True,
    "attention_mode": "gqa",
    "attention_sink_bias": False,
    "output_multiplier": 1.0,
    "use_swa": False,
    "is_neox_style": True,
    "causal_head": False,
}
# Other keys of `dflash_config`. The last two change nothing in this network: the text
# of the mask token, and a setting of another projector.
_DFLASH_KEYS = (
    _MASK,
    "target_layer_ids",
    "num_target_layers",
    "block_size",
    "input_embedding_scale",
    "final_logit_softcapping",
    "mask_token",
    "pure_draft_prefix_len",
)
_CAUSAL = "causal", "is_causal"


def _check_causal(windows: tuple[int | None, ...], *places: Mapping[str, Any]) -> None:
    """Reject `causal` if it is not what the layers' types imply.

    In the block, a layer with a sliding window sees only earlier tokens, others all.
    `causal` would apply to all layers.
    """
    causal = list({window is not None for window in windows})
    allowed = str(*causal).lower() if len(causal) == 1 else "left out"
    for name in _CAUSAL:
        for value in (place.get(name) for place in places):
            if value is not None and causal != [value]:
                hint = "Layers are causal if they have a sliding window, and only then."
                raise wrong_argument(UnsupportedError, name, allowed, value, hint)


def _dflash_target_layers(
    config: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[int, ...]:
    """Read layer numbers as vLLM counts them: see `_target_layers`.

    The library speculators writes these numbers. z-lab and SpecForge count layers from
    0, so their numbers are one lower.
    """
    name, counted_from_0 = "aux_hidden_state_layer_ids", "target_layer_ids"
    given = config.get(name)
    theirs = own.get(counted_from_0, config.get(counted_from_0))
    if given is None:
        return tuple(layer + 1 for layer in _as_numbers(counted_from_0, theirs))
    layers = _as_numbers(name, given)
    if theirs is not None:
        below = [layer - 1 for layer in layers]
        if list(_as_numbers(counted_from_0, theirs)) != below:
            allowed = f"{below}, one lower than {name}"
            raise wrong_argument(ConfigError, counted_from_0, allowed, theirs)
    return layers


def _as_numbers(name: str, layers: Any) -> tuple[int, ...]:
    is_list = isinstance(layers, list | tuple) and len(layers) > 0
    if not is_list or any(type(one) is not int or one < 0 for one in layers):
        hint = "They are the target's layers whose hidden states the drafter reads."
        allowed = "a list of layer numbers"
        raise wrong_argument(ConfigError, name, allowed, layers, hint)
    return tuple(layers)


def _windows(layer: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return `DFlashConfig.windows` of a file."""
    _require(layer, "num_hidden_layers")
    count = layer["num_hidden_layers"]
    types = _layer_types(layer, count, _FULL, _SLIDING)
    if _SLIDING not in types:
        return (None,) * count
    window = check_integer(
        ConfigError, "sliding_window", layer.get("sliding_window"), low=1
    )
    return tuple(window if one == _SLIDING else None for one in types)


CONFIGS: dict[str, type[HeadConfig]] = {
    config.kind: config
    for config in (EagleConfig, Eagle3Config, MedusaConfig, DFlashConfig)
}


def read_dummy(folder: str | Path) -> HeadConfig:
    """Read the head's config from a folder that has only a `config.json`.

    Properties that only tensors show are taken as absent: the head shares the target's
    matrices.

    Raises:
        ConfigError, NotImplementedError: As `read_head`.
    """
    try:
        kind, config = read_head_config(folder)
    except CheckpointError as error:
        raise ConfigError(str(error), parameter="model", value=str(folder)) from error
    return _config_from_file(kind, config, ())


def read_head(folder: str | Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Read a folder's head config and find its tensors; no weight is read.

    Raises:
        ConfigError: The folder holds no known head, or a size is missing.
        NotImplementedError: A variant that the network does not compute.
    """
    try:
        files = open_head(folder)
        tensors = dict(files.tensors)
        if files.kind == MEDUSA and files.config.get("original_lm_head"):
            _drop_copies(tensors)
        with named_in(f"config.json of {folder}"):
            return _config_from_file(files.kind, files.config, tensors), tensors
    except CheckpointError as error:
        raise ConfigError(str(error), parameter="model", value=str(folder)) from error


def _config_from_file(
    kind: str, config: Mapping[str, Any], names: Collection[str]
) -> HeadConfig:
    version = config.get("speculators_version")
    if version is not None and not re.match(r"0\.[1-9](\.|$)", str(version)):
        hint = "Later versions may change the network that a file describes."
        raise wrong_argument(
            UnsupportedError, "speculators_version", "'0.1' to '0.9'", version, hint
        )
    return CONFIGS[kind].from_file(config, names)


def _drop_copies(tensors: dict[str, Tensor]) -> None:
    """Keep one of the output matrices of a Medusa head, which are all the same.

    A shared matrix is `lm_head.weight`; some writers name it as the first of several.
    Reading the remaining matrix checks that they are equal.
    """
    names = [name for name in tensors if name.startswith("lm_heads.")]
    matrices = [tensors.pop(name) for name in sorted(names)]
    if "lm_head.weight" in tensors:
        matrices.insert(0, tensors["lm_head.weight"])
    if matrices:
        tensors["lm_head.weight"] = with_copies(matrices[0], matrices[1:])
