import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.engine import EngineConfig, GivenSizes
from jaxspec.config.structured_outputs import StructuredOutputsConfig
from jaxspec.engine.arg_utils import (
    BUNDLED_DRAFT_TOKENS,
    AsyncEngineArgs,
    EngineArgs,
)
from jaxspec.engine.memory.plan import MAX_CPU_KV_BYTES
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.errors import ConfigError
from jaxspec.models.families import published_config
from jaxspec_checkpoints import bundled_target
from jaxspec_checkpoints.quantization import Scheme
from tests.support.model_configs import TINY, configure, write_config, write_model

# The tests replace this value by the folder of a draft model.
SMALL_DRAFT: dict[str, Any] = {"speculative_model": "", "num_speculative_tokens": 5}


@pytest.fixture
def target(tmp_path: Path) -> str:
    return write_model(tmp_path / "target")


@pytest.fixture
def draft(tmp_path: Path) -> str:
    return write_model(tmp_path / "draft", num_hidden_layers=2)


def test_defaults(target: str):
    config = configure(target)
    assert config.model == config.tokenizer == config.served_model_name == target
    assert config.dtype == "auto"
    assert config.max_model_len == 1024
    assert config.max_num_seqs == 8
    assert config.max_num_batched_tokens == 512
    assert config.page_size == 16
    assert config.num_pages == 8 * 1024 // 16
    assert config.given == GivenSizes()
    assert config.seed == 0
    assert config.tensor_parallel_size == 1
    assert config.enable_prefix_caching
    assert config.scheduling_policy == "fcfs"
    assert (config.max_logprobs, config.num_logprobs) == (20, 20)
    assert config.speculative is None
    assert config.draft_model_config is None


@pytest.mark.parametrize(
    ("given", "draft", "num_draft_tokens"),
    [
        ({}, BUNDLED_DRAFT, BUNDLED_DRAFT_TOKENS),
        ({"num_speculative_tokens": 2}, BUNDLED_DRAFT, 2),
        ({"spec_tokens": 2}, BUNDLED_DRAFT, 2),
        ({"spec_method": "ngram", "spec_tokens": 4}, None, 4),
    ],
)
def test_default_model_is_the_bundled_pair(
    given: dict[str, Any], draft: str | None, num_draft_tokens: int
):
    args = EngineArgs(**given)
    assert (args.model, args.speculative_model) == (BUNDLED_TARGET, draft)
    config = args.create_engine_config()
    assert config.speculative is not None
    assert config.speculative.num_levels == num_draft_tokens
    assert EngineArgs(model=BUNDLED_TARGET).speculative_model is None


def test_a_long_context_defaults_to_8192(tmp_path: Path):
    model = write_model(tmp_path / "long", max_position_embeddings=32768)
    assert configure(model).max_model_len == 8192
    assert configure(model, max_model_len=10_000).max_model_len == 10_000


def test_given_sizes_are_stored(target: str):
    config = configure(
        target,
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        block_size=8,
        num_gpu_blocks_override=50,
        seed=None,
        served_model_name=["name", "other"],
        disable_log_stats=True,
        compilation_cache_dir="cache",
    )
    assert config.max_model_len == 100
    assert config.max_num_seqs == 3
    assert config.max_num_batched_tokens == 64
    assert (config.page_size, config.num_pages) == (8, 50)
    assert config.seed == 0
    assert config.served_model_name == "name"
    assert config.disable_log_stats
    assert config.compilation_cache_dir == "cache"


def test_given_values_are_distinguished_from_defaults(target: str):
    config = configure(
        target,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=10**9,
        num_gpu_blocks_override=70,
    )
    assert config.given == GivenSizes(
        max_num_seqs=3,
        max_num_batched_tokens=64,
        num_pages=70,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=10**9,
    )


def test_few_pages_reduce_default_sequences(target: str):
    config = configure(target, num_gpu_blocks_override=5, max_model_len=64)
    assert (config.max_num_seqs, config.num_pages) == (5, 5)


