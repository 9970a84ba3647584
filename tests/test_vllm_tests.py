"""vLLM's own tests import jaxspec's names, and their outcomes are counted."""

import json
import os
import sys
from pathlib import Path

from benchmarks.vllm_tests import __main__ as vllm_tests
from benchmarks.vllm_tests.__main__ import fault_in, summary, total
from benchmarks.vllm_tests.reasons import reason_of
from jaxspec.bench.report import commit
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
