"""Run vLLM's own server tests and examples against jaxspec, and record the counts.

    python -m benchmarks.vllm_tests SOURCE --output benchmarks/results/vllm-tests.json

SOURCE is an unpacked source distribution of vLLM. Its tests and examples run without
edits: the package `vllm` is a stand-in whose modules are jaxspec's, every model name is
the bundled pair, and a few flags of other models are left out
(`stand_in/tests/utils.py`).

Needs the extras `test`, and pytest-asyncio, pytest-timeout, anthropic and regex. Files
that `--output` has from another commit are not kept: a record has one commit.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.vllm_tests.reasons import EXAMPLES, TESTS, reason_of
from jaxspec.bench.report import commit, write_whole

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TINY = ROOT / "checkpoints/jaxspec_checkpoints/tiny"
TEMPLATE = "examples/tool_chat_template_gemma3_pythonic.jinja"
COMMAND = "python -m benchmarks.vllm_tests"
# Folders of vLLM's tests that are copied, because tests import from each other.
COPIED = ("entrypoints", "reasoning", "v1/logits_processors")
MODEL_NAME = re.compile(r"""["']([\w.-]+/[\w.-]+)["']""")
FAULT = re.compile(r"[\w.]*(?:Error|Exception|Failed|assert)\w*:? .*")


@dataclass
class Runner:
    """Runs files one after another in a working directory of its own."""

    source: Path
    work: Path
    timeout: float
    pattern: str
    environment: dict[str, str] = field(init=False)

    def __post_init__(self):
        self.environment = prepare(self.source, self.work)


def main() -> None:
    """Run what the command line selects, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm_tests"))
    parser.add_argument(
        "--only", nargs="*", default=[""], help="parts of the paths of the files"
    )
    parser.add_argument("--test", default="", help="pytest's -k")
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds per file; a fifth per test"
    )
    parser.add_argument("--jobs", type=int, default=1, help="files that run at once")
    options = parser.parse_args()
    source = options.source.resolve()
    about = {
        "about": f"`{COMMAND}` on two CPU cores",
        "vllm": version(source),
        "date": date.today().isoformat(),
        **commit(),
    }
    files: dict[str, Any] = {}
    if options.output and options.output.exists():
        old = json.loads(options.output.read_text(encoding="utf-8"))
        if old.get("commit") == about["commit"]:
            files = old["files"]
    names = [
        name
        for name in [*TESTS, *EXAMPLES]
        if any(part in name for part in options.only)
    ]
    idle = SimpleQueue[Runner]()
    for number in range(options.jobs):
        work = options.work / str(number)
        idle.put(Runner(source, work, options.timeout, options.test))

    def run(name: str) -> tuple[str, dict[str, Any], float]:
        runner = idle.get()
        start = time.monotonic()
        results = [*(run_tests if name in TESTS else run_example)(name, runner)]
        took = time.monotonic() - start
        idle.put(runner)
        return name, summary(name, results), took

    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run, name) for name in names]):
            name, files[name], took = done.result()
            print(f"{name}: {files[name]['counts']}, {took:.0f} s", flush=True)
            for test, fault in files[name]["failed"].items():
                print(f"    {test}: {fault}", flush=True)
            if options.output:
                record = about | {
                    "tests": total(files, TESTS),
                    "examples": total(files, EXAMPLES),
                    "files": {
                        one: files[one] for one in [*TESTS, *EXAMPLES] if one in files
                    },
                }
                text = json.dumps(record, indent=1, ensure_ascii=False)
                write_whole(text + "\n", options.output)


def version(source: Path) -> str:
    """Return the version of vLLM's sources."""
    text = (source / "PKG-INFO").read_text(encoding="utf-8")
    return re.findall("^Version: (.*)$", text, re.M)[0]


def prepare(source: Path, work: Path) -> dict[str, str]:
    """Write the working directory; return the environment of its processes."""
    shutil.rmtree(work, ignore_errors=True)
    models = work / "models"
    for name in ("target", "draft"):
        # Copied, because a checkpoint's files may not be links to other folders.
        shutil.copytree(TINY / name, models / name)
    shutil.copy(source / TEMPLATE, models / "target" / "chat_template.jinja")
    for name in COPIED:
        shutil.copytree(source / "tests" / name, work / "tests" / name)
    shutil.copytree(source / "examples", work / "examples")
    shutil.copytree(HERE / "stand_in", work, dirs_exist_ok=True)
    paths = [work, ROOT, ROOT / "kernels", ROOT / "checkpoints"]
    given = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([given] if given else [])]),
        "VLLM_SOURCE": str(source),
        "STAND_IN_MODELS": str(models),
    }


