"""Owns the engine's configuration: model sizes, engine sizes.

Everything here is frozen and checked when it is made; other code does not check it
again. Knows nothing about command lines, folders of model hubs or older argument names:
`jaxspec.engine.arg_utils` turns those into an `EngineConfig`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, no_type_check

from jaxspec.config.hosts import HostsConfig
from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.config.model import MASK_TOKEN, ModelConfig
from jaxspec.config.speculation import SYNTHETIC, SpeculativeConfig
from jaxspec.config.structured_outputs import StructuredOutputsConfig
from jaxspec.errors import (
    ConfigError,
    UnsupportedError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    wrong_argument,
)
from jaxspec_checkpoints import CheckpointError, files, model_files, read_config
from jaxspec_checkpoints.reading import GGUF

DTYPES = ("auto", "float32", "bfloat16")
# Types that keys and values may have in pages; with "auto" they have the type of the
# weights.
KV_INT8, KV_FP8 = "int8", "fp8"
KV_CACHE_DTYPES = ("auto", KV_INT8, KV_FP8)
# Accepted names, with vLLM's second name of fp8.
KV_CACHE_NAMES = {name: name for name in KV_CACHE_DTYPES} | {"fp8_e4m3": KV_FP8}
# Bytes per value, and bytes per scale. The values of one token and head share a scale.
_KV_BYTES = {KV_INT8: (1, 4), KV_FP8: (1, 0)}
SCHEDULING_POLICIES = ("fcfs", "priority")
MAX_PAGE_SIZE = 256
MAX_LOGPROBS = 1024  # per token: every launch copies them to the host
MAX_SCHEDULER_STEPS = 64  # a launch's result has room for all its rounds
_TILE = 32  # least prompt tokens of a launch
_DEFAULT_CHUNK = 2048  # most prompt tokens of a launch by default, on any device


def draft_hint(target: ModelConfig) -> str:
    """Return advice on which draft models fit a target."""
    return f"Choose a draft of the target's family. {target.draft_hint}".rstrip()


def kv_widths(kv_cache_dtype: str, dtype_bytes: int) -> tuple[int, int]:
    """Return the bytes of a value in the KV pages, and of a scale per token and head.

    Args:
        dtype_bytes: Bytes of a value of the weights.
    """
    return _KV_BYTES.get(kv_cache_dtype, (dtype_bytes, 0))


@no_type_check
@dataclass(frozen=True, kw_only=True)
class GivenSizes:
    """The sizes that the user has set; None if the engine chooses for the devices.

    Attributes:
        num_pages: `num_gpu_blocks_override`.
        gpu_memory_utilization: Share of a device's memory, in (0, 1], that weights,
            programs and pages may take together.
        kv_cache_memory_bytes: Bytes of one device for the pages of both models.
        draft_tensor_parallel_size: Devices that share a copy of the draft model.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    draft_tensor_parallel_size: int | None = None

    def __post_init__(self):
        name, share = "gpu_memory_utilization", self.gpu_memory_utilization
        if share is not None:
            hint = "It is a share of the device's memory: 0.9 is nine tenths."
            limits: Any = dict(low=0, high=1, open_low=True)
            check_number(ConfigError, name, share, **limits, hint=hint)
        name, size = "kv_cache_memory_bytes", self.kv_cache_memory_bytes
        if size is not None:
            check_integer(ConfigError, name, size, low=1)


