import dataclasses
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.engine import EngineConfig, GivenSizes
from jaxspec.config.structured_outputs import StructuredOutputsConfig
from jaxspec.engine.arg_utils import BUNDLED_DRAFT_TOKENS, EngineArgs
from jaxspec.engine.memory.plan import MAX_CPU_KV_BYTES
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.engine.vllm_arguments import VLLM_ENGINE_ARGUMENTS
from jaxspec.errors import ConfigError
from jaxspec.models.families import published_config
from jaxspec_checkpoints import bundled_target
from jaxspec_checkpoints.quantization import Scheme
from tests.support import model_configs
from tests.support.model_configs import TINY, write_config, write_model

# Folders in the working directory of every test: changes to `TINY` ...
MODELS: dict[str, dict[str, Any]] = {
    "target": {},
    "draft": dict(num_hidden_layers=2),
    "one-layer": dict(num_hidden_layers=1),
    "short": dict(max_position_embeddings=256),
    "long": dict(max_position_embeddings=32768),
    "vocabulary-2048": dict(vocab_size=2048),
    "parallel": dict(num_hidden_layers=2, pard_token=3),
    "bad-parallel": dict(pard_token=TINY["vocab_size"]),
    "hydra": dict(model_type="hydra"),
    "wide": dict(num_hidden_layers=26, num_key_value_heads=4, head_dim=256),
    "wide-draft": dict(num_hidden_layers=13, num_key_value_heads=4, head_dim=256),
}
# ... and published configurations. A multimodal model has 64 rows more.
PUBLISHED = {
    "gemma-3-4b-it": 262208,
    "gemma-3-1b-it": 262144,
    "gemma-3-270m-it": 262144,
    "gemma-2-2b-it": 256000,
    "gemma-2-9b-it": 256000,
}
PAIR: dict[str, Any] = {"speculative_model": "draft", "num_speculative_tokens": 2}
PARALLEL = {"method": "pard", "model": "parallel", "num_speculative_tokens": 12}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        write_model(root / name, **changes)
    for name, num_rows in PUBLISHED.items():
        content = published_config(name)
        assert content is not None
        write_config(root / name, content | {"vocab_size": num_rows})
    (root / "empty").mkdir()
    return root


@pytest.fixture(autouse=True)
def _enter_folders(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)


def configure(model: str = "target", **arguments: Any) -> Any:
    return model_configs.configure(model, **arguments)


