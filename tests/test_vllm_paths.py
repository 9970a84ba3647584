"""Import lines of vLLM scripts work once the package's name is replaced."""

import ast
import gc
import importlib
import ipaddress
import json
import os
import re
import socket
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_tests import __main__ as vllm_tests
from benchmarks.vllm_tests.__main__ import fault_in, summary, total
from benchmarks.vllm_tests.reasons import reason_of
from jaxspec import LLM, SamplingParams, envs
from jaxspec.bench.report import commit
from jaxspec.benchmarks.datasets import add_dataset_parser, get_samples
from jaxspec.config.profiler import ProfilerConfig
from jaxspec.distributed import cleanup_dist_env_and_memory
from jaxspec.engine.arg_utils import AsyncEngineArgs, EngineArgs
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.stat_loggers import check_stat_loggers
from jaxspec.engine.vllm_arguments import (
    VLLM_ENGINE_ARGUMENTS,
    check_vllm_arguments,
)
from jaxspec.entrypoints.chat_utils import load_chat_template
from jaxspec.errors import UnsupportedError
from jaxspec.exceptions import VLLMValidationError
from jaxspec.logger import init_logger
from jaxspec.lora.request import LoRARequest
from jaxspec.platforms import current_platform
from jaxspec.tokenizers import get_tokenizer
from jaxspec.usage.usage_lib import UsageContext, is_usage_stats_enabled
from jaxspec.utils import random_uuid
from jaxspec.utils.argparse_utils import FlexibleArgumentParser
from jaxspec.utils.network_utils import get_ip, get_open_port
from jaxspec.v1.metrics.loggers import AggregatedLoggingStatLogger
from tests.support.processes import run_python

IMPORTS = """\
import vllm
from vllm import LLM, SamplingParams
from vllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm import AsyncEngineArgs, CompletionOutput, PromptType, TextPrompt, TokensPrompt
from vllm import __version__
from vllm.beam_search import BeamSearchOutput, BeamSearchSequence
from vllm.benchmarks.datasets import add_dataset_parser, get_samples
from vllm.config import SpeculativeConfig, ModelConfig, ProfilerConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.entrypoints.llm import LLM
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.engine.protocol import DeltaFunctionCall, DeltaMessage
from vllm.entrypoints.openai.engine.protocol import DeltaToolCall, FunctionCall
from vllm.entrypoints.openai.engine.protocol import ToolCall
from vllm.entrypoints.openai.engine.protocol import ExtractedToolCallInformation
import vllm.envs as envs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.logger import init_logger
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.sequence import Logprob
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils import random_uuid
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_ip, get_open_port
from vllm.v1.core.kv_cache_utils import ExternalBlockHash
from vllm.v1.metrics.loggers import AggregatedLoggingStatLogger
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
from vllm.v1.metrics.stats import RequestStateStats
from vllm.version import __version__
"""


@pytest.mark.parametrize("line", IMPORTS.splitlines())
def test_vllm_import_works_with_the_name_replaced(line: str):
    (statement,) = ast.parse(re.sub(r"\bvllm\b", "jaxspec", line)).body
    assert isinstance(statement, ast.Import | ast.ImportFrom)
    if isinstance(statement, ast.Import):
        importlib.import_module(statement.names[0].name)
        return
    module = importlib.import_module(statement.module or "")
    for alias in statement.names:
        assert getattr(module, alias.name) is not None


@pytest.mark.parametrize(
    ("alias", "name", "home"),
    [
        ("jaxspec.sequence", "Logprob", "jaxspec.logprobs"),
        ("jaxspec.entrypoints.llm", "LLM", "jaxspec.llm"),
        ("jaxspec.v1.metrics.reader", "Vector", "jaxspec.metrics"),
        ("jaxspec.version", "__version__", "jaxspec"),
    ],
)
def test_alias_is_the_same_object(alias: str, name: str, home: str):
    first, second = (importlib.import_module(path) for path in (alias, home))
    assert getattr(first, name) is getattr(second, name)