def test_default_pages_hold_part_of_a_page(target: str):
    # 100 tokens fill six pages of 16 and begin a seventh.
    assert configure(target, max_model_len=100, max_num_seqs=3).num_pages == 21


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("bfloat16", 2), ("float32", 4), ("auto", 4)]
)
def test_default_pages_of_both_models_are_below_the_cap(
    tmp_path: Path, dtype: str, num_bytes: int
):
    large = {"num_hidden_layers": 26, "num_key_value_heads": 4, "head_dim": 256}
    target = write_model(tmp_path / "target", **large)
    draft = write_model(tmp_path / "draft", **large | {"num_hidden_layers": 13})
    config = configure(
        target,
        speculative_model=draft,
        num_speculative_tokens=3,
        dtype=dtype,
        max_num_seqs=64,
    )
    page_bytes = 16 * 2 * (26 + 13) * 4 * 256 * num_bytes
    assert config.num_pages == MAX_CPU_KV_BYTES // page_bytes
    assert config.num_pages < 64 * config.pages_per_seq


def test_default_pages_hold_one_sequence_even_above_the_cap(tmp_path: Path):
    huge = {"num_hidden_layers": 46, "num_key_value_heads": 16, "head_dim": 128}
    model = write_model(
        tmp_path / "huge",
        num_attention_heads=32,
        max_position_embeddings=8192,
        **huge,
    )
    assert configure(model).num_pages == 512


def test_all_generations_of_arguments_give_one_config(target: str, draft: str):
    configs = [
        configure(target, speculative_model=draft, num_speculative_tokens=3),
        configure(
            target, speculative_config={"model": draft, "num-speculative-tokens": 3}
        ),
        configure(target, spec_model=draft, spec_tokens=3, spec_method="draft_model"),
    ]
    assert configs[0] == configs[1] == configs[2]
    speculative = configs[0].speculative
    assert speculative is not None
    assert speculative.method == "draft_model"
    assert speculative.model == draft
    assert speculative.num_speculative_tokens == 3
    assert speculative.rejection_sample_method == "block"
    assert speculative.draft_sample_method == "probabilistic"
    assert speculative.disable_by_batch_size is None
    assert speculative.draft_tensor_parallel_size == 1
    assert configs[0].draft_model_config is not None
    assert configs[0].draft_model_config.num_layers == 2


def test_pard_requires_a_mask_token(target: str, tmp_path: Path):
    """AMD's key for the mask token is read. Without it, the model drafts one by one."""
    parallel = write_model(tmp_path / "parallel", num_hidden_layers=2, pard_token=3)
    keys: dict[str, Any] = {"model": parallel, "num_speculative_tokens": 12}
    config = configure(target, speculative_config=keys | {"parallel_drafting": True})
    assert config == configure(target, speculative_config=keys | {"method": "pard"})
    assert config.draft_model_config is not None
    assert config.draft_model_config.mask_token_id == 3
    assert config.num_draft_tokens == 12
    with pytest.raises(ConfigError, match="names no pard_token.*jaxspec.train pard"):
        configure(
            target,
            speculative_config=keys | {"method": "pard", "model": target},
        )
    outside = write_model(tmp_path / "outside", pard_token=TINY["vocab_size"])
    with pytest.raises(ConfigError, match="pard_token must be an integer from 0 to"):
        configure(target, speculative_config=keys | {"model": outside})


def test_scan_layers_applies_to_both_models(target: str, draft: str):
    options: dict[str, Any] = dict(speculative_model=draft, num_speculative_tokens=2)
    for scan_layers in (False, True):
        config = configure(target, scan_layers=scan_layers, **options)
        assert config.draft_model_config is not None
        assert config.model_config.scan_layers == scan_layers
        assert config.draft_model_config.scan_layers == scan_layers
    assert not configure(target).model_config.scan_layers


def test_a_draft_of_less_than_a_period_is_not_scanned(target: str, tmp_path: Path):
    single = write_model(tmp_path / "single", num_hidden_layers=1)
    options: dict[str, Any] = dict(speculative_model=single, num_speculative_tokens=2)
    config = configure(target, scan_layers=True, **options)
    assert config.draft_model_config is not None
    assert config.model_config.layers_of_pools == (2, 2)
    assert config.draft_model_config.layers_of_pools == (1,)


def test_dict_keys_are_passed_on(target: str, draft: str):
    config = configure(
        target,
        tensor_parallel_size=4,
        speculative_config={
            "model": draft,
            "num_speculative_tokens": 8,
            "rejection_sample_method": "standard",
            "draft_sample_method": "greedy",
            "disable_by_batch_size": 6,
            "draft_tensor_parallel_size": 2,
        },
    )
    speculative = config.speculative
    assert speculative is not None
    assert speculative.rejection_sample_method == "standard"
    assert speculative.draft_sample_method == "greedy"
    assert speculative.disable_by_batch_size == 6
    assert speculative.draft_tensor_parallel_size == 2
    assert config.given is not None
    assert config.given.draft_tensor_parallel_size == 2