UNCHANGED: dict[str, Any] = dict(
    batch_invariant=True,
    chat_template="{{ messages }}",
    compilation_cache_dir="cache",
    disable_log_stats=True,
    load_format="dummy",
    max_logprobs=7,
    num_scheduler_steps=3,
    scheduling_policy="priority",
    skip_tokenizer_init=True,
    tensor_parallel_size=2,
)
# Arguments, and attributes of the configuration.
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": (
        {},
        {
            "model": "target",
            "tokenizer": "target",
            "served_model_name": "target",
            "dtype": "auto",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "page_size": 16,
            "num_pages": 8 * 1024 // 16,
            "given": GivenSizes(),
            "seed": 0,
            "tensor_parallel_size": 1,
            "enable_prefix_caching": True,
            "scheduling_policy": "fcfs",
            "max_logprobs": 20,
            "num_logprobs": 20,
            "num_scheduler_steps": 1,
            "structured_outputs": StructuredOutputsConfig(),
            "model_config.scan_layers": False,
            "speculative": None,
            "draft_model_config": None,
        },
    ),
    "sizes": (
        dict(
            model="long",
            max_model_len=10_000,
            max_num_seqs=3,
            max_num_batched_tokens=64,
            block_size=8,
            num_gpu_blocks_override=2000,
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=10**9,
        ),
        {
            "max_model_len": 10_000,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 64,
            "page_size": 8,
            "num_pages": 2000,
            "given": GivenSizes(
                max_num_seqs=3,
                max_num_batched_tokens=64,
                num_pages=2000,
                gpu_memory_utilization=0.5,
                kv_cache_memory_bytes=10**9,
            ),
        },
    ),
    **{
        f"a length of {given} is the default, which is at most 8192": (
            {"model": "long", "max_model_len": given},
            {"max_model_len": 8192},
        )
        for given in (None, -1)
    },
    "translated values": (
        dict(
            seed=None,
            served_model_name=["name", "other"],
            dtype="float",
            enable_prefix_caching=False,
            max_logprobs=-1,
            structured_outputs_config={"backend": "guidance"},
        ),
        {
            "seed": 0,
            "served_model_name": "name",
            "dtype": "float32",
            "enable_prefix_caching": False,
            "max_logprobs": 512,
            "num_logprobs": 512,
            "structured_outputs.backend": "guidance",
        },
    ),
    "few pages reduce the default sequences": (
        {"num_gpu_blocks_override": 5, "max_model_len": 64},
        {"max_num_seqs": 5, "num_pages": 5},
    ),
    # 100 tokens fill six pages of 16 and begin a seventh.
    "a partly filled page": (
        {"max_model_len": 100, "max_num_seqs": 3},
        {"num_pages": 21},
    ),
    "draft model": (
        PAIR | {"tensor_parallel_size": 2},
        {
            "speculative.method": "draft_model",
            "speculative.model": "draft",
            "speculative.num_speculative_tokens": 2,
            "speculative.rejection_sample_method": "block",
            "speculative.draft_sample_method": "probabilistic",
            "speculative.disable_by_batch_size": None,
            "draft_model_config.num_layers": 2,
            "draft_model_config.draft_vocab_size": None,
            "draft_token_ids": None,
            # The draft has the target's devices. As the user has not set their number,
            # it may still change when the devices are known.
            "speculative.draft_tensor_parallel_size": 2,
            "given.draft_tensor_parallel_size": None,
        },
    ),
    "parallel draft model": (
        {"speculative_config": PARALLEL},
        {"draft_model_config.mask_token_id": 3, "max_draft_tokens": 12},
    ),
    # One layer is less than a period of local and global layers.
    "scanned layers, except those of a short draft model": (
        PAIR | {"scan_layers": True, "speculative_model": "one-layer"},
        {
            "model_config.layers_of_pools": (2, 2),
            "draft_model_config.layers_of_pools": (1,),
            "draft_model_config.scan_layers": True,
        },
    ),
    "n-gram drafts": (
        {"spec_method": "ngram", "spec_tokens": 3, "speculative_max_model_len": 100},
        {
            "speculative.model": None,
            "speculative.max_model_len": 100,
            "draft_model_config": None,
            "max_draft_tokens": 3,
            # All pages are the target's, so there are as many as without drafts.
            "num_pages": 512,
        },
    ),
    "n-gram drafts and a draft model": (
        {"spec_method": "ngram+draft_model", "spec_model": "draft", "spec_tokens": 3},
        {"speculative.method": "ngram+draft_model", "draft_model_config.num_layers": 2},
    ),
    "suffix drafts": (
        {"spec_method": "suffix", "spec_tokens": 16},
        {
            "speculative.suffix_decoding_max_tree_depth": 24,
            "speculative.suffix_decoding_max_cached_requests": 0,
            "speculative.suffix_decoding_max_spec_factor": 4.0,
            "draft_model_config": None,
            "num_pages": 512,
        },
    ),
    "quantized draft": (
        PAIR | {"speculative_model_quantization": "fp8", "quantize_embedding": True},
        {
            "model_config.quantization": None,
            "draft_model_config.quantization": Scheme(kind="fp8", has_embedding=True),
        },
    ),
    "keys of speculative_config": (
        {
            "tensor_parallel_size": 4,
            "quantization": "fp8",
            "speculative_config": {
                "model": "draft",
                "num_speculative_tokens": 8,
                "rejection_sample_method": "standard",
                "draft_sample_method": "greedy",
                "disable_by_batch_size": 6,
                "draft_tensor_parallel_size": 2,
                "quantization": "int8",
            },
        },
        {
            "speculative.rejection_sample_method": "standard",
            "speculative.draft_sample_method": "greedy",
            "speculative.disable_by_batch_size": 6,
            "speculative.draft_tensor_parallel_size": 2,
            "given.draft_tensor_parallel_size": 2,
            "model_config.quantization": Scheme(kind="fp8"),
            "draft_model_config.quantization": Scheme(kind="int8"),
        },
    ),
    "others are passed unchanged": (UNCHANGED, UNCHANGED),
    "rows beyond the draft's vocabulary are dropped": (
        PAIR | {"model": "gemma-3-4b-it", "speculative_model": "gemma-3-270m-it"},
        {"model_config.vocab_size": 262144, "draft_model_config.vocab_size": 262144},
    ),
    # Weights are random, so there are no frequent tokens to keep.
    "trimmed draft with random weights": (
        PAIR | {"speculative_config": {"draft_vocab_size": 5}, "load_format": "dummy"},
        {"draft_token_ids": (0, 1, 2, 3, 4)},
    ),
}