@no_type_check
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine.

    Fields that are not listed here are arguments of the engine: `EngineArgs` documents
    them under the same names, with their defaults.

    Attributes:
        model: Folder of the target model.
        data_parallel_rank: Number of this engine among `data_parallel_size`, from 0.
        num_pages: Pages of the pool that target and draft share; with `unit_pages`,
            units of that number of pages.
        given: The sizes that the user has set. The others have defaults for a CPU until
            `jaxspec.engine.memory.probe` replaces them. None: all sizes are the user's.
        head_config: `HeadConfig` of a head (`jaxspec.models.heads.config`), if there is
            one instead of a draft model.
        draft_token_ids: Ascending ids that a trimmed draft model may propose; None: all
            tokens.
        generation_defaults: Sampling parameters that the model folder recommends.
        compilation_cache_dir: Folder of compiled programs; None to save none.
        structured_outputs: Defaults for structured outputs.
        kv_events: Settings of KV events.
        hosts: Settings of a target over several processes; None for one process.
    """

    model: str
    tokenizer: str
    served_model_name: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    seed: int
    tensor_parallel_size: int
    chat_template: str | None
    load_format: str
    skip_tokenizer_init: bool
    disable_log_stats: bool
    compilation_cache_dir: str | None
    enable_prefix_caching: bool
    disable_hybrid_kv_cache_manager: bool | None
    scheduling_policy: str
    max_logprobs: int
    batch_invariant: bool
    num_scheduler_steps: int
    data_parallel_size: int
    kv_cache_dtype: str
    otlp_traces_endpoint: str | None
    model_config: ModelConfig
    data_parallel_rank: int = 0
    given: GivenSizes | None = None
    speculative: SpeculativeConfig | None = None
    draft_model_config: ModelConfig | None = None
    head_config: Any = None
    draft_token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    hosts: HostsConfig | None = None

    def __post_init__(self):
        check_choice(ConfigError, "dtype", self.dtype, DTYPES)
        name = "kv_cache_dtype"
        check_choice(ConfigError, name, self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_choice(
            ConfigError,
            "scheduling_policy",
            self.scheduling_policy,
            SCHEDULING_POLICIES,
        )
        flags = "batch_invariant", "enable_prefix_caching", "skip_tokenizer_init"
        for name in flags:
            check_flag(ConfigError, name, getattr(self, name))
        name = "disable_hybrid_kv_cache_manager"
        if self.disable_hybrid_kv_cache_manager is not None:
            check_flag(ConfigError, name, self.disable_hybrid_kv_cache_manager)
        check_integer(
            ConfigError, "max_logprobs", self.max_logprobs, low=0, high=MAX_LOGPROBS
        )
        check_integer(
            ConfigError,
            "num_scheduler_steps",
            self.num_scheduler_steps,
            low=1,
            high=MAX_SCHEDULER_STEPS,
        )
        check_integer(
            ConfigError,
            "max_model_len",
            self.max_model_len,
            low=1,
            high=self.model_config.max_position_embeddings,
            hint="The upper end is the model's max_position_embeddings.",
        )
        sizes = ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size")
        for name in (*sizes, "data_parallel_size"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not (isinstance(endpoint, str) and endpoint):
            name, allowed = "otlp_traces_endpoint", "the URL of a collector"
            raise wrong_argument(ConfigError, name, allowed, endpoint)
        assert 0 <= self.data_parallel_rank < self.data_parallel_size
        if self.hosts is not None and self.data_parallel_size > 1:
            hint = "Start a separate server, with its own hosts, for each engine."
            raise wrong_argument(
                ConfigError,
                "data_parallel_size",
                f"1 with nnodes={self.hosts.nnodes}",
                self.data_parallel_size,
                hint,
            )
        check_integer(ConfigError, "seed", self.seed, low=0, high=2**32 - 1)
        check_integer(
            ConfigError, "block_size", self.page_size, low=1, high=MAX_PAGE_SIZE
        )
        if self.page_size & (self.page_size - 1):
            allowed = f"a power of two from 1 to {MAX_PAGE_SIZE}"
            raise wrong_argument(ConfigError, "block_size", allowed, self.page_size)
        check_integer(
            ConfigError,
            "num_gpu_blocks_override",
            self.num_pages,
            low=self.units_per_seq,
            hint=f"One sequence of max_model_len={self.max_model_len} tokens takes "
            f"{self.units_per_seq} pages of {self.page_size} tokens; give more pages "
            "or a smaller max_model_len.",
        )
        if self.given is None or self.given.num_pages is not None:
            self.check_pages()
        self._check_draft()

    def check_pages(self) -> None:
        """Check that there are at least as many pages as sequences.

        Called once the number of pages is known.

        Raises:
            ConfigError: `max_num_seqs` is larger than the number of pages.
        """
        check_integer(
            ConfigError,
            "max_num_seqs",
            self.max_num_seqs,
            low=1,
            high=self.num_pages,
            hint=f"There are {self.num_pages} pages of {self.page_size} tokens, and a "
            "sequence takes one at least: lower max_num_seqs, or raise "
            "num_gpu_blocks_override.",
        )

    def _check_draft(self) -> None:
        speculative = self.speculative
        has_model = speculative is not None and speculative.method_info.has_draft_model
        assert has_model == (self.draft_model_config is not None)
        has_head = speculative is not None and speculative.method_info.has_head
        assert has_head == (self.head_config is not None)
        draft, ids = self.draft_model_config, self.draft_token_ids
        assert (ids and len(ids)) == (draft and draft.draft_vocab_size)
        if speculative is not None:
            max_tokens = speculative.suffix_decoding_max_corpus_tokens
            if max_tokens and self.hosts is not None:
                name = "suffix_decoding_max_corpus_tokens"
                allowed = "0 with several hosts"
                raise wrong_argument(UnsupportedError, name, allowed, max_tokens)
            self._check_draft_devices(speculative)
            if self.head_config is not None:
                self._check_head(speculative)
        if speculative is None or self.draft_model_config is None:
            return
        target, draft = self.model_config, self.draft_model_config
        if target.vocab_size != draft.vocab_size:
            reason = ""
            if target.family != draft.family:
                families = f"{target.family} and {draft.family}"
                reason = f"{families} have different vocabularies. "
            raise ConfigError(
                "Target and draft must share one vocabulary: the target has "
                f"{target.vocab_size} tokens, the draft {draft.vocab_size}. {reason}"
                f"{draft_hint(target)}",
                parameter="speculative_model",
                value=speculative.model,
            )
        if (
            speculative.method_info.is_parallel
            and self.draft_model_config.mask_token_id is None
        ):
            raise ConfigError(
                f"method {speculative.method!r} needs a draft model that was trained "
                f"to propose several tokens in one pass: the config.json of "
                f"{speculative.model} names no {MASK_TOKEN}. `python -m jaxspec.train "
                "pard` makes one; 'draft_model' takes any model of the vocabulary.",
                parameter="speculative_model",
                value=speculative.model,
            )

    def _check_head(self, speculative: SpeculativeConfig) -> None:
        head = self.head_config
        if head.kind != speculative.method:
            hint = f"The folder {speculative.model} holds a head of that kind."
            raise wrong_argument(
                ConfigError, "method", repr(head.kind), speculative.method, hint
            )
        head.check_target(self.model_config, self.model)
        if head.max_draft_tokens is not None:
            speculative.check_levels(
                head.max_draft_tokens,
                f"The head in {speculative.model} ({head.kind!r}) was trained to "
                f"propose at most {head.max_draft_tokens} tokens in a row.",
            )

    def _check_draft_devices(self, speculative: SpeculativeConfig) -> None:
        draft_parallel = speculative.draft_tensor_parallel_size
        if self.tensor_parallel_size % draft_parallel:
            raise wrong_argument(
                ConfigError,
                "draft_tensor_parallel_size",
                f"a divisor of tensor_parallel_size={self.tensor_parallel_size}",
                draft_parallel,
            )

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return math.ceil(self.max_model_len / self.page_size)

    @functools.cached_property
    def local_window(self) -> int | None:
        """Tokens that layers with a sliding window keep; None if they keep all.

        The longest window of target and draft model: their local layers share pages.
        """
        return None if self._reason_to_keep_all else self._longest_window

    @property
    def kept_tokens(self) -> str:
        """A sentence for the log: the tokens whose keys and values layers keep."""
        if self.local_window is None:
            return f"All layers keep all tokens: {self._reason_to_keep_all}"
        return f"Layers with a sliding window keep only {self.local_window} tokens"

    @functools.cached_property
    def _reason_to_keep_all(self) -> str:
        """Why layers with a sliding window keep all tokens; "" if they do not."""
        num_local, is_off = (
            self.model_config.num_local_per_global,
            self.disable_hybrid_kv_cache_manager,
        )
        if is_off:
            return "disable_hybrid_kv_cache_manager=True"
        if not num_local:
            return "the model has only one kind of layers"
        window = self._longest_window
        if window >= self.max_model_len:
            return (
                f"max_model_len={self.max_model_len} is not more than the window of "
                f"{window} tokens"
            )
        given = self.given or GivenSizes()
        if is_off is None and isinstance(given.num_pages, int):
            num_tokens = given.max_num_batched_tokens or _DEFAULT_CHUNK
            least = math.ceil(self.pages_per_seq / num_local)
            least += self._most_local_pages(window, num_tokens)
            if given.num_pages < least:
                return (
                    f"num_gpu_blocks_override={given.num_pages} is less than the "
                    f"{least} pages that one sequence could take otherwise"
                )
        return ""

    @property
    def _longest_window(self) -> int:
        models = self.model_config, self.draft_model_config
        windows = [
            model.window(layer)
            for model in models
            if model is not None
            for layer in range(model.num_layers)
        ]
        return max(window for window in windows if window is not None)

    @property
    def unit_pages(self) -> int | None:
        """`PoolShape.unit_pages`, or None if all layers use one page table."""
        if self.local_window is None:
            return None
        return self.model_config.num_local_per_global

    @property
    def decode_local_pages(self) -> int:
        """Maximum number of local pages that a sequence keeps while it decodes.

        That is the window before its newest known token, and the drafts of two
        launches.
        """
        if self.local_window is None:
            return 0
        return self._local_pages(self.local_window, self._num_unread)

    @property
    def max_local_pages(self) -> int:
        """`most_local_pages` of the engine's own launches."""
        return self.most_local_pages(self.max_num_batched_tokens)

    def most_local_pages(self, num_batched_tokens: int) -> int:
        """Return the most local pages that a sequence needs at once.

        It may have more, for a draft model that has not read them, while there are
        enough.
        """
        if self.local_window is None:
            return 0
        return self._most_local_pages(self.local_window, num_batched_tokens)

    def _most_local_pages(self, window: int, num_batched_tokens: int) -> int:
        num_written = max(num_batched_tokens, _TILE, self._num_unread)
        return self._local_pages(window, num_written)

    @property
    def _num_unread(self) -> int:
        """Maximum number of tokens that two launches of decoding rows may write."""
        num_nodes = self.speculative.num_nodes if self.speculative else 0
        return 2 * self.num_scheduler_steps * (num_nodes + 1)

    def _local_pages(self, window: int, num_written: int) -> int:
        """Return the local pages for a window and the positions that are written."""
        num_pages = math.ceil((window + num_written) / self.page_size) + 2
        return min(num_pages, self.pages_per_seq)

    @property
    def num_kv_tokens(self) -> int:
        """Total tokens of the sequences of maximum length that fit the pool."""
        if self.unit_pages is None:
            return self.num_pages * self.page_size
        num_local = min(self.pages_per_seq, self.decode_local_pages)
        units = math.ceil(self.pages_per_seq / self.unit_pages) + num_local
        return self.num_pages * self.max_model_len // units

    @property
    def units_per_seq(self) -> int:
        """Number of units that the longest sequence needs; without units, of pages."""
        num_global = math.ceil(self.pages_per_seq / (self.unit_pages or 1))
        return num_global + self.max_local_pages

    @property
    def num_logprobs(self) -> int:
        """Number of most likely tokens that a launch with logprobs returns."""
        return min(self.max_logprobs, self.model_config.vocab_size)

    @property
    def is_synthetic(self) -> bool:
        """Whether drafts are accepted at random (benchmarks): texts are meaningless."""
        speculative = self.speculative
        if speculative is None:
            return False
        return speculative.rejection_sample_method == SYNTHETIC

    @property
    def max_draft_tokens(self) -> int:
        """Maximum K, the number of levels of drafts; 0 without speculation."""
        return self.speculative.num_levels if self.speculative else 0


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `ConfigError` if the file has none."""
    try:
        return files.read_json(path)
    except CheckpointError as error:
        raise ConfigError(f"{error}.") from error


def read_generation_config(folder: str | Path) -> Mapping[str, Any]:
    """Return the folder's `generation_config.json`, empty if there is none.

    For a GGUF file, it is read from the metadata.
    """
    found = model_files(folder)
    path = found.get("generation_config.json")
    if path is None and GGUF in found:
        return read_config(folder)[1]
    return read_json(path) if path else {}


class ServedModel:
    """The properties of `llm.llm_engine.model_config` that scripts for vLLM read.

    Attributes:
        model: Folder of the model.
        tokenizer: Folder of the tokenizer.
        served_model_name: Name of the model in responses.
        dtype: "float32" or "bfloat16".
        max_model_len: Longest sequence, prompt and generated tokens together.
    """

    def __init__(self, config: EngineConfig):
        self._network = config.model_config
        self.model, self.tokenizer = config.model, config.tokenizer
        self.served_model_name, self.dtype = config.served_model_name, config.dtype
        self.seed, self.max_logprobs = config.seed, config.max_logprobs
        self.max_model_len = config.max_model_len

    def get_vocab_size(self) -> int:
        """Return the rows of the network's output, padding included."""
        return self._network.vocab_size

    def get_hidden_size(self) -> int:
        return self._network.hidden_size

    def get_head_size(self) -> int:
        return self._network.head_dim

    def get_sliding_window(self) -> int | None:
        """Return the window of local layers in tokens; None without local layers."""
        return getattr(self._network, "sliding_window", None)
