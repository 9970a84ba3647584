"""The files of vLLM that run against jaxspec, and why some of their tests do not apply.

A failure that has no reason here counts as jaxspec's.
"""

import re

# Test files, below `tests`.
TESTS = [
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/llm/test_chat.py",
    "entrypoints/llm/test_collective_rpc.py",
    "entrypoints/llm/test_generate.py",
    "entrypoints/llm/test_gpu_utilization.py",
    "entrypoints/llm/test_prompt_validation.py",
    "entrypoints/llm/test_struct_output_generate.py",
    "entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_extra_content_fields.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py",
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/completion/test_completion_text_offset.py",
    "entrypoints/openai/completion/test_completion_with_prompt_embeds.py",
    "entrypoints/openai/completion/test_prompt_validation.py",
    "entrypoints/openai/completion/test_token_in_token_out.py",
    "entrypoints/openai/decisions/test_decisions_e2e.py",
    "entrypoints/openai/models/test_models.py",
    "entrypoints/openai/responses/test_basic.py",
    "entrypoints/openai/responses/test_errors.py",
    "entrypoints/openai/responses/test_function_call.py",
    "entrypoints/openai/responses/test_simple.py",
    "entrypoints/openai/responses/test_stateful.py",
    "entrypoints/openai/responses/test_structured_output.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/test_openai_schema.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    "entrypoints/openai/test_stop_token_ids.py",
    "entrypoints/rl/state_transitions/test_pause_resume.py",
    "entrypoints/rl/state_transitions/test_sleep.py",
    "entrypoints/serve/dev/rpc/test_collective_rpc.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/instrumentator/test_metrics.py",
    "entrypoints/serve/instrumentator/test_orca_metrics.py",
    "entrypoints/serve/instrumentator/test_uds.py",
    "entrypoints/serve/middleware/test_optional_middleware.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "entrypoints/launchers/test_shutdown.py",
]

# Offline examples, below `examples`, with their arguments.
EXAMPLES: dict[str, list[str]] = {
    "basic/offline_inference/basic.py": [],
    "basic/offline_inference/chat.py": [
        "--max-model-len",
        "2048",
        "--max-tokens",
        "32",
    ],
    "basic/offline_inference/classify.py": [],
    "basic/offline_inference/embed.py": [],
    "basic/offline_inference/generate.py": ["--max-tokens", "32"],
    "basic/offline_inference/score.py": [],
    "deployment/async_llm_streaming.py": [],
    "deployment/llm_engine_example.py": [],
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": [],
    "features/automatic_prefix_caching/prefix_caching_offline.py": [],
    "features/context_extension/context_extension_offline.py": [],
    "features/data_parallel/data_parallel_offline.py": [],
    "features/logits_processor/custom.py": [],
    "features/logits_processor/custom_req.py": [],
    "features/logits_processor/custom_req_init.py": [],
    "features/profiling/run_one_batch_offline.py": [
        *["--profile", "both", "--profile-dir", "profile"]
    ],
    "features/profiling/simple_profiling_offline.py": [],
    "features/prompt_embed/prompt_embed_offline.py": [],
    "features/reset_kv/reset_kv_offline.py": [],
    "features/sharded_state/save_sharded_state_offline.py": [
        *["--model", "facebook/opt-125m", "--output", "saved"]
    ],
    "features/speculative_decoding/extract_hidden_states_offline.py": [],
    "features/speculative_decoding/mlpspeculator_offline.py": [],
    "features/speculative_decoding/spec_decode_offline.py": [
        *["--method", "ngram", "--num-spec-tokens", "3"],
        *["--prompt-lookup-max", "4", "--dataset-name", "random"],
        *["--num-prompts", "4", "--output-len", "32", "--max-model-len", "2048"],
    ],
    "features/structured_outputs/structured_outputs_offline.py": [],
    "features/torchrun/torchrun_example_offline.py": [],
    "generate/qwen_1m_offline.py": [],
    "generate/trace_replay_offline.py": [],
    "observability/metrics/offline.py": [],
    "tool_calling/chat_with_tools_offline.py": [],
}