@pytest.mark.parametrize(("arguments", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_config_has_given_and_default_values(arguments, expected):
    config = configure(**arguments)
    assert {name: attrgetter(name)(config) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "draft", "num_draft_tokens"),
    [
        ({}, BUNDLED_DRAFT, BUNDLED_DRAFT_TOKENS),
        ({"num_speculative_tokens": 2}, BUNDLED_DRAFT, 2),
        ({"spec_tokens": 2}, BUNDLED_DRAFT, 2),
        ({"spec_method": "ngram", "spec_tokens": 4}, None, 4),
    ],
)
def test_default_model_is_the_bundled_pair(given, draft, num_draft_tokens):
    args = EngineArgs(**given)
    assert (args.model, args.speculative_model) == (BUNDLED_TARGET, draft)
    speculative = args.create_engine_config().speculative
    assert speculative is not None
    assert speculative.num_levels == num_draft_tokens
    assert EngineArgs(model=BUNDLED_TARGET).speculative_model is None


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("bfloat16", 2), ("float32", 4), ("auto", 4)]
)
def test_default_pages_of_both_models_are_below_the_cap(dtype: str, num_bytes: int):
    pair = PAIR | {"speculative_model": "wide-draft"}
    config = configure("wide", **pair, dtype=dtype, max_num_seqs=64)
    page_bytes = 16 * 2 * (26 + 13) * 4 * 256 * num_bytes
    assert config.num_pages == MAX_CPU_KV_BYTES // page_bytes
    assert config.num_pages < 64 * config.pages_per_seq


@pytest.mark.parametrize(
    ("draft", "given", "target_len", "expected"),
    [
        ("draft", None, None, 1024),
        ("short", None, None, 256),
        ("long", None, None, 1024),
        ("draft", 200, None, 200),
        ("draft", 512, 100, 100),
    ],
)
def test_draft_stops_at_the_shortest_limit(draft, given, target_len, expected):
    config = configure(
        speculative_model=draft,
        num_speculative_tokens=2,
        speculative_max_model_len=given,
        max_model_len=target_len,
    )
    assert config.speculative.max_model_len == expected


@pytest.mark.parametrize(
    ("arguments", "message", "name", "value"),
    [
        ({"dtype": "half"}, "'half' is taken as 'bfloat16'", "dtype", "bfloat16"),
        ({"dtype": "float16"}, "'bfloat16'.*of Gemma 2 exceed", "dtype", "bfloat16"),
        *(
            (arguments, f"is not given: {count}", "max_draft_tokens", count)
            for arguments, count in (
                ({"speculative_model": "draft"}, 5),
                ({"spec_method": "ngram"}, 5),
                ({"spec_method": "suffix"}, 16),
            )
        ),
    ],
    ids=str,
)
def test_warns_of_values_that_the_user_did_not_choose(arguments, message, name, value):
    with pytest.warns(UserWarning, match=message):
        assert getattr(configure(**arguments), name) == value