def test_draft_has_the_targets_devices_by_default(target: str, draft: str):
    config = configure(target, tensor_parallel_size=2, spec_model=draft, spec_tokens=2)
    assert config.speculative is not None
    assert config.speculative.draft_tensor_parallel_size == 2
    # The draft's number of devices is stored as not set by the user: it may still
    # change when the devices are known.
    assert config.given is not None
    assert config.given.draft_tensor_parallel_size is None


def test_missing_num_speculative_tokens_is_five_with_a_warning(target: str, draft: str):
    with pytest.warns(UserWarning, match="num_speculative_tokens is not given: 5"):
        config = configure(target, speculative_model=draft)
    assert config.num_draft_tokens == 5


@pytest.mark.parametrize(
    ("draft_positions", "given", "target_len", "expected"),
    [
        (1024, None, None, 1024),
        (256, None, None, 256),
        (4096, None, None, 1024),
        (1024, 200, None, 200),
        (1024, 512, 100, 100),
    ],
)
def test_the_draft_stops_at_the_shortest_limit(
    tmp_path: Path,
    target: str,
    *,
    draft_positions: int,
    given: int | None,
    target_len: int | None,
    expected: int,
):
    short = write_model(tmp_path / "short", max_position_embeddings=draft_positions)
    config = configure(
        target,
        speculative_model=short,
        num_speculative_tokens=2,
        speculative_max_model_len=given,
        max_model_len=target_len,
    )
    assert config.speculative is not None
    assert config.speculative.max_model_len == expected


def test_half_becomes_bfloat16_with_a_warning(target: str):
    for dtype in ("half", "float16"):
        with pytest.warns(UserWarning, match=f"'{dtype}' is taken as 'bfloat16'"):
            assert configure(target, dtype=dtype).dtype == "bfloat16"
    assert configure(target, dtype="float").dtype == "float32"
    assert configure(target, dtype="bfloat16").dtype == "bfloat16"


def test_arguments_of_older_scripts_are_accepted(target: str, draft: str):
    with pytest.warns(UserWarning, match="not given: 5"):
        config = AsyncEngineArgs(
            model=target,
            speculative_model=draft,
            trust_remote_code=True,
            max_num_seqs=8,
            dtype="bfloat16",
            use_v2_block_manager=True,
            enforce_eager=True,
            gpu_memory_utilization=0.9,
            swap_space=4,
            enable_sleep_mode=True,
            disable_log_requests=True,
        ).create_engine_config()
    assert config.num_draft_tokens == 5


def test_serving_arguments_are_passed_on(target: str):
    config = configure(
        target,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        scheduling_policy="priority",
        max_logprobs=7,
        num_scheduler_steps=4,
        logprobs_mode="raw_logprobs",
    )
    assert not config.enable_prefix_caching
    assert config.scheduling_policy == "priority"
    assert config.max_logprobs == 7
    assert config.num_scheduler_steps == 4
    assert configure(target).num_scheduler_steps == 1


def test_all_logprobs_only_for_small_vocabularies(tmp_path: Path, target: str):
    config = configure(target, max_logprobs=-1)
    assert (config.max_logprobs, config.num_logprobs) == (512, 512)
    larger = write_model(tmp_path / "larger", vocab_size=2048)
    with pytest.raises(ConfigError, match="max_logprobs .* got -1.* all 2048 tokens"):
        configure(larger, max_logprobs=-1)


def test_missing_folder_names_its_argument(target: str):
    for argument in ("model", "tokenizer", "generation_config", "speculative_model"):
        arguments = {"model": target, "num_speculative_tokens": None} | {argument: "x"}
        if argument == "speculative_model":
            arguments["num_speculative_tokens"] = 2
        with pytest.raises(ConfigError, match=f"{argument} must be.*'x'") as caught:
            configure(**arguments)
        assert caught.value.parameter == argument


