"""vLLM's arguments that jaxspec does not have, and what happens to each of them.

The names and defaults are those of vLLM 0.33.0 and of the older versions whose scripts
run here. `EngineArgs`, the command lines, `speculative_config`, their errors and
docs/vllm.md read these tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import UnsupportedError, shown, wrong_argument

# Each table maps a reason to arguments with vLLM's defaults. A type in place of a
# default means None, for an argument whose other values have this type.
_Subjects = Mapping[str, Mapping[str, Any]]

# Engine arguments that tune parts of vLLM and change no result.
_NO_EFFECT: _Subjects = {
    "jaxspec compiles every program with XLA": {
        "compilation_config": dict,
        "cudagraph_capture_sizes": list,
        "cudagraph_metrics": False,
        "enforce_eager": False,
        "jit_monitor_mode": "warn",
        "jit_monitor_verbose": False,
        "max_cudagraph_capture_size": int,
        "max_seq_len_to_capture": 8192,
        "optimization_level": 2,
        "performance_mode": "balanced",
    },
    "jaxspec chooses its own kernels": {
        "attention_backend": str,
        "attention_config": dict,
        "disable_cascade_attn": bool,
        "enable_flashinfer_autotune": bool,
        "gdn_prefill_backend": str,
        "ir_op_priority": dict,
        "kda_decode_backend": str,
        "kda_prefill_backend": str,
        "kernel_config": dict,
        "kv_sharing_fast_prefill": False,
        "linear_backend": "auto",
        "monokernel": False,
        "sparse_indexer_topk_backend": "auto",
        "use_fp64_gumbel": False,
    },
    "jaxspec has its own models and loader": {
        "additional_config": dict,
        "allow_deprecated_quantization": False,
        "code_revision": str,
        "ignore_patterns": list,
        "max_parallel_loading_workers": int,
        "model_impl": "auto",
        "model_loader_extra_config": dict,
        "pt_load_map_location": "cpu",
        "safetensors_load_strategy": str,
        "safetensors_prefetch_block_size": 16 * 2**20,
        "safetensors_prefetch_num_threads": 8,
        "tokenizer_mode": "auto",
        "trust_remote_code": False,
        "use_tqdm_on_load": True,
    },
    "jaxspec has no worker processes": {
        "aggregate_engine_logging": False,
        "cpu_distributed_timeout_seconds": int,
        "data_parallel_backend": "mp",
        "data_parallel_rpc_port": int,
        "disable_custom_all_reduce": False,
        "disable_nccl_for_dp_synchronization": bool,
        "distributed_executor_backend": str,
        "dp_sync_interval": 16,
        "enable_batch_sharded_sampling": bool,
        "enable_nccl_comm_suspend": False,
        "enable_shm_tensor_arena": False,
        "fail_on_environ_validation": False,
        "numa_bind": False,
        "numa_bind_cpus": list,
        "numa_bind_nodes": list,
        "ray_workers_use_nsight": False,
        "renderer_num_workers": 1,
        "watchdog_config": dict,
    },
    "jaxspec has its own scheduler": {
        "async_scheduling": bool,
        "disable_chunked_mm_input": False,
        "disable_logprobs_during_spec_decoding": bool,
        "enable_chunked_prefill": bool,
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "max_num_active_seqs": int,
        "max_num_scheduled_tokens": int,
        "num_lookahead_slots": 0,
        "prefill_schedule_interval": 1,
        "scheduler_reserve_full_isl": True,
        "speculative_disable_mqa_scorer": False,
        "use_v2_block_manager": True,
        "watermark": 0.0,
    },
    "jaxspec has its own prefix cache": {
        "prefix_cache_retention_interval": 0,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": int,
        "swa_bounded_replay": True,
        "swap_space": 4.0,
    },
    "an engine can always sleep": {
        "enable_cumem_allocator": False,
        "enable_sleep_mode": False,
        "sleep_mode_backend": "cumem",
        "sleep_mode_offload_cudagraph": False,
        "sleep_preserve_parameter_names": list,
    },
    "jaxspec has its own logs and metrics": {
        "enable_layerwise_nvtx_tracing": False,
        "enable_logging_iteration_details": False,
        "enable_mfu_metrics": False,
        "enable_mm_processor_stats": False,
        "kv_cache_metrics": False,
        "kv_cache_metrics_sample": 0.01,
        "log_config_file": str,
        "log_level": str,
        "logging_config": dict,
        "profiler_config": dict,
        "show_hidden_metrics_for_version": str,
    },
    "the models read only text": {
        "interleave_mm_strings": False,
        "language_model_only": False,
        "limit_mm_per_prompt": dict,
        "media_io_kwargs": dict,
        "mm_device_do_normalize": True,
        "mm_encoder_attn_backend": str,
        "mm_encoder_attn_dtype": str,
        "mm_encoder_fp8_scale_path": str,
        "mm_encoder_fp8_scale_save_margin": 1.5,
        "mm_encoder_fp8_scale_save_path": str,
        "mm_encoder_tp_mode": "weights",
        "mm_hasher_algorithm": "blake3",
        "mm_ipc_gpu_memory_gb": 0.0,
        "mm_processor_cache_gb": 4.0,
        "mm_processor_cache_type": "lru",
        "mm_processor_device": "auto",
        "mm_processor_kwargs": dict,
        "mm_shm_cache_max_object_size_mb": 128,
        "mm_tensor_ipc": "direct_rpc",
        "skip_mm_profiling": False,
        "video_pruning_method": "evs",
        "video_pruning_rate": float,
    },
    "the models have no experts": {
        "all2all_backend": "allgather_reducescatter",
        "enable_ep_weight_filter": False,
        "expert_placement_strategy": "linear",
        "moe_backend": "auto",
    },
    "the models have no Mamba layers": {
        "enable_mamba_cache_stochastic_rounding": False,
        "enable_mamba_shared_prefix_checkpoint": False,
        "mamba_backend": "triton",
        "mamba_block_size": int,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": str,
        "mamba_cache_philox_rounds": 0,
        "mamba_config": dict,
        "mamba_ssm_cache_dtype": "auto",
        "mamba_ssu_algorithm": str,
        "replayssm_buffer_len": 16,
        "use_replayssm": False,
    },
    "there are no LoRA adapters": {
        "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False,
        "enable_tower_connector_lora": False,
        "fully_sharded_loras": False,
        "lora_dtype": "auto",
        "lora_target_modules": list,
        "max_cpu_loras": int,
        "max_lora_cls_labels": int,
        "max_lora_rank": 16,
        "max_loras": 1,
        "specialize_active_lora": False,
    },
}

# vLLM's engine arguments that are flags of jaxspec's server.
_SERVER_SETTINGS = {
    "max_num_queued_reqs": int,
    "max_num_queued_tokens": int,
    "per_request_spec_decode_metrics": "none",
    "shutdown_timeout": 0,
}
# Engine arguments of features that jaxspec does not have.
_REFUSED: _Subjects = {
    "pipeline and context parallelism": {
        "cp_kv_cache_interleave_size": int,
        "dcp_comm_backend": str,
        "dcp_kv_cache_interleave_size": 1,
        "dcp_q_replicate": bool,
        "decode_context_parallel_size": 1,
        "enable_hc_sp": False,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    },
    "data parallelism over several servers": {
        "data_parallel_address": str,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_multi_port_external_lb": False,
        "data_parallel_rank": int,
        "data_parallel_size_local": int,
        "data_parallel_start_rank": int,
    },
    "mixture-of-experts models": {
        "dbo_decode_token_threshold": 32,
        "dbo_prefill_token_threshold": 512,
        "elastic_ep_max_dp_size": int,
        "enable_dbo": False,
        "enable_elastic_ep": False,
        "enable_eplb": False,
        "enable_expert_parallel": False,
        "enable_return_routed_experts": False,
        "eplb_config": dict,
        "ubatch_size": 0,
    },
    "a choice of devices: set CUDA_VISIBLE_DEVICES": {
        "device_ids": list,
    },
    "custom workers and schedulers": {
        "scheduler_cls": str,
        "worker_cls": "auto",
        "worker_extension_cls": "",
    },
    "offloading of weights or keys and values": {
        "cpu_offload_gb": 0.0,
        "cpu_offload_params": list,
        "kv_offloading_backend": "native",
        "kv_offloading_size": float,
        "offload_backend": "auto",
        "offload_group_size": 0,
        "offload_num_in_group": 1,
        "offload_params": list,
        "offload_prefetch_step": 1,
    },
    "transfers of weights or caches between engines": {
        "ec_manager_config": dict,
        "ec_transfer_config": dict,
        "kv_transfer_config": dict,
        "tokens_only": False,
        "weight_transfer_config": dict,
    },
    "recovery from failed devices": {
        "enable_fault_tolerance": False,
        "fault_tolerance_config": dict,
    },
    "logprobs of processed logits": {"logprobs_mode": "raw_logprobs"},
    "streams with several tokens per chunk": {"stream_interval": 1},
    "LoRA": {"default_mm_loras": dict, "enable_lora": False},
    "other architectures, or changes to a model's": {
        "config_format": "auto",
        "disable_sliding_window": False,
        "engram_config": dict,
        "hf_config_path": str,
        "hf_overrides": dict,
        "model_class_overrides": dict,
        "model_weights": "",
        "quantization_config": dict,
    },
    "other types of keys and values in some layers": {
        "kv_cache_dtype_skip_layers": list,
    },
    "custom logits processors": {"logits_processors": list},
    "pooling models": {
        "convert": "auto",
        "io_processor_plugin": str,
        "pooler_config": dict,
        "runner": "auto",
    },
    "images, audio and video": {
        "allowed_local_media_path": "",
        "allowed_media_domains": list,
        "enable_mm_embeds": False,
        "mm_encoder_only": False,
    },
    "prompts of embeddings": {"enable_prompt_embeds": False},
    "reasoning models": {
        "reasoning_config": dict,
        "reasoning_parser": "",
        "reasoning_parser_plugin": str,
    },
    "diffusion models": {"diffusion_config": dict},
    "watermarked texts": {"watermark_config": dict},
    "other outputs of a model": {
        "aux_output_config": dict,
        "enable_trace_replay": False,
        "return_sampling_mask": False,
    },
    "traces of parts of a request": {"collect_detailed_traces": list},
    "other buckets of histograms": {"custom_histogram_buckets": dict},
    "this in the engine: it is a flag of the server": _SERVER_SETTINGS,
}

# The same for the flags of vLLM's server.
_SERVER_NO_EFFECT: _Subjects = {
    "the models do not reason": {
        "anthropic_disabled_thinking_effort": "auto",
        "cohere_format": "cmd4",
        "cohere_is_reasoning_model": True,
    },
    "chat templates get texts": {"chat_template_content_format": "auto"},
    "jaxspec has its own logs": {
        "disable_access_log_for_endpoints": str,
        "enable_log_deltas": True,
        "enable_log_outputs": False,
        "log_error_stack": False,
    },
    "/docs loads nothing from other sites": {"enable_offline_docs": False},
    "the models generate text": {"enable_flash_late_interaction": True},
}
_SERVER_REFUSED: _Subjects = {
    "LoRA": {"lora_modules": list},
    "images, audio and video": {"trust_request_mm_kwargs": False},
    "defaults for chat templates": {
        "default_chat_template_kwargs": dict,
        "reasoning_effort_map": dict,
    },
    "stricter tool calls": {"tool_strict_level": str},
    "tools that the server runs": {"tool_server": str},
    "comments that keep a stream alive": {"sse_keep_alive_interval": 0},
    "other system fingerprints": {
        "fingerprint_mode": "full",
        "fingerprint_value": str,
    },
    "servers with several parts": {
        "data_parallel_supervisor_port": 9256,
        "dp_supervisor_probe_failure_threshold": 3,
        "dp_supervisor_probe_interval_s": 5.0,
        "dp_supervisor_probe_timeout_s": 5.0,
        "enable_scale_out": False,
    },
    "gRPC": {"grpc": False, "grpc_port": int},
    "these settings of TLS": {"enable_ssl_refresh": False, "ssl_ciphers": str},
    "custom middleware": {"middleware": list},
    "other limits of headers": {
        "h11_max_header_count": 256,
        "h11_max_incomplete_event_size": 4 * 2**20,
    },
}

# The same for the keys of `speculative_config`.
_KEYS_NO_EFFECT: _Subjects = {
    "jaxspec compiles every program with XLA": {"enforce_eager": bool},
    "jaxspec chooses its own kernels": {
        "attention_backend": str,
        "moe_backend": str,
        "use_local_argmax_reduction": False,
    },
    "jaxspec has its own models and loader": {
        "code_revision": str,
        "draft_load_config": dict,
    },
    "jaxspec has its own scheduler": {
        "disable_eagle_block_drop": False,
        "disable_logprobs": bool,
        "disable_lookahead_block_hashes": False,
        "disable_mqa_scorer": False,
        "disable_padded_drafter_batch": False,
    },
    "the models have no MTP layers": {"index_share_for_mtp_iteration": bool},
}
_KEYS_REFUSED: _Subjects = {
    "drafts from another vocabulary": {"use_heterogeneous_vocab": False},
    "a table of K by batch size, but adapts K itself": {
        "num_speculative_tokens_per_batch_size": list,
    },
    "quantization of the draft's LM head": {"draft_lm_head_quantization": str},
    "DSpark and XPress drafts": {
        "dspark_draft_topk": int,
        "enable_adaptive_verification": False,
        "xpress_topc": int,
    },
    "lossy acceptance": {
        "fly_entropy_threshold": 0.3,
        "fly_entropy_top_k": 3,
        "fly_window_size": int,
    },
    "configurations made of vLLM's own objects": {
        "draft_model_config": dict,
        "draft_parallel_config": dict,
        "target_model_config": dict,
        "target_parallel_config": dict,
    },
}

# Values accepted besides the default, because they name what jaxspec does anyway.
_ALSO_ALLOWED: dict[str, tuple[Any, ...]] = {
    "config_format": ("hf",),
    "convert": ("none",),
    "enable_chunked_prefill": (True,),
    "runner": ("generate",),
}
# Short spellings of flags.
SHORT_FLAGS = {
    "api_server_count": ("-asc",),
    "attention_config": ("-ac",),
    "compilation_config": ("-cc",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_backend": ("-dpb",),
    "data_parallel_external_lb": ("-dpe",),
    "data_parallel_hybrid_lb": ("-dph",),
    "data_parallel_multi_port_external_lb": ("-dpm",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_size": ("-dp",),
    "data_parallel_size_local": ("-dpl",),
    "data_parallel_start_rank": ("-dpr",),
    "decode_context_parallel_size": ("-dcp",),
    "diffusion_config": ("-dc",),
    "enable_expert_parallel": ("-ep",),
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
    "optimization_level": ("-O",),
    "pipeline_parallel_size": ("-pp",),
    "prefill_context_parallel_size": ("-pcp",),
    "quantization": ("-q",),
    "speculative_config": ("-sc",),
    "tensor_parallel_size": ("-tp",),
}


@dataclass(frozen=True, kw_only=True)
class VllmArgument:
    """An argument of vLLM that jaxspec does not have.

    Attributes:
        kind: Type of its values.
        default: vLLM's default; None for an empty list or dict too.
        is_refused: Other values are an error; otherwise they have no effect.
        reason: Why they have no effect, or the missing feature.
    """

    name: str
    kind: type
    default: Any
    is_refused: bool
    reason: str

    def is_default(self, value: object) -> bool:
        """Return whether a value is vLLM's default or names what jaxspec does."""
        is_empty = self.default is None and value in ({}, [], (), set())
        known = (None, self.default, *_ALSO_ALLOWED.get(self.name, ()))
        return is_empty or any(value == one for one in known)