def test_request_ids_differ():
    ids = {random_uuid() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_adapter_request_is_rejected_when_used():
    adapter = LoRARequest("sql", 1, "adapters/sql")
    assert (adapter.lora_name, adapter.lora_int_id) == ("sql", 1)
    llm = object.__new__(LLM)
    with pytest.raises(NotImplementedError, match="lora_request=LoRARequest"):
        llm.generate("a", lora_request=adapter)


def test_wrong_request_raises_vllms_error():
    with pytest.raises(VLLMValidationError) as refused:
        SamplingParams(temperature=-1)
    assert isinstance(refused.value, ValueError)
    assert (refused.value.parameter, refused.value.value) == ("temperature", -1)


def test_other_environment_variables_are_not_read(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    with pytest.raises(AttributeError, match="VLLM_USE_V1.*are read"):
        _ = envs.VLLM_USE_V1
    assert not envs.is_set("VLLM_USE_V1")
    assert not hasattr(envs, "__wrapped__")


def test_usage_is_not_reported():
    assert not is_usage_stats_enabled()
    assert UsageContext("LLM_CLASS") is UsageContext.LLM_CLASS


def test_logger_logs_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG", "script")
    logger = init_logger("script")
    for value in (1, 1, 2):
        logger.info_once("Found %d", value)
        logger.warning_once("Found %d", value)
        logger.debug_once("Found %d", value)
        logger.info("Said %d", value)
    said = [one for one in caplog.messages if one.startswith("Said")]
    assert said == ["Said 1", "Said 1", "Said 2"]
    found = [(one.levelname, one.message) for one in caplog.records[:4]]
    assert found[:3] == [(level, "Found 1") for level in ("INFO", "WARNING", "DEBUG")]
    assert caplog.messages.count("Found 1") == caplog.messages.count("Found 2") == 3


def test_flags_may_have_underscores():
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--own_flag")
    given = parser.parse_args(["--max_tokens=3", "--own_flag", "a_b"])
    assert (given.max_tokens, given.own_flag) == (3, "a_b")
    given, rest = parser.parse_known_args(["--max-tokens", "4", "--other_one", "x_y"])
    assert (given.max_tokens, rest) == (4, ["--other-one", "x_y"])


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_engine_arguments_as_flags(kind: type[EngineArgs]):
    parser = kind.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--num-prompts", type=int)
    line = "--model m --max_num_seqs 3 -tp 2 --no-enable-prefix-caching"
    args = parser.parse_args([*line.split(), "--num-prompts", "5"])
    made = kind.from_cli_args(args)
    assert type(made) is kind
    expected: Any = {"max_num_seqs": 3, "tensor_parallel_size": 2}
    assert made == kind(model="m", enable_prefix_caching=False, **expected)


def test_flags_may_be_dotted():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    line = "--model m --speculative_config.method ngram --max-model-len 8k"
    made = EngineArgs.from_cli_args(parser.parse_args(line.split()))
    assert made == EngineArgs(
        model="m", speculative_config={"method": "ngram"}, max_model_len=8000
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-config.method"])


def test_samples_are_the_prompts_of_a_file(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    parser.add_argument("--output-len", type=int)
    line = f"--dataset-name custom --dataset-path {path} --num-prompts 3"
    samples = get_samples(parser.parse_args(line.split()), tokenizer=None)
    assert [one.prompt for one in samples] == ["a", "b", "a"]
    assert samples[0].multi_modal_data is None


def test_addresses_are_usable():
    with socket.socket() as made:
        made.bind(("", get_open_port()))
    assert ipaddress.ip_address(get_ip()).version == 4


def test_platform_is_the_device():
    assert current_platform.device_type == "cpu"
    assert current_platform.is_cpu()
    for is_other in ("cuda", "cuda_alike", "rocm", "tpu", "xpu"):
        assert not getattr(current_platform, f"is_{is_other}")()


def test_tokenizer_of_a_model_is_read_by_its_name():
    tokenizer = get_tokenizer("jaxspec/tiny-gemma2", trust_remote_code=True)
    assert tokenizer.decode(tokenizer.encode("A fox.")) == "A fox."


def test_chat_template_is_read_from_its_file(tmp_path: Path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    for given in (path, str(path), "{{ messages }}"):
        assert load_chat_template(given) == "{{ messages }}"
    assert load_chat_template(None) is None


def test_profiler_settings_have_no_effect():
    given: Any = {"profiler_config": ProfilerConfig(torch_profiler_dir="profile")}
    (warning,) = check_vllm_arguments(VLLM_ENGINE_ARGUMENTS, given)
    assert warning.startswith("profiler_config=ProfilerConfig(")


def test_own_loggers_of_statistics_are_refused():
    check_stat_loggers([AggregatedLoggingStatLogger])
    for kind in (LLMEngine, AsyncLLMEngine):
        with pytest.raises(UnsupportedError, match="custom loggers are not"):
            kind.from_engine_args(EngineArgs(), stat_loggers=[Path])


def test_cleanup_collects_cycles():
    class Engine:
        pass

    engine: Any = Engine()
    engine.itself, gone = engine, weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is not None
        cleanup_dist_env_and_memory()
        assert gone() is None
    finally:
        gc.enable()


STAND_IN = Path(__file__).parents[1] / "benchmarks/vllm_tests/stand_in"
CODE = """
import vllm.nowhere.at_all
from vllm import SamplingParams, version
from vllm.nowhere import Thing
from vllm.platforms import current_platform
import jaxspec
assert SamplingParams is jaxspec.SamplingParams
assert version.__version__ == jaxspec.__version__
assert isinstance(Thing, type) and not Thing
class Other(Thing): pass
for use in (Thing, Thing.inner.make, Other):
    try:
        use(1, a=2)
    except vllm.NotInJaxspecError as error:
        assert str(error).startswith("jaxspec has no ")
    else:
        raise AssertionError(use)
"""


def test_stand_in_has_jaxspecs_names_and_refuses_others():
    paths = [str(STAND_IN), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run_python("-c", CODE, check=True, env=os.environ | environment)


def test_outcomes_are_counted():
    absent = "E   vllm.NotInJaxspecError: jaxspec has no config.kv_transfer.Config"
    found = summary(
        "entrypoints/x.py",
        [
            ("test_a", "passed", ""),
            ("test_b", "failed", absent),
            ("test_c", "failed", "here\nE   AssertionError: assert 1 == 2\nthere"),
            ("test_d", "skipped", "not on a Sunday"),
        ],
    )
    assert found["counts"] == {"passed": 1, "failed": 1, "not_applicable": 2}
    assert found["failed"] == {"test_c": "AssertionError: assert 1 == 2"}
    internal = "uses vLLM's internal config.kv_transfer.Config"
    assert found["not_applicable"] == {internal: 1, "skipped: not on a Sunday": 1}
    assert total({"x": found, "y": found}, ["x"]) == {"all": 4} | found["counts"]


def test_reasons_belong_to_a_file_and_a_test():
    fault = "AssertionError: assert 'max_tokens' == 'tool_use'"
    asked = ("entrypoints/anthropic/test_messages.py", "test_anthropic_tool_call")
    assert reason_of(*asked, fault) == "needs a model that calls tools when it should"
    assert reason_of(asked[0], "test_simple_messages", fault) is None
    assert reason_of("x.py", asked[1], fault) is None
    assert fault_in("a\njaxspec.errors.RequestError: b\nc") == (
        "jaxspec.errors.RequestError: b"
    )


def test_record_has_one_commit_and_the_files_of_all_jobs(tmp_path: Path, monkeypatch):
    source, record = tmp_path / "source", tmp_path / "record.json"
    for folder in vllm_tests.COPIED:
        (source / "tests" / folder).mkdir(parents=True)
    (source / "examples").mkdir()
    (source / vllm_tests.TEMPLATE).touch()
    (source / "PKG-INFO").write_text("Version: 0.33.0\n")
    examples = {"late.py": ["0.2", "0"], "good.py": ["0", "0"], "bad.py": ["0", "3"]}
    for name in examples:
        script = "import sys, time; time.sleep(float(sys.argv[1])); sys.exit("
        (source / "examples" / name).write_text(f"{script}int(sys.argv[2]))")
    monkeypatch.setattr(vllm_tests, "TESTS", [])
    monkeypatch.setattr(vllm_tests, "EXAMPLES", examples)
    command = ["", str(source), "--jobs=2", f"--work={tmp_path}", f"--output={record}"]

    def counts_after(*arguments: str) -> dict[str, int]:
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        vllm_tests.main()
        written = json.loads(record.read_text())
        assert written["commit"] == commit()["commit"]
        assert list(written["files"]) == [n for n in examples if n in written["files"]]
        return written["examples"]

    assert counts_after("--only", "d.py")["all"] == 2
    assert counts_after("--only", "late") == {
        **{"all": 3, "passed": 2, "failed": 1, "not_applicable": 0}
    }
    record.write_text(record.read_text().replace('"commit": "', '"commit": "0'))
    assert counts_after("--only", "late")["all"] == 1