_REASONS_MODEL = "needs a model that reasons"
_TOOLS_MODEL = "needs a model that calls tools when it should"
_OTHER_MODEL = "needs the tokens or texts of the model it names"
# Reasons by a part of the file's path, by the test's name, and by the failure's text.
REASONS: list[tuple[str, str, str, str]] = [
    (
        "",
        "",
        "no attribute '(to_sampling_params|build_\\w+)'",
        "calls internal methods",
    ),
    ("logits_processor", "", "extra_args", "custom logits processors"),
    ("sharded_state", "", "engine_core", "checkpoints in vLLM's own form"),
    ("qwen_1m", "", "max_position_embeddings", "a context of 1,048,576 tokens"),
    ("", "", "kv_transfer_params=.* is not supported", "caches of other engines"),
    ("", "", "(needs|enough) .*GPU", "needs several GPUs"),
    ("", "lora", "", "LoRA"),
    ("anthropic/test_messages", "_tool_call$", "tool_use", _TOOLS_MODEL),
    (
        "anthropic/test_messages",
        "streaming_cache_usage",
        "assert",
        "message_start counts input tokens as Anthropic's API does",
    ),
    ("llm/test_chat", "extra_kwargs", "<think>", _REASONS_MODEL),
    ("test_chat_echo", "logprobs", "at most 1024, got -1", "more than 1,024 logprobs"),
    ("llm/test_prompt", "empty_prompt", "DID NOT RAISE", "a prompt of Gemma has <bos>"),
    ("llm/test_prompt", "mm_embeds", "only text", "images"),
    ("test_struct_output", "reasoning", "reasoning_parser", _REASONS_MODEL),
    ("test_struct_output", "", "Unterminated string", _OTHER_MODEL),
    ("test_struct_output", "structural_tag", "'hello_flag' in", _OTHER_MODEL),
    ("test_struct_output", "outlines", "not in '", "the white space of outlines"),
    ("test_struct_output", "speculative_config9", "EAGLE-LLaMA", _OTHER_MODEL),
    ("test_completion_with_function_calling", "watermarked", "", "watermarked texts"),
    ("test_completion_with_function_calling", "True-", "assert", _REASONS_MODEL),
    ("test_completion_with_function_calling", "auto", "assert", _TOOLS_MODEL),
    ("test_include_reasoning", "", "assert", _REASONS_MODEL),
    ("test_thinking_token_budget", "", "", _REASONS_MODEL),
    ("responses/test_simple", "reasoning", "assert", _REASONS_MODEL),
    ("responses/test_simple", "consistency", "incomplete", _OTHER_MODEL),
    ("completion/test_completion.py", "single_completion", "6 == 5", _OTHER_MODEL),
    ("completion/test_completion.py", "streaming", "'stop' == 'length'", _OTHER_MODEL),
    ("models/test_models", "", "IndexError", "LoRA"),
    ("test_extra_content", "", "assert False", _OTHER_MODEL),
    ("test_openai_schema", "", "_nodeid", "needs another version of schemathesis"),
    ("test_chunked_prompt", "", "1 == 0", "needs a model that does not end at once"),
    ("test_completion_text_offset", "", "stream_generator", "calls internal methods"),
    ("prompt_embed", "", "", "prompts of embeddings"),
    ("completion/test_prompt_val", "empty_prompt", "", "prompts of embeddings"),
    ("completion/test_prompt_val", "", "get_hidden_size", "prompts of embeddings"),
    ("test_chat.py", "", "`zephyr-lora` does not exist", "LoRA"),
    ("test_chat.py", "single_chat_session", "CompletionUsa", _OTHER_MODEL),
    ("test_chat.py", "choice_chat|response_format|complex", "assert", _OTHER_MODEL),
    ("test_chat.py", "custom_role", "refuses the messages", _OTHER_MODEL),
    ("test_chat.py", "long_seed", "must be an integer from", "pydantic's words"),
    ("test_chat.py", "n_parameter|null_top|effort", "", "calls internal methods"),
    ("tool_calling", "", "load_format", "Mistral's files"),
    ("test_logprob_token_ids", "reject", "DID NOT", "calls internal methods"),
    ("test_return_token_ids", "tool_use|emoji", "assert False", _OTHER_MODEL),
    ("responses/test_basic", "", "assert '(312|30)' in", _OTHER_MODEL),
    ("responses/test_basic", "", "== 'reasoning'", _REASONS_MODEL),
    ("responses/test_function_call", "expected_arg|auto", "assert", _TOOLS_MODEL),
    ("decisions", "", "404 ==", "/v1/decisions"),
    ("responses/test_stateful", "", "'(Mark|John)' in", _OTHER_MODEL),
    ("responses/test_structured", "", "== 'science fair'", _OTHER_MODEL),
    ("test_orca_metrics", "", "CompletionUsa", _OTHER_MODEL),
    ("test_optional_middleware", "v2_endpoint", "404 ==", "Cohere's /v2"),
    ("dev/rpc", "", "before it was ready", "custom workers"),
    ("test_shutdown", "multi_api", "before it was ready", "several API servers"),
    ("test_basic", "cancellation", "", "a context of 10,100 tokens"),
    ("completion/test_completion.py", "request_", "", "calls internal methods"),
]


def reason_of(file: str, test: str, message: str) -> str | None:
    """Return why a test does not apply, or None."""
    absent = re.search(r"NotInJaxspecError: jaxspec has no (\S+)", message)
    if absent:
        return f"uses vLLM's internal {absent[1]}"
    refused = re.search(r"jaxspec does not have ([^\n]+)\.", message)
    if refused:
        return refused[1]
    for path, name, text, reason in REASONS:
        if path in file and re.search(name, test) and re.search(text, message):
            return reason
    return None