# Arguments in addition to the target, the error, and parts of its message.
REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    *(
        (arguments, ConfigError, [given, allowed])
        for arguments, given, allowed in (
            ({"dtype": "int8"}, "'int8'", "'float32'"),
            ({"max_model_len": 1025}, "got 1025", "from 1 to 1024"),
            ({"max_model_len": 0}, "got 0", "at least 1"),
            ({"max_model_len": "8k"}, "'8k'", "an integer"),
            ({"max_num_seqs": 0}, "got 0", "at least 1"),
            ({"max_num_batched_tokens": 0}, "got 0", "at least 1"),
            ({"block_size": 0}, "got 0", "at least 1"),
            ({"block_size": 12}, "12", "a power of two"),
            ({"num_gpu_blocks_override": 63}, "got 63", "at least 64"),
            (
                {"num_gpu_blocks_override": 64, "max_num_seqs": 65},
                "got 65",
                "There are 64 pages of 16 tokens, and a sequence takes one at least: l",
            ),
            ({"gpu_memory_utilization": 0}, "got 0", "in (0, 1]"),
            ({"gpu_memory_utilization": 1.01}, "got 1.01", "in (0, 1]"),
            ({"gpu_memory_utilization": "0.9"}, "'0.9'", "in (0, 1]"),
            ({"kv_cache_memory_bytes": 0}, "got 0", "at least 1"),
            ({"seed": -3}, "-3", "from 0"),
            ({"seed": "x"}, "'x'", "an integer"),
            ({"tensor_parallel_size": 0}, "got 0", "at least 1"),
            ({"disable_log_stats": "yes"}, "'yes'", "True or False"),
            ({"scan_layers": "yes"}, "'yes'", "True or False"),
            ({"scheduling_policy": "lottery"}, "'lottery'", "'fcfs', 'priority'"),
            ({"enable_prefix_caching": 1}, "got 1", "True or False"),
            ({"max_logprobs": -2}, "got -2", "from 0 to 1024"),
            ({"max_logprobs": 1025}, "got 1025", "from 0 to 1024"),
            ({"num_scheduler_steps": 0}, "got 0", "from 1 to 64"),
            ({"num_scheduler_steps": 65}, "got 65", "from 1 to 64"),
            ({"num_scheduler_steps": 2.0}, "2.0", "an integer"),
            ({"structured_outputs_config": "guidance"}, "'guidance'", "a dict"),
            ({"num_speculative_tokens": 5}, "num_speculative_tokens=5", "draft model"),
            ({"speculative_config": {}}, "{}", "'model'"),
            ({"max_model_length": 17}, "max_model_length (given 17)", "max_model_len"),
            ({"quantization": "awq"}, "'awq'", "are not quantized"),
            ({"quantize_embedding": True}, "neither model is", "quantized"),
            (
                {"quantization": "int4"},
                "'int4'",
                "Scales are shared by 128 features",
            ),
            (
                {"speculative_model_quantization": "int8"},
                "speculative_model_quantization",
                "was given without a draft model",
            ),
            (
                {
                    "speculative_config": {
                        "method": "ngram",
                        "num_speculative_tokens": 2,
                        "quantization": "int8",
                    }
                },
                "speculative_model_quantization",
                "which has no weights",
            ),
        )
    ),
    *(
        (SMALL_DRAFT | arguments, ConfigError, [given, allowed])
        for arguments, given, allowed in (
            ({"num_speculative_tokens": 9}, "got 9", "from 1 to 8"),
            ({"num_speculative_tokens": 0}, "got 0", "from 1 to 8"),
            ({"num_speculative_tokens": "5"}, "'5'", "an integer"),
            ({"speculative_max_model_len": 2000}, "got 2000", "from 1 to 1024"),
            ({"speculative_disable_by_batch_size": 1}, "got 1", "at least 2"),
            ({"speculative_draft_tensor_parallel_size": 2}, "got 2", "a divisor"),
            ({"spec_model": "other"}, "'other'", "contradicts"),
        )
    ),
    # Unsupported values: the error names the argument.
    *(
        (arguments, NotImplementedError, [given, next(iter(arguments)), "must be"])
        for arguments, given in (
            ({"quantization": "int3"}, "'int3'"),
            ({"pipeline_parallel_size": 2}, "got 2"),
            ({"cpu_offload_gb": 4}, "got 4"),
            ({"enable_chunked_prefill": False}, "got False"),
            ({"logprobs_mode": "processed_logits"}, "'processed_logits'"),
            ({"stream_interval": 4}, "got 4"),
            ({"load_format": "tensorizer"}, "'tensorizer'"),
            ({"hf_overrides": {"head_dim": 8}}, "'head_dim'"),
            ({"spec_decoding_acceptance_method": "greedy"}, "'greedy'"),
            (
                {"spec_decoding_acceptance_method": "typical_acceptance_sampler"},
                "Typical acceptance was removed",
            ),
            (
                {"typical_acceptance_sampler_posterior_alpha": 0.4},
                "Use rejection_sample_method 'block'",
            ),
        )
    ),
]


