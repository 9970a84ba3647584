"""Owns `EngineArgs`: users' arguments with vLLM's names, turned into an `EngineConfig`.

Knows nothing about devices: sizes that depend on them are those of a CPU here, and
`jaxspec.engine.memory.probe` replaces the ones that the user has not given.
"""

import argparse
import logging
import math
import os
import typing
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Self, no_type_check

from jaxspec import envs
from jaxspec.command_line import documented, flag_type, length_flag
from jaxspec.config.engine import (
    KV_CACHE_NAMES,
    MAX_LOGPROBS,
    EngineConfig,
    GivenSizes,
    ModelConfig,
)
from jaxspec.config.hosts import HostsConfig
from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.config.methods import DRAFT_MODEL, SOURCES_OF_DRAFTS, method_of
from jaxspec.config.quantization import check_quantization, quantize_model
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.structured_outputs import StructuredOutputsConfig
from jaxspec.config.trimming import kept_tokens
from jaxspec.engine.memory.plan import CPU_SIZES, with_cpu_pages
from jaxspec.engine.model_folders import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    model_folder,
    recommended_sampling,
)
from jaxspec.engine.program_folder import folder_at
from jaxspec.engine.speculative_args import (
    TYPICAL_REMOVED,
    merge_speculative_arguments,
)
from jaxspec.engine.vllm_arguments import (
    SHORT_FLAGS,
    VLLM_ENGINE_ARGUMENTS,
    VLLM_ENGINE_FLAGS,
    VllmArgument,
    check_vllm_arguments,
)
from jaxspec.errors import (
    ConfigError,
    RequestError,
    UnsupportedError,
    check_choice,
    check_flag,
    check_integer,
    is_secret,
    nearest,
    shown,
    wrong_argument,
)
from jaxspec.models.families import config_from_folder, family_of
from jaxspec.models.heads.config import HeadConfig, read_dummy, read_head
from jaxspec.sampling_params import SamplingParams
from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.heads import read_head_config

_log = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = 16
DEFAULT_MAX_MODEL_LEN = 8192
BUNDLED_DRAFT_TOKENS = 5
# Arguments that choose drafts: with one of them the bundled draft is not used.
_DRAFT_ARGUMENTS = ("speculative_config", "spec_model", "spec_method")
_DRAFT_ARGUMENTS += ("speculative_model",)

# First field of each argument group in the command line's help.
_FIRST_SPECULATIVE, _FIRST_OTHER = "speculative_config", "enable_log_requests"
_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "half": "bfloat16",
    "float16": "bfloat16",
}
# Arguments with few allowed values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors", "orbax", "gguf", "dummy"),
    "spec_decoding_acceptance_method": (None, "rejection_sampler"),
    "typical_acceptance_sampler_posterior_threshold": (None,),
    "typical_acceptance_sampler_posterior_alpha": (None,),
}
# Arguments whose other values were removed, and the reason.
_REMOVED = dict.fromkeys(
    [name for name in _ONLY if "acceptance" in name], TYPICAL_REMOVED
)

# vLLM's arguments that jaxspec does not have: scripts may set them to their defaults.
_VllmFields = make_dataclass(
    "_VllmFields",
    [
        (name, Any, field(default=argument.default, repr=False))
        for name, argument in VLLM_ENGINE_ARGUMENTS.items()
    ],
    kw_only=True,
)


