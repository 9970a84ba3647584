"""Sizes of a network that all model families have, as engine and memory plan need them.

A family's own values are in its subclass; `jaxspec.models.families` reads them. Knows
nothing about the engine that runs the network.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, no_type_check

from jaxspec.errors import ConfigError, check_flag, check_integer, wrong_argument
from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.packing import scheme_of
from jaxspec_checkpoints.quantization import FP8, INT8, MixedScheme, Scheme

# Sizes that every config.json must have: their names in the file and in `ModelConfig`.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_q_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
# Key of `mask_token_id` in a config.json: the name that AMD's models use, and vLLM.
MASK_TOKEN = "pard_token"


class KvLayer(NamedTuple):
    """Where the keys and values of one layer are.

    Attributes:
        array: Index of the layer's array of pages.
        is_local: The layer has a sliding window, and uses the local page table.
        offset: Added to the page ids of the table.
        divisor: Page ids of the table are divided by this.
    """

    array: int
    is_local: bool = False
    offset: int = 0
    divisor: int = 1


class KvArray(NamedTuple):
    """One array of pages.

    Attributes:
        num_turns: Parts of equal size, one for each iteration of the loop over layers.
        pages_per_unit: Pages that a part has for each unit of the pool.
    """

    num_turns: int = 1
    pages_per_unit: int = 1


class KvLayout(NamedTuple):
    """The arrays of pages of a model.

    Attributes:
        layers: The layers of one iteration of the loop, then the separate layers.
    """

    layers: tuple[KvLayer, ...]
    arrays: tuple[KvArray, ...]


# The tests do not check it with jaxtyping: its own checks have better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Configuration of a decoder with grouped-query attention.

    Attributes:
        eos_token_ids: Tokens that end a text.
        mask_token_id: Input token at the positions to propose, for a draft model that
            was trained to propose them in one pass (PARD); None for others.
        draft_vocab_size: Number of tokens that a draft model with a trimmed LM head can
            propose, which is the number of the head's rows; None: all tokens.
        stored_dtype: Type of the weights in their files; "" if unknown.
        scan_layers: Compile one loop over equal layers, instead of every layer;
            parameters and pages are laid out for it. Layers after the last whole period
            are compiled separately. Set by the engine, not by the model's files.
        quantization: Quantization of its matrices; None: they have the type of the
            activations.
    """

    # The family's name for users, and advice on which of its models can draft for
    # which.
    family: ClassVar[str] = "this model"
    draft_hint: ClassVar[str] = ""
    # Reason for which float16 is rejected. None: float16 is replaced by bfloat16, with
    # a warning.
    float16_error: ClassVar[str | None] = None

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    pad_token_id: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    scan_layers: bool = False
    stored_dtype: str = ""
    quantization: Scheme | MixedScheme | None = None

    def __post_init__(self):
        for name in (*SIZES.values(), "max_position_embeddings"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        for name in ("pad_token_id", "bos_token_id"):
            self._check_token_id(name, getattr(self, name))
        if self.mask_token_id is not None:
            self._check_token_id(MASK_TOKEN, self.mask_token_id)
        if self.draft_vocab_size is not None:
            name, most = "draft_vocab_size", self.vocab_size
            check_integer(ConfigError, name, self.draft_vocab_size, low=1, high=most)
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
        check_flag(ConfigError, "scan_layers", self.scan_layers)
        self._check_groups()

    def _check_groups(self) -> None:
        scheme = self.quantization
        if not isinstance(scheme, Scheme) or scheme.group_size is None:
            return  # the groups of a GGUF file always divide its matrices
        for features in (
            self.hidden_size,
            self.num_q_heads * self.head_dim,
            self.intermediate_size,
        ):
            if features % scheme.group_size:
                hint = (
                    f"Scales are shared by {scheme.group_size} features of a matrix, "
                    f"and this model has matrices of {features}."
                )
                allowed = f"{INT8!r} or {FP8!r}, which need no groups,"
                raise wrong_argument(
                    ConfigError, "quantization", allowed, scheme.kind, hint
                )

    def _check_token_id(self, name: str, token: object) -> None:
        check_integer(ConfigError, name, token, low=0, high=self.vocab_size - 1)

    @classmethod
    @abstractmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read the content of a HuggingFace `config.json` of the class's family.

        End tokens in `generation`, the content of `generation_config.json`, are added.

        Raises:
            ConfigError: A size is missing, or a value is not allowed.
            NotImplementedError: A variant that the family's network does not compute.
        """

    @property
    def period(self) -> int:
        """Number of layers per loop iteration: the period of the kinds of layers."""
        return 1

    @property
    def num_turns(self) -> int:
        """Number of iterations of the loop over layers; 0 without `scan_layers`."""
        return self.num_layers // self.period if self.scan_layers else 0

    @property
    def num_scanned(self) -> int:
        """Layers that the loop runs: the first ones, in whole periods."""
        return self.num_turns * self.period

    @property
    def layers_of_pools(self) -> tuple[int, ...]:
        """Number of layers that share each array of pages.

        Scanned layers of a kind share one; each other layer has its own.
        """
        shared = (self.num_turns,) * min(self.period, self.num_scanned)
        return shared + (1,) * (self.num_layers - self.num_scanned)

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that layer `layer` sees; None for all."""
        return None

    @property
    def num_local_per_global(self) -> int:
        """Layers with a sliding window for each layer without; 0 with one kind only."""
        layers = range(min(self.period, self.num_layers))
        num_local = sum(self.window(layer) is not None for layer in layers)
        num_global = len(layers) - num_local
        return max(num_local // num_global, 1) if num_local and num_global else 0

    def kv_layout(self, unit_pages: int | None) -> KvLayout:
        """Return the arrays of pages, and where each layer's pages are.

        Args:
            unit_pages: None: all layers use one page table, and none of the separate
                layers share an array. Otherwise the layers with a sliding window
                (local layers) use a table of their own: in each period of layers, every
                global layer shares its array with `unit_pages` local layers, and the
                local layers that remain have arrays of their own.
        """
        if unit_pages is None:
            arrays = tuple(map(KvArray, self.layers_of_pools))
            return KvLayout(tuple(map(KvLayer, range(len(arrays)))), arrays)
        is_scanned = self.num_turns > 0
        numbers = [*range(self.period)] if is_scanned else []
        numbers += range(self.num_scanned, self.num_layers)
        arrays, layers = list[KvArray](), dict[int, KvLayer]()
        for turn, group in itertools.groupby(numbers, lambda one: one // self.period):
            turns = self.num_turns if is_scanned and not turn else 1
            period, shared = list(group), list[int]()
            for number in period:
                if self.window(number) is None:
                    shared.append(len(arrays))
                    layers[number] = KvLayer(len(arrays))
                    arrays.append(KvArray(turns, unit_pages))
            local = [number for number in period if number not in layers]
            for index, number in enumerate(local):
                place, offset = divmod(index, unit_pages)
                if place < len(shared):
                    layers[number] = KvLayer(shared[place], True, offset)
                else:
                    layers[number] = KvLayer(len(arrays), True, 0, unit_pages)
                    arrays.append(KvArray(turns))
        return KvLayout(tuple(layers[number] for number in numbers), tuple(arrays))

    def kv_bytes_per_token(self, dtype_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of keys and values of one token in all layers.

        Args:
            dtype_bytes: Bytes of one value.
            scale_bytes: Bytes of the scale of a head's keys, or of its values.
        """
        head_bytes = self.head_dim * dtype_bytes + scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    def kv_unit_bytes(
        self, unit_pages: int | None, dtype_bytes: int, scale_bytes: int = 0
    ) -> int:
        """Return the bytes that a unit takes for each token of a page.

        Args:
            unit_pages: As for `kv_layout`.
            dtype_bytes, scale_bytes: As for `kv_bytes_per_token`.
        """
        num_pages = sum(
            array.num_turns * array.pages_per_unit
            for array in self.kv_layout(unit_pages).arrays
        )
        whole = self.kv_bytes_per_token(dtype_bytes, scale_bytes)
        return whole // self.num_layers * num_pages


def end_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the end tokens that either of the two files lists.

    Both are read because copies of one model list different end tokens in them.
    """
    tokens: list[Any] = []
    for source in (config, generation):
        given = source.get("eos_token_id")
        given = given if isinstance(given, list) else [given]
        tokens += [token for token in given if token is not None]
    first = [token for at, token in enumerate(tokens) if token not in tokens[:at]]
    # Token 1 is the default of HuggingFace's format, for folders in which neither file
    # names an end token.
    return tuple(first) or (1,)


def stored_dtype(config: Mapping[str, Any]) -> str:
    """Return the type of the weights in a config.json; "" if it is not supported."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in ("float32", "bfloat16", "float16") else ""


def stored_scheme(config: Mapping[str, Any]) -> Scheme | MixedScheme | None:
    """Return the quantization of a checkpoint's matrices, or None.

    Raises:
        ConfigError: The quantization is not supported.
    """
    try:
        return scheme_of(config)
    except CheckpointError as error:
        given = config.get("quantization_config")
        name = "quantization_config"
        raise ConfigError(f"{error}.", parameter=name, value=given) from error