@pytest.mark.parametrize(("arguments", "error", "texts"), REFUSED)
def test_bad_arguments_are_errors(
    target: str,
    draft: str,
    arguments: dict[str, Any],
    error: type[Exception],
    texts: list[str],
):
    if "speculative_model" in arguments:
        arguments = arguments | {"speculative_model": draft}
    with pytest.raises(error) as caught:
        configure(target, **arguments)
    for text in texts:
        assert text in str(caught.value)


def test_structured_outputs_defaults(target: str):
    config = configure(target, structured_outputs_config={"backend": "guidance"})
    assert config.structured_outputs.backend == "guidance"
    assert configure(target).structured_outputs == StructuredOutputsConfig()


def test_arguments_have_one_default():
    """The configuration declares no defaults besides those that users see."""
    arguments = {item.name for item in dataclasses.fields(EngineArgs)}
    for item in dataclasses.fields(EngineConfig):
        if item.name in arguments:
            assert item.default is item.default_factory is dataclasses.MISSING, item


def test_other_arguments_are_passed_unchanged(target: str):
    given: dict[str, Any] = dict(
        batch_invariant=True,
        chat_template="{{ messages }}",
        disable_log_stats=True,
        load_format="dummy",
        num_scheduler_steps=3,
        scheduling_policy="priority",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
    )
    config = configure(target, **given)
    assert {name: getattr(config, name) for name in given} == given


def test_an_argument_changed_later_is_checked_again(target: str):
    args = EngineArgs(model=target)
    args.quantization = "int3"
    with pytest.raises(NotImplementedError, match="int3"):
        args.create_engine_config()


def test_tokens_of_a_trimmed_draft(target: str, draft: str, tmp_path: Path):
    whole: dict[str, Any] = dict(model=draft, num_speculative_tokens=2)
    config = configure(target, speculative_config=whole)
    assert config.draft_token_ids is None
    assert config.draft_model_config is not None
    assert config.draft_model_config.draft_vocab_size is None
    path = tmp_path / "map.json"
    path.write_text(json.dumps([2, 0, 1, 30, 7, 9]))
    keys: dict[str, Any] = dict(draft_vocab_size=5, draft_token_map=str(path))
    config = configure(target, speculative_config=whole | keys)
    assert config.draft_token_ids == (0, 1, 2, 7, 30)
    assert config.draft_model_config is not None
    assert config.draft_model_config.draft_vocab_size == 5
    assert config.model_config.draft_vocab_size is None
    assert "30" not in repr(config).partition("draft_token_ids")[2]
    with pytest.raises(ConfigError, match="jaxspec_checkpoints trim"):
        configure(target, speculative_config=whole | dict(draft_vocab_size=5))
    # Weights are random, so there are no frequent tokens to keep.
    dummy = configure(
        target,
        speculative_config=whole | dict(draft_vocab_size=5),
        load_format="dummy",
    )
    assert dummy.draft_token_ids == (0, 1, 2, 3, 4)


def test_quantization_of_both_models(target: str, draft: str):
    config = configure(target, quantization="int8")
    assert config.model_config.quantization == Scheme(kind="int8")
    pair: dict[str, Any] = dict(speculative_model=draft, num_speculative_tokens=2)
    config = configure(
        target, speculative_model_quantization="fp8", quantize_embedding=True, **pair
    )
    assert config.model_config.quantization is None
    of_draft = Scheme(kind="fp8", has_embedding=True)
    assert config.draft_model_config is not None
    assert config.draft_model_config.quantization == of_draft
    as_vllm = dict(model=draft, num_speculative_tokens=2, quantization="int8")
    config = configure(target, quantization="fp8", speculative_config=as_vllm)
    assert config.model_config.quantization == Scheme(kind="fp8")
    assert config.draft_model_config is not None
    assert config.draft_model_config.quantization == Scheme(kind="int8")


def test_two_vocabularies(tmp_path: Path, target: str):
    other = write_model(tmp_path / "other", vocab_size=700)
    with pytest.raises(ConfigError, match="the target has 512 tokens, the draft 700"):
        configure(target, speculative_model=other, num_speculative_tokens=2)