def bundled_pair(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the bundled models, for users who name no model.

    Args:
        arguments: Arguments by name; only those that choose drafts are used.
    """
    if any(arguments[name] is not None for name in _DRAFT_ARGUMENTS):
        return {"model": BUNDLED_TARGET}
    pair: dict[str, Any] = {
        "model": BUNDLED_TARGET,
        "speculative_model": BUNDLED_DRAFT,
    }
    if arguments["num_speculative_tokens"] is None and arguments["spec_tokens"] is None:
        pair["num_speculative_tokens"] = BUNDLED_DRAFT_TOKENS
    return pair


# The tests do not check it with jaxtyping: its own checks have better errors.
@no_type_check
@dataclass(kw_only=True)
class EngineArgs(_VllmFields):
    """Arguments of the engine, with vLLM's names.

    vLLM's other arguments are in docs/vllm.md.

    Attributes:
        model: The target: a folder, a .gguf file, an id of the Hugging Face Hub (for a
            GGUF file with its type, owner/name:Q4_K_M), a Kaggle handle, or the name
            of a bundled model. Default: the bundled pair, or the bundled target if
            drafts are chosen.
        tokenizer: The same, for the tokenizer; the target's by default.
        revision: Branch, tag or commit of `model` on the Hugging Face Hub. The draft's
            is a key of `speculative_config`.
        tokenizer_revision: The same, for `tokenizer`.
        hf_token: Token for the Hugging Face Hub. Default: the one that its login saved.
        download_dir: Where downloads are kept, instead of the services' own caches.
        chat_template: Used in place of the model's: a Jinja template, or the path of
            a file with one.
        dtype: "auto" is bfloat16 where the device has it. "half" becomes bfloat16
            for Gemma 2, and is refused for Gemma 3, whose values exceed float16.
        quantization: Quantize the target's matrices while they are loaded: "int8" and
            "fp8" with a scale for each output, "int4" with one for each group of 128
            features. Default: as in the checkpoint. For a checkpoint that is quantized
            already, vLLM's name of its method ("compressed-tensors", "awq", "gptq") is
            accepted as well. It changes texts: see docs/quantization.md.
        served_model_name: Name of the model in the server's API; several are possible.
        seed: Seed for requests that have none of their own.
        quantize_embedding: Store the embedding, which is also the LM head, in int8, in
            models that are quantized.
        speculative_model_quantization: The same as `quantization`, for the draft model.
            It changes the speed, but no text.
        max_model_len: Default, also of -1: the context that the model was trained for,
            at most 8192.
        max_num_seqs: Maximum number of requests that run at once. Default: 256 on a TPU
            or GPU, or less if programs for 256 would leave little memory for pages; 8
            on a CPU.
        max_num_batched_tokens: Maximum number of prompt tokens prefilled in one step.
            Default: 2048 on a TPU or GPU, or less if memory is short; 512 on a CPU. A
            program for more than 2048 is compiled once that many tokens wait. At most
            128 with `batch_invariant`.
        block_size: Tokens per page of the KV memory.
        gpu_memory_utilization: Share of a device's memory that weights, programs and
            pages take together: pages get the memory that the others leave. Default:
            0.92. On a CPU the default is pages for `max_num_seqs` full sequences, at
            most 512 MiB, but at least for one sequence.
        kv_cache_memory_bytes: Bytes of each device for the pages of both models,
            instead of the rest of `gpu_memory_utilization`.
        num_gpu_blocks_override: Number of pages, instead of `gpu_memory_utilization`
            and `kv_cache_memory_bytes`. If layers with a sliding window keep only their
            window, a page holds either `block_size` tokens of these layers, or tokens
            of the other layers: `block_size` in Gemma 2, five times that in Gemma 3.
        kv_cache_dtype: Type of the keys and values of all models: "auto" is the type of
            the weights; "int8", with a scale for each token and head, and "fp8" (or
            "fp8_e4m3"), without scales, take half of bfloat16's memory. They change
            texts: see docs/quantization.md.
        tensor_parallel_size: Devices that share a copy of the target.
        data_parallel_size: Number of engines, each with its own models and pages on
            `tensor_parallel_size` devices; a request goes to the least loaded. Used by
            `LLM`, `AsyncLLMEngine` and the server.
        nnodes: Hosts that share a copy of the target, with one process on each, started
            with the same arguments; all their devices together are
            `tensor_parallel_size`.
        node_rank: Number of this process, from 0. Process 0 has the engine and the
            server; the others are `python -m jaxspec.serve --headless`.
        master_addr: Address of process 0, at which all processes reach it.
        master_port: Port of jax.distributed there; the next port is used as well.
        headless: Follow process 0, and serve no requests.
        hosts_secret_file: File with the same secret of 16 bytes or more on every host,
            with which the processes sign their messages.
        distributed_timeout_seconds: Seconds that the processes wait for each other at
            the start. Default: 300.
        enable_prefix_caching: Reuse the pages of prompts that begin alike (default).
        disable_hybrid_kv_cache_manager: Keep the keys and values of all tokens in all
            layers. By default, layers with a sliding window keep only their window:
            more and longer sequences fit, and texts are the same. If
            `num_gpu_blocks_override` is too small for that, all layers keep all tokens
            by default, and an explicit false is an error.
        speculative_draft_tensor_parallel_size: Devices that share a copy of the draft
            model. Default: all of the target's, or fewer if an estimate shows that
            fewer are clearly faster and leave most of the pages.
        scheduling_policy: "fcfs": first come, first served; "priority": lower
            `priority` first.
        max_logprobs: Maximum number of logprobs that a request may have per token; -1
            allows the whole vocabulary, if it is small.
        load_format: Format of the weights; "dummy": random weights for a config.json.
        skip_tokenizer_init: Read no tokenizer: prompts and outputs are token ids.
        generation_config: "auto" reads the model's recommended sampling parameters,
            "vllm" reads none, anything else is the folder to read them from.
        override_generation_config: Sampling parameters that take precedence over those
            of `generation_config`.
        disable_log_stats: Do not log statistics, and do not collect metrics.
        compilation_cache_dir: Folder that keeps compiled programs between runs, also
            in a bucket (gs://...); "auto" is `jaxspec` in the user's cache folder, None
            keeps none.
        batch_invariant: Decode in programs of one width, so that a request's logits
            depend neither on its drafts nor on other requests, also on a TPU or GPU
            (on a CPU they never do). Slower: see docs/lossless.md.
            VLLM_BATCH_INVARIANT=1 in the environment turns it on as well.
        num_scheduler_steps: Maximum number of rounds of one launch, in a loop on the
            device. A launch has several rounds only if no request waits and all running
            requests return only their final output. They take 30 ms at most, and end
            with the first round that ends a sequence.
        scan_layers: Compile one loop over each model's layers instead of every layer.
            Programs compile in about half the time; rounds may be slower, and are on a
            GPU or CPU. Texts are the same.
        structured_outputs_config: Defaults for structured outputs, with keys of
            `StructuredOutputsConfig`, e.g. disable_any_whitespace.
        kv_events_config: Publish which prefixes have pages, for gateways that route by
            them: keys of `KvEventsConfig`. Off, unless enable_kv_cache_events is true.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span for
            each request, such as http://localhost:4317. Needs the extra `otel`.
        speculative_config: How drafts are proposed, with keys of `SpeculativeConfig`:
            {"model": ..., "num_speculative_tokens": 5} for a draft model or a head, or
            {"method": "ngram", ...} or "suffix" for drafts from earlier text.
        spec_method: The key `method` of `speculative_config`.
        spec_model: The same as `speculative_model`.
        spec_tokens: The same as `num_speculative_tokens`.
        speculative_model: The draft model or head, named like `model`; or "[ngram]" for
            n-gram drafts.
        num_speculative_tokens: Maximum number of draft tokens per round.
        speculative_max_model_len: No drafts are made for longer sequences.
        speculative_disable_by_batch_size: No drafts are made while more requests run.
        spec_decoding_acceptance_method: The key `rejection_sample_method` of
            `speculative_config`, the rule by which drafts are accepted.
        ngram_prompt_lookup_max: Maximum length of a matching n-gram, in tokens.
        ngram_prompt_lookup_min: Minimum length of a matching n-gram, in tokens.
        typical_acceptance_sampler_posterior_threshold: Argument of older vLLM;
            setting it is an error.
        typical_acceptance_sampler_posterior_alpha: Argument of older vLLM;
            setting it is an error.
    """

    # None only until `__post_init__`.
    model: str = None  # pyright: ignore[reportAssignmentType]
    tokenizer: str | None = None
    chat_template: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    hf_token: bool | str | None = field(default=None, repr=False)
    download_dir: str | None = None
    served_model_name: str | list[str] | None = None
    dtype: str = "auto"
    quantization: str | None = None
    quantize_embedding: bool = False
    seed: int | None = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    headless: bool = False
    hosts_secret_file: str | None = None
    distributed_timeout_seconds: int | None = None
    enable_prefix_caching: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    scheduling_policy: str = "fcfs"
    max_logprobs: int = 20
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    disable_log_stats: bool = False
    compilation_cache_dir: str | None = "auto"
    batch_invariant: bool = False
    num_scheduler_steps: int = 1
    scan_layers: bool = False
    structured_outputs_config: dict[str, Any] | None = None
    kv_events_config: dict[str, Any] | None = None
    otlp_traces_endpoint: str | None = None

    # Three ways to configure speculation; see `jaxspec.engine.speculative_args`.
    speculative_config: dict[str, Any] | None = None
    spec_method: str | None = None
    spec_model: str | None = None
    spec_tokens: int | None = None
    speculative_model: str | None = None
    speculative_model_quantization: str | None = None
    num_speculative_tokens: int | None = None
    speculative_draft_tensor_parallel_size: int | None = None
    speculative_max_model_len: int | None = None
    speculative_disable_by_batch_size: int | None = None
    spec_decoding_acceptance_method: str | None = None
    ngram_prompt_lookup_max: int | None = None
    ngram_prompt_lookup_min: int | None = None
    typical_acceptance_sampler_posterior_threshold: float | None = None
    typical_acceptance_sampler_posterior_alpha: float | None = None

    def __new__(cls, **arguments: object):
        """Reject an unknown name, and suggest the nearest known one."""
        known = [item.name for item in fields(cls)]
        for name in sorted(arguments.keys() - set(known)):
            hint = nearest(name, known, f"see {cls.__name__}.")
            given_as = "" if is_secret(name) else f" (given {shown(arguments[name])})"
            raise ConfigError(
                f"{name}{given_as} is not an engine argument: {hint}",
                parameter=name,
                value=None if is_secret(name) else arguments[name],
            )
        return super().__new__(cls)

    def __post_init__(self):
        if self.model is None:
            for name, value in bundled_pair(vars(self)).items():
                setattr(self, name, value)
        for name, allowed in _ONLY.items():
            value = getattr(self, name)
            if value not in allowed:
                choices = " or ".join(repr(choice) for choice in allowed)
                hint = _REMOVED.get(name, "Anything else is not supported yet.")
                raise wrong_argument(UnsupportedError, name, choices, value, hint)
        check_vllm_arguments(VLLM_ENGINE_ARGUMENTS, vars(self))
        check_flag(ConfigError, "disable_log_stats", self.disable_log_stats)
        name = "data_parallel_size"
        check_integer(ConfigError, name, self.data_parallel_size, low=1)
        check_flag(ConfigError, "batch_invariant", self.batch_invariant)
        check_flag(ConfigError, "scan_layers", self.scan_layers)
        check_flag(ConfigError, "quantize_embedding", self.quantize_embedding)
        check_quantization("quantization", self.quantization)
        if self.enable_prefix_caching is not None:
            name = "enable_prefix_caching"
            check_flag(ConfigError, name, self.enable_prefix_caching)
        name = "disable_hybrid_kv_cache_manager"
        if self.disable_hybrid_kv_cache_manager is not None:
            check_flag(ConfigError, name, self.disable_hybrid_kv_cache_manager)
        check_choice(ConfigError, "dtype", self.dtype, tuple(_DTYPES))
        name = "kv_cache_dtype"
        check_choice(ConfigError, name, self.kv_cache_dtype, tuple(KV_CACHE_NAMES))

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field; return the parser.

        `--help` lists only the flags that have an effect.
        """
        add_vllm_flags(parser, VLLM_ENGINE_FLAGS)
        help_texts = documented(*cls.__mro__[:-1])
        group = parser.add_argument_group("model and engine")
        for item in fields(cls):
            if item.name in VLLM_ENGINE_ARGUMENTS:
                continue
            if item.name == _FIRST_SPECULATIVE:
                group = parser.add_argument_group("speculation")
            elif item.name == _FIRST_OTHER:
                title = "vLLM's flags without effect; docs/vllm.md lists more"
                group = parser.add_argument_group(title)
            default = None if item.default is MISSING else item.default
            options: dict[str, Any] = {"dest": item.name, "default": default}
            options["help"] = help_texts.get(item.name)
            members = typing.get_args(item.type) or (item.type,)
            if item.name == "served_model_name":
                options |= {"nargs": "+", "metavar": "NAME"}
            elif item.name == "hf_token":
                options |= {"nargs": "?", "const": True, "metavar": "TOKEN"}
            elif bool in members:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["metavar"] = item.name.rpartition("_")[2].upper()
                is_length = item.name == "max_model_len"
                options["type"] = length_flag if is_length else flag_type(item.type)
            group.add_argument(*flags_of(item.name), **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Make the arguments from a parsed command line with `add_cli_args` flags."""
        own = [item.name for item in fields(cls)]
        names = [one for one in own if one not in VLLM_ENGINE_ARGUMENTS]
        return cls(
            **{name: getattr(args, name) for name in (*names, *VLLM_ENGINE_FLAGS)}
        )

    def read_hosts(self) -> HostsConfig | None:
        """Return the settings of several hosts; None for a single host.

        Raises:
            ConfigError: The arguments contradict each other, or one is missing.
        """
        return HostsConfig.read(
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            master_addr=self.master_addr,
            master_port=self.master_port,
            headless=self.headless,
            hosts_secret_file=self.hosts_secret_file,
            distributed_timeout_seconds=self.distributed_timeout_seconds,
        )

    def create_engine_config(self) -> EngineConfig:
        """Read the model folders, fill in defaults, and check all arguments.

        Raises:
            ConfigError: Names the argument, its value and the allowed ones.
            NotImplementedError: The engine does not support a value.
        """
        self.__post_init__()
        no_effect = check_vllm_arguments(VLLM_ENGINE_ARGUMENTS, vars(self))
        if no_effect:
            _log.warning("Arguments without effect: %s", ", ".join(no_effect))
        folder = _fetched(self, self.model, "model", revision=self.revision)
        model = config_from_folder(folder)
        max_model_len = self.max_model_len
        if max_model_len is None or max_model_len == -1:
            max_model_len = min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
        sizes = {
            "max_model_len": max_model_len,
            "max_num_seqs": _or(self.max_num_seqs, CPU_SIZES.num_seqs),
            "block_size": _or(self.block_size, DEFAULT_PAGE_SIZE),
            "tensor_parallel_size": self.tensor_parallel_size,
        }
        for name, value in sizes.items():
            check_integer(ConfigError, name, value, low=1)
        speculative, draft, head, draft_devices = _speculative(self, max_model_len)
        model, draft = _without_pads(model, draft)
        if head is not None:
            head = head.without_pads(model, family_of(model).layout.pad_rows)
        model = replace(model, scan_layers=self.scan_layers)
        if draft is not None:
            draft = replace(draft, scan_layers=self.scan_layers)
        model, draft = _quantized(self, model, draft, head, speculative)
        draft_token_ids = None
        if draft is not None and speculative is not None:
            is_dummy = self.load_format == "dummy"
            draft_token_ids = kept_tokens(speculative, model, draft, is_dummy=is_dummy)
            if draft_token_ids is not None:
                draft = replace(draft, draft_vocab_size=len(draft_token_ids))
        num_pages = self.num_gpu_blocks_override
        if num_pages is None:
            # Enough for any sequence; `with_cpu_pages` sets the default below.
            num_pages = 2 * math.ceil(max_model_len / sizes["block_size"])
        elif self.max_num_seqs is None and isinstance(num_pages, int):
            sizes["max_num_seqs"] = max(min(CPU_SIZES.num_seqs, num_pages), 1)
        # Arguments that are not set below are passed unchanged.
        values: dict[str, Any] = _passed_on(self, EngineConfig)
        values |= dict(
            model=str(folder),
            tokenizer=str(_tokenizer_folder(self, folder)),
            served_model_name=_served_name(self),
            dtype=_checked_dtype(self.dtype, model, draft),
            kv_cache_dtype=KV_CACHE_NAMES[self.kv_cache_dtype],
            max_model_len=max_model_len,
            max_num_seqs=sizes["max_num_seqs"],
            max_num_batched_tokens=_or(
                self.max_num_batched_tokens, CPU_SIZES.num_batched_tokens
            ),
            page_size=sizes["block_size"],
            num_pages=num_pages,
            batch_invariant=self.batch_invariant or envs.VLLM_BATCH_INVARIANT,
            given=GivenSizes(
                **_passed_on(self, GivenSizes),
                num_pages=self.num_gpu_blocks_override,
                draft_tensor_parallel_size=draft_devices,
            ),
            seed=_or(self.seed, 0),
            model_config=model,
            speculative=speculative,
            draft_model_config=draft,
            head_config=head,
            draft_token_ids=draft_token_ids,
            generation_defaults=_generation_defaults(self, folder),
            enable_prefix_caching=self.enable_prefix_caching is not False,
            max_logprobs=_max_logprobs(self.max_logprobs, model.vocab_size),
            compilation_cache_dir=_cache_dir(self.compilation_cache_dir),
            structured_outputs=StructuredOutputsConfig.read(
                self.structured_outputs_config
            ),
            kv_events=KvEventsConfig.read(self.kv_events_config),
            hosts=self.read_hosts(),
        )
        config = EngineConfig(**values)
        if self.num_gpu_blocks_override is None:
            config = with_cpu_pages(config)
        return config


@no_type_check
@dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """Arguments of the asynchronous engine: those of `EngineArgs`, and vLLM's own.

    Attributes:
        enable_log_requests: No effect: requests are not logged.
        disable_log_requests: No effect.
        engine_use_ray: No effect.
        max_log_len: No effect.
    """

    enable_log_requests: bool = False
    disable_log_requests: bool = True
    engine_use_ray: bool = False
    max_log_len: int | None = None


def engine_args(values: dict[str, Any]) -> AsyncEngineArgs:
    """Make the engine's arguments from flags that `add_cli_args` has added.

    Args:
        values: As argparse returns them; `model` is set in place.

    Raises:
        ConfigError: A value is invalid.
        UnsupportedError: A flag asks for an unsupported feature.
    """
    _choose_model(values)
    return AsyncEngineArgs.from_cli_args(argparse.Namespace(**values))


def _choose_model(values: dict[str, Any]) -> None:
    """Set `model`: the positional argument, the flag, or the bundled pair."""
    tag, name = values.get("model_tag"), values["model"]
    if tag is not None and name is not None and tag != name:
        allowed = f"left out, or equal to the positional argument {tag!r}"
        raise wrong_argument(ConfigError, "--model", allowed, name)
    values["model"] = tag or name
    if values["model"] is None:
        values |= bundled_pair(values)


def flags_of(name: str) -> list[str]:
    """Return the spellings of an argument's flag."""
    return ["--" + name.replace("_", "-"), *SHORT_FLAGS.get(name, ())]


def add_vllm_flags(
    parser: argparse.ArgumentParser, arguments: Mapping[str, VllmArgument]
) -> None:
    """Add flags for vLLM's arguments that jaxspec does not have, hidden in `--help`.

    A flag that the parser has already keeps its own meaning.
    """
    for name, argument in arguments.items():
        flags = [
            one for one in flags_of(name) if one not in parser._option_string_actions
        ]
        options: dict[str, Any] = {"dest": name, "default": argument.default}
        if argument.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif argument.kind is list:
            options["nargs"] = "+"
        else:
            options["type"] = flag_type(argument.kind)
        if flags and flags[0].startswith("--"):
            parser.add_argument(*flags, **options, help=argparse.SUPPRESS)


def _fetched(args: EngineArgs, name: object, argument: str, **options: Any) -> Path:
    options = {"weights": args.load_format != "dummy"} | options
    options |= {"token": args.hf_token, "cache_dir": args.download_dir}
    return model_folder(name, argument, **options)


def _tokenizer_folder(args: EngineArgs, folder: Path) -> Path:
    revision = args.tokenizer_revision
    is_own = args.tokenizer in (None, args.model)
    if is_own and revision in (None, args.revision):
        return folder
    name = args.model if is_own else args.tokenizer
    return _fetched(args, name, "tokenizer", revision=revision, weights=False)


def _passed_on(args: EngineArgs, record: Any) -> dict[str, Any]:
    """Return the arguments that are also fields of the dataclass `record`."""
    names = {item.name for item in fields(record)} - VLLM_ENGINE_ARGUMENTS.keys()
    return {
        item.name: getattr(args, item.name)
        for item in fields(args)
        if item.name in names
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _speculative(
    args: EngineArgs, max_model_len: int
) -> tuple[SpeculativeConfig | None, ModelConfig | None, HeadConfig | None, int | None]:
    """Return the speculation, draft model, head, and the number of draft devices.

    The number of devices is None unless the user has set it.
    """
    merged = merge_speculative_arguments(vars(args))
    if merged is None:
        return None, None, None, None
    draft = head = None
    if "model" in merged:
        draft, head = _read_draft(args, merged)
    if "num_speculative_tokens" not in merged:
        method = method_of(merged.get("method", DRAFT_MODEL))
        num_draft_tokens = method.default_draft_tokens
        if head is not None and head.max_draft_tokens:
            num_draft_tokens = min(num_draft_tokens, head.max_draft_tokens)
        merged["num_speculative_tokens"] = num_draft_tokens
        warnings.warn(
            f"num_speculative_tokens is not given: {num_draft_tokens} tokens are "
            "drafted per step.",
            UserWarning,
            stacklevel=4,
        )
    max_positions = None if draft is None else draft.max_position_embeddings
    longest = check_integer(
        ConfigError,
        "speculative_max_model_len",
        merged.get("max_model_len", max_positions or max_model_len),
        low=1,
        high=max_positions,
        hint=""
        if max_positions is None
        else "The upper end is the draft's max_position_embeddings.",
    )
    merged["max_model_len"] = min(longest, max_model_len)
    devices = merged.setdefault("draft_tensor_parallel_size", None)
    if devices is None:
        merged["draft_tensor_parallel_size"] = args.tensor_parallel_size
    return SpeculativeConfig(**merged), draft, head, devices


def _read_draft(
    args: EngineArgs, merged: dict[str, Any]
) -> tuple[ModelConfig | None, HeadConfig | None]:
    """Read the draft's folder; set `model`, and a head's `method` if missing.

    Raises:
        ConfigError: There is no such folder, or it has neither a model nor a head.
    """
    name, method = merged["model"], merged.get("method")
    is_head = method is not None and method_of(method).has_head
    argument = "speculative_model"
    revision = (args.speculative_config or {}).get("revision")
    try:
        folder = _fetched(args, name, argument, revision=revision)
    except ConfigError as error:
        if not is_head:
            raise
        message = f"{str(error).rstrip('.')}. {SOURCES_OF_DRAFTS}"
        raise ConfigError(message, parameter=argument, value=name) from error
    merged["model"] = str(folder)
    try:
        if not (is_head or (method is None and _is_head(folder))):
            return config_from_folder(folder), None
        has_files = args.load_format != "dummy" or any(folder.glob("*.safetensors"))
        head = read_head(folder)[0] if has_files else read_dummy(folder)
    except ConfigError as error:
        message = f"{argument} {name!r}: {str(error).rstrip('.')}. {SOURCES_OF_DRAFTS}"
        raise ConfigError(message, parameter=argument, value=name) from error
    merged.setdefault("method", head.kind)
    return None, head


def _is_head(folder: Path) -> bool:
    try:
        read_head_config(folder)
    except CheckpointError:
        return False
    return True


def _without_pads(
    model: ModelConfig, draft: ModelConfig | None
) -> tuple[ModelConfig, ModelConfig | None]:
    """Drop padding rows that only one of two otherwise equal vocabularies has.

    A larger difference than exporters' padding means another vocabulary, which
    `EngineConfig` rejects. `read_tokenizer` rejects a vocabulary that has lost rows
    with pieces.
    """
    pad_rows = family_of(model).layout.pad_rows
    if draft is None or abs(model.vocab_size - draft.vocab_size) > pad_rows:
        return model, draft
    vocab_size = min(model.vocab_size, draft.vocab_size)
    return replace(model, vocab_size=vocab_size), replace(draft, vocab_size=vocab_size)


def _quantized(
    args: EngineArgs,
    model: ModelConfig,
    draft: ModelConfig | None,
    head: HeadConfig | None,
    speculative: SpeculativeConfig | None,
) -> tuple[ModelConfig, ModelConfig | None]:
    """Return both models with the quantization of the user or their checkpoints.

    Raises:
        ConfigError: A checkpoint is quantized already, groups do not divide its
            matrices, or `quantize_embedding` is set and no model is quantized.
        NotImplementedError: Quantization of a head.
    """
    kind = None if speculative is None else speculative.quantization
    name = "speculative_model_quantization"
    has_embedding = args.quantize_embedding
    model = quantize_model(
        model,
        args.quantization,
        has_embedding=has_embedding,
        argument="quantization",
        folder=args.model,
    )
    if draft is not None:
        draft = quantize_model(
            draft,
            kind,
            has_embedding=has_embedding,
            argument=name,
            folder=str(speculative and speculative.model),
        )
    elif head is not None and kind is not None:
        hint = "A head is much smaller than its target, and is never quantized."
        raise wrong_argument(UnsupportedError, name, "None for a head", kind, hint)
    schemes = [one.quantization for one in (model, draft) if one is not None]
    if has_embedding and not any(schemes):
        hint = (
            f"quantize_embedding needs quantization or {name}: neither model is "
            "quantized."
        )
        raise wrong_argument(ConfigError, "quantize_embedding", "False", True, hint)
    return model, draft


def _checked_dtype(dtype: str, model: ModelConfig, draft: ModelConfig | None) -> str:
    if dtype in ("half", "float16"):
        for model_config in filter(None, (model, draft)):
            if model_config.float16_error is not None:
                allowed = "'auto', 'bfloat16' or 'float32'"
                raise wrong_argument(
                    ConfigError, "dtype", allowed, dtype, model_config.float16_error
                )
        warnings.warn(
            f"dtype={dtype!r} is taken as 'bfloat16': activations of {model.family} "
            "exceed the range of float16.",
            UserWarning,
            stacklevel=3,
        )
    return _DTYPES[dtype]


def _served_name(args: EngineArgs) -> str:
    name = args.served_model_name
    if isinstance(name, list):
        name = name[0] if name else None
    return name or args.model


# Recommended sampling is checked before the vocabulary is known.
_ANY_VOCAB_SIZE = 2**31 - 1


def _generation_defaults(args: EngineArgs, folder: Path) -> dict[str, Any]:
    source: Path | None = folder
    if args.generation_config == "vllm":
        source = None
    elif args.generation_config != "auto":
        name = args.generation_config
        source = _fetched(args, name, "generation_config", weights=False)
    recommended = recommended_sampling(source, args.override_generation_config)
    try:
        SamplingParams(**recommended).validate_for(_ANY_VOCAB_SIZE)
    except RequestError as error:
        place = "override_generation_config"
        if source is not None:
            place += f" and generation_config.json of {source}"
        raise ConfigError(
            f"{place}: {error}", parameter="generation_config", value=recommended
        ) from error
    return recommended


def _max_logprobs(max_logprobs: Any, vocab_size: int) -> int:
    if max_logprobs == -1 and vocab_size > MAX_LOGPROBS:
        raise wrong_argument(
            ConfigError,
            "max_logprobs",
            f"an integer from 0 to {MAX_LOGPROBS}",
            max_logprobs,
            f"-1 means all {vocab_size} tokens of this vocabulary, which every "
            "launch would copy to the host for every token.",
        )
    return vocab_size if max_logprobs == -1 else max_logprobs


def _cache_dir(given: str | None) -> str | None:
    if given is not None and given != "auto":
        folder_at(given)  # rejects an address that cannot be used
    if given != "auto":
        return given
    # The XDG base directory specification's variable and default.
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        _log.warning(
            "This user has no home directory, so compiled programs are not saved: set "
            "HOME, XDG_CACHE_HOME or compilation_cache_dir"
        )
        return None
    return str(Path(caches) / "jaxspec")
