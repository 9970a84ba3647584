"""Import lines of scripts written for vLLM, with the package's name replaced."""

import ast
import importlib
import re

import pytest

from jaxspec import LLM
from jaxspec.lora.request import LoRARequest
from jaxspec.metrics import Counter
from jaxspec.utils import random_uuid

IMPORTS = """\
import vllm
from vllm import LLM, SamplingParams
from vllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm import AsyncEngineArgs, CompletionOutput, PromptType, TextPrompt, TokensPrompt
from vllm import __version__
from vllm.config import SpeculativeConfig, ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.llm import LLM
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.engine.protocol import DeltaFunctionCall, DeltaMessage
from vllm.beam_search import BeamSearchOutput, BeamSearchSequence
from vllm.entrypoints.openai.engine.protocol import DeltaToolCall, FunctionCall
from vllm.entrypoints.openai.engine.protocol import ToolCall
from vllm.entrypoints.openai.engine.protocol import ExtractedToolCallInformation
from vllm.inputs import PromptType, TextPrompt, TokensPrompt
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.sequence import Logprob
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.utils import random_uuid
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
"""


@pytest.mark.parametrize("line", IMPORTS.splitlines())
def test_an_import_of_vllm_works_with_the_name_replaced(line: str):
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
    ],
)
def test_an_alias_is_the_same_object(alias: str, name: str, home: str):
    first, second = (importlib.import_module(path) for path in (alias, home))
    assert getattr(first, name) is getattr(second, name)


def test_ids_for_requests_differ():
    ids = {random_uuid() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_an_adapter_can_be_named_and_is_refused_when_used():
    adapter = LoRARequest("sql", 1, "adapters/sql")
    assert (adapter.lora_name, adapter.lora_int_id) == ("sql", 1)
    llm = object.__new__(LLM)
    with pytest.raises(NotImplementedError, match="lora_request=LoRARequest"):
        llm.generate("a", lora_request=adapter)


def test_metrics_are_told_apart_by_their_class():
    counter = Counter(name="vllm:num_preemptions", labels={}, value=3)
    assert counter == Counter(name="vllm:num_preemptions", labels={}, value=3)
    assert not isinstance(counter, importlib.import_module("jaxspec.metrics").Gauge)