def _arguments(no_effect: _Subjects, refused: _Subjects) -> dict[str, VllmArgument]:
    return {
        name: VllmArgument(
            name=name,
            kind=default if isinstance(default, type) else type(default),
            default=None if isinstance(default, type) else default,
            is_refused=is_refused,
            reason=reason,
        )
        for is_refused, subjects in ((False, no_effect), (True, refused))
        for reason, defaults in subjects.items()
        for name, default in defaults.items()
    }


VLLM_ENGINE_ARGUMENTS = _arguments(_NO_EFFECT, _REFUSED)
VLLM_ENGINE_FLAGS = {
    name: argument
    for name, argument in VLLM_ENGINE_ARGUMENTS.items()
    if name not in _SERVER_SETTINGS
}
VLLM_SERVER_FLAGS = _arguments(_SERVER_NO_EFFECT, _SERVER_REFUSED)
VLLM_SPECULATIVE_KEYS = _arguments(_KEYS_NO_EFFECT, _KEYS_REFUSED)


def check_vllm_arguments(
    arguments: Mapping[str, VllmArgument], given: Mapping[str, Any], place: str = "{}"
) -> list[str]:
    """Reject values that ask for features that jaxspec does not have.

    Args:
        arguments: One of the tables above.
        given: Values by name; other names are ignored.
        place: Format of an argument's name in messages.

    Returns:
        For each value without effect a text with the reason.

    Raises:
        UnsupportedError: A value is not allowed.
    """
    without_effect = []
    for name in arguments.keys() & given.keys():
        argument, value = arguments[name], given[name]
        if argument.is_default(value):
            continue
        called = place.format(name)
        if not argument.is_refused:
            text = f"{called}={shown(value)} ({argument.reason})"
            without_effect.append(text)
            continue
        allowed = (argument.default, *_ALSO_ALLOWED.get(name, ()))
        choices = " or ".join(map(repr, allowed))
        hint = f"jaxspec does not have {argument.reason}."
        raise wrong_argument(
            UnsupportedError, name, choices, value, hint, described_as=called
        )
    return sorted(without_effect)