def test_a_draft_model_of_another_kind(tmp_path: Path, target: str):
    head = write_model(tmp_path / "head", model_type="hydra")
    message = (
        r"speculative_model .*head': .*got 'hydra'.* from a head, which is a small"
    )
    with pytest.raises(ConfigError, match=message) as refused:
        configure(target, speculative_model=head, num_speculative_tokens=2)
    assert refused.value.parameter == "speculative_model"


def test_a_folder_of_another_kind(tmp_path: Path):
    other = write_model(tmp_path / "other", model_type="llama")
    with pytest.raises(ConfigError, match="'gemma2'.*got 'llama'"):
        configure(other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="found: an empty folder"):
        configure(str(tmp_path / "empty"))


def write_published(folder: Path, name: str, **changes: Any) -> str:
    content = published_config(name)
    assert content is not None
    return write_config(folder, content | changes)


@pytest.mark.parametrize(
    ("target_size", "draft_size"),
    [
        (target, draft)
        for draft in ("270m", "1b")
        for target in ("1b", "4b", "12b", "27b")
        if target != draft
    ],
)
def test_gemma_3_pairs_share_a_vocabulary(tmp_path: Path, target_size, draft_size):
    """A multimodal target also shares it, although its file has 64 rows more."""
    rows = 262208 if target_size in ("4b", "12b", "27b") else 262144
    target = write_published(
        tmp_path / "target", f"google/gemma-3-{target_size}-it", vocab_size=rows
    )
    draft = write_published(tmp_path / "draft", f"google/gemma-3-{draft_size}-it")
    config = configure(
        target,
        speculative_model=draft,
        num_speculative_tokens=4,
        skip_tokenizer_init=True,
        max_model_len=4096,
    )
    assert config.draft_model_config is not None
    assert config.draft_model_config.vocab_size == config.model_config.vocab_size
    assert config.model_config.vocab_size == 262144


@pytest.mark.parametrize(
    ("target_name", "draft_name", "expected"),
    [
        ("gemma-3-4b-it", "gemma-2-2b-it", "262144 tokens, the draft 256000.*27b <- 2"),
        ("gemma-2-9b-it", "gemma-3-1b-it", "256000 tokens, the draft 262144.*27b <- 9"),
    ],
)
def test_generations_do_not_draft_for_each_other(
    tmp_path: Path, target_name: str, draft_name: str, expected: str
):
    target = write_published(tmp_path / "target", target_name)
    draft = write_published(tmp_path / "draft", draft_name)
    with pytest.raises(ConfigError, match=expected) as refused:
        configure(target, speculative_model=draft, num_speculative_tokens=4)
    assert "have different vocabularies" in str(refused.value)
    assert refused.value.parameter == "speculative_model"


@pytest.mark.parametrize("dtype", ["half", "float16"])
def test_gemma_3_refuses_float16(tmp_path: Path, target: str, dtype: str):
    gemma3 = write_published(tmp_path / "gemma3", "google/gemma-3-270m-it")
    with pytest.raises(ConfigError, match="dtype.*exceed 65,504") as refused:
        configure(gemma3, dtype=dtype)
    assert refused.value.parameter == "dtype"
    with pytest.warns(UserWarning, match="is taken as 'bfloat16'.*Gemma 2"):
        assert configure(target, dtype=dtype).dtype == "bfloat16"


def test_gemma_3_sampling_is_read_from_its_files(tmp_path: Path):
    model = write_published(tmp_path / "gemma3", "google/gemma-3-1b-it")
    stated = dict(bos_token_id=2, do_sample=True, eos_token_id=[1, 106], top_k=64)
    stated |= dict(top_p=0.95, cache_implementation="hybrid", pad_token_id=0)
    (Path(model) / "generation_config.json").write_text(json.dumps(stated))
    config = configure(model)
    assert config.generation_defaults == {"top_k": 64, "top_p": 0.95}
    assert config.model_config.eos_token_ids == (1, 106)
    assert configure(model, generation_config="vllm").generation_defaults == {}


def test_batch_invariance_is_read_from_the_environment(
    target: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert configure(target).batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert not configure(target).batch_invariant
    assert configure(target, batch_invariant=True).batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT must be 0 or 1"):
        configure(target)


def test_programs_are_not_saved_without_a_home_directory(monkeypatch, caplog):
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    config = EngineArgs(model=str(bundled_target())).create_engine_config()
    assert config.compilation_cache_dir is None
    assert "set HOME, XDG_CACHE_HOME or compilation_cache_dir" in caplog.text
