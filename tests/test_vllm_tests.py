"""vLLM's own tests import jaxspec's names, and their outcomes are counted."""

import os
from pathlib import Path

from benchmarks.vllm_tests.__main__ import fault_in, summary, total
from benchmarks.vllm_tests.reasons import reason_of
from tests.support.processes import run_python

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