def run_tests(name: str, runner: Runner) -> Iterator[tuple[str, str, str]]:
    """Run a test file; yield each test's name, outcome and message."""
    path = runner.work / "tests" / name
    for file in (
        path,
        *path.parent.glob("conftest.py"),
        *path.parents[1].glob("conf*"),
    ):
        link_models(file, runner.work)
    report = runner.work / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"tests/{name}", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    command += ["--rootdir=.", "-o", "junit_logging=no"]
    command += [f"--timeout={runner.timeout / 5:g}"]
    if runner.pattern:
        command += ["-k", runner.pattern]
    text = run_command(command, runner)
    if not report.exists():
        yield "(file)", "failed", fault_in(text)
        return
    for case in ElementTree.parse(report).iter("testcase"):
        test = case.get("name") or "(file)"
        fault = next((one for one in case if one.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if fault is not None:
            message = f"{fault.get('message') or ''}\n{fault.text or ''}"
            yield test, "failed", message
        elif skipped is not None:
            yield test, "skipped", skipped.get("message") or ""
        else:
            yield test, "passed", ""


def run_example(name: str, runner: Runner) -> Iterator[tuple[str, str, str]]:
    """Run an example; yield its outcome as that of one test."""
    path = runner.work / "examples" / name
    link_models(path, runner.work)
    command = [sys.executable, f"examples/{name}", *EXAMPLES[name]]
    text = run_command(command, runner)
    is_done = text.endswith("(exit code 0)")
    yield "(script)", "passed" if is_done else "failed", text


def link_models(path: Path, work: Path) -> None:
    """Let every model that a file names be a folder of the working directory."""
    for model in MODEL_NAME.findall(path.read_text(encoding="utf-8")):
        folder = work / model
        if not folder.exists() and not model.startswith("tests/"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            is_draft = bool(re.search("eagle|accelerator|draft|68m", model.lower()))
            name = "draft" if is_draft else "target"
            folder.symlink_to(work / "models" / name)


def run_command(command: list[str], runner: Runner) -> str:
    """Run a command; return its output and how it ended."""
    log = runner.work / "log.txt"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=runner.work,
            env=runner.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = f"(exit code {process.wait(runner.timeout)})"
        except subprocess.TimeoutExpired:
            end = f"(stopped after {runner.timeout:g} s)"
            os.killpg(process.pid, 9)
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    logs = runner.work / "logs"
    logs.mkdir(exist_ok=True)
    label = command[1] if command[1] != "-m" else command[3]
    (logs / (label.replace("/", "_") + ".txt")).write_text(text, encoding="utf-8")
    return f"{text.rstrip()}\n{end}"


def fault_in(text: str) -> str:
    """Return the line of an output that says why it failed."""
    absent = re.findall(r"NotInJaxspecError: (.*)", text)
    if absent:
        return f"NotInJaxspecError: {absent[-1]}"
    lines = [line.removeprefix("E ").strip() for line in text.splitlines()]
    faults = [line for line in lines if FAULT.match(line)]
    return (faults or lines or [""])[-1][:200]


def summary(name: str, results: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the counts of a file, its failures and why some tests do not apply."""
    failed: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    passed = 0
    for test, outcome, message in results:
        reason = reason_of(name, test, message) if outcome != "passed" else None
        if outcome == "passed":
            passed += 1
        elif outcome == "skipped":
            reasons[reason or f"skipped: {message[:100]}"] += 1
        elif reason is not None:
            reasons[reason] += 1
        else:
            failed[test] = fault_in(message)
    counts = {"passed": passed, "failed": len(failed)}
    counts["not_applicable"] = sum(reasons.values())
    return {
        "counts": counts,
        "failed": failed,
        "not_applicable": dict(reasons.most_common()),
    }


def total(files: dict[str, Any], names: dict[str, Any] | list[str]) -> dict[str, int]:
    """Add up the counts of some files."""
    sums: Counter[str] = Counter()
    for name in names:
        if name in files:
            sums.update(files[name]["counts"])
    return {"all": sum(sums.values()), **sums}


if __name__ == "__main__":
    main()