# Arguments, and parts of the message.
CONFIG_ERRORS: list[tuple[Any, ...]] = [
    ({"dtype": "int8"}, "'int8'", "'float32'"),
    ({"max_model_len": 1025}, "got 1025", "from 1 to 1024"),
    ({"max_model_len": "8k"}, "'8k'", "an integer"),
    ({"block_size": 0}, "got 0", "at least 1"),
    ({"block_size": 12}, "block_size", "12", "a power of two"),
    ({"num_gpu_blocks_override": 63}, "num_gpu_blocks_override", "63", "at least 64"),
    ({"model": "empty"}, "found: an empty folder"),
    ({"seed": "x"}, "'x'", "an integer"),
    ({"speculative_model_quantization": "int8"}, "was given without a draft model"),
    ({"model": "gemma-3-270m-it", "dtype": "float16"}, "dtype", "exceed 65,504"),
    (
        {"num_gpu_blocks_override": 64, "max_num_seqs": 65},
        "got 65",
        "There are 64 pages of 16 tokens, and a sequence takes one at least: l",
    ),
    ({"gpu_memory_utilization": 0}, "got 0", "in (0, 1]"),
    ({"gpu_memory_utilization": 1.01}, "got 1.01", "in (0, 1]"),
    ({"gpu_memory_utilization": "0.9"}, "'0.9'", "in (0, 1]"),
    ({"kv_cache_memory_bytes": 0}, "got 0", "at least 1"),
    ({"disable_log_stats": "yes"}, "'yes'", "True or False"),
    ({"otlp_traces_endpoint": ""}, "got ''", "the URL of a collector"),
    ({"scan_layers": "yes"}, "'yes'", "True or False"),
    ({"skip_tokenizer_init": "yes"}, "'yes'", "True or False"),
    ({"enable_prefix_caching": 1}, "got 1", "True or False"),
    ({"scheduling_policy": "lottery"}, "'lottery'", "'fcfs', 'priority'"),
    ({"max_logprobs": -2}, "got -2", "from 0 to 1024"),
    ({"max_logprobs": 1025}, "got 1025", "from 0 to 1024"),
    ({"max_logprobs": -1, "model": "vocabulary-2048"}, "got -1", "all 2048 tokens"),
    ({"num_scheduler_steps": 0}, "got 0", "from 1 to 64"),
    ({"num_scheduler_steps": 65}, "got 65", "from 1 to 64"),
    ({"num_scheduler_steps": 2.0}, "2.0", "an integer"),
    ({"structured_outputs_config": "guidance"}, "'guidance'", "a dict"),
    ({"quantize_embedding": True}, "neither model is", "quantized"),
    ({"quantization": "int4"}, "'int4'", "Scales are shared by 128 features"),
    (
        {"spec_method": "ngram", "spec_tokens": 2}
        | {"speculative_model_quantization": "int8"},
        "speculative_model_quantization",
        "which has no weights",
    ),
    (PAIR | {"speculative_max_model_len": 2000}, "got 2000", "from 1 to 1024"),
    (
        {"speculative_config": PARALLEL | {"model": "target"}},
        "names no pard_token",
        "jaxspec.train pard",
    ),
    (
        {"speculative_config": PARALLEL | {"model": "bad-parallel"}},
        "pard_token must be an integer from 0 to",
    ),
    (PAIR | {"speculative_model": "hydra"}, "_model 'hydra': config.json", "a head, w"),
]
# Unsupported values: the message names the argument.
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"load_format": "tensorizer"}, "'tensorizer'"),
    ({"spec_decoding_acceptance_method": "greedy"}, "'greedy'"),
    (
        {"spec_decoding_acceptance_method": "typical_acceptance_sampler"},
        "Typical acceptance was removed",
    ),
    (
        {"typical_acceptance_sampler_posterior_alpha": 0.4},
        "Use rejection_sample_method 'block'",
    ),
]
ERRORS: list[tuple[type[Exception], dict[str, Any], list[str]]] = [
    *((ConfigError, arguments, texts) for arguments, *texts in CONFIG_ERRORS),
    *(
        (NotImplementedError, arguments, [text, next(iter(arguments)), "must be"])
        for arguments, text in UNSUPPORTED
    ),
]


@pytest.mark.parametrize(
    ("error", "arguments", "texts"), ERRORS, ids=[str(row[1]) for row in ERRORS]
)
def test_rejects_bad_arguments(error, arguments, texts):
    with pytest.raises(error) as caught:
        configure(**arguments)
    for text in texts:
        assert text in str(caught.value)


def test_arguments_have_one_default():
    """The configuration declares no defaults besides those that users see."""
    arguments = {item.name for item in dataclasses.fields(EngineArgs)}
    arguments -= VLLM_ENGINE_ARGUMENTS.keys()
    for item in dataclasses.fields(EngineConfig):
        if item.name in arguments:
            assert item.default is item.default_factory is dataclasses.MISSING, item


def test_an_argument_changed_later_is_checked_again():
    args = EngineArgs(model="target")
    args.quantization = "int3"
    with pytest.raises(NotImplementedError, match="int3"):
        args.create_engine_config()


def test_tokens_of_a_trimmed_draft(tmp_path: Path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps([2, 0, 1, 30, 7, 9]))
    keys: dict[str, Any] = dict(draft_vocab_size=5, draft_token_map=str(path))
    config = configure(**PAIR, speculative_config=keys)
    assert config.draft_token_ids == (0, 1, 2, 7, 30)
    assert config.draft_model_config.draft_vocab_size == 5
    assert config.model_config.draft_vocab_size is None
    assert "30" not in repr(config).partition("draft_token_ids")[2]


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("gemma-3-4b-it", "gemma-2-2b-it", "262144 tokens, the draft 256000.*27b <- 2"),
        ("gemma-2-9b-it", "gemma-3-1b-it", "256000 tokens, the draft 262144.*27b <- 9"),
    ],
)
def test_generations_do_not_draft_for_each_other(target: str, draft: str, message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        configure(target, **PAIR | {"speculative_model": draft})
    assert "have different vocabularies" in str(refused.value)
    assert refused.value.parameter == "speculative_model"


def test_batch_invariance_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    for value, given, expected in (
        ("1", False, True),
        ("0", False, False),
        ("0", True, True),
    ):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert configure(batch_invariant=given).batch_invariant == expected
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT must be 0 or 1"):
        configure()


def test_programs_are_not_saved_without_a_home_directory(monkeypatch, caplog):
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    config = EngineArgs(model=str(bundled_target())).create_engine_config()
    assert config.compilation_cache_dir is None
    assert "set HOME, XDG_CACHE_HOME or compilation_cache_dir" in caplog.text
