"""Pythons for the release check, and the texts of licenses that packages have."""

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import jaxspec
from tests.release.check import artifacts, find_pythons, steps
from tests.release.smoke import LICENSES

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxspec", "kernels/jaxspec_kernels", "checkpoints/jaxspec_checkpoints")
CODE = {".py", ".cc", ".h", ".typed", ".pyc"}
NOTICE = (ROOT / "NOTICE").read_text(encoding="utf-8")


def test_pythons_are_found_once_per_version(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    this = f"3.{sys.version_info.minor}"
    broken = tmp_path / f"python{this}"
    broken.write_text("#!/bin/sh\nexit 127\n")  # as pyenv's, without that version
    broken.chmod(0o755)
    kept = tmp_path / "versions" / "x" / "bin" / f"python{this}"
    kept.parent.mkdir(parents=True)
    assert find_pythons() == {}
    kept.symlink_to(os.path.realpath(sys.executable))
    assert find_pythons() == {this: str(kept)}


def test_wheel_is_tried_with_and_without_the_server(tmp_path):
    for name in ("jaxspec_decoding-1-py3-none-any.whl", "jaxspec_decoding-1.tar.gz"):
        (tmp_path / name).touch()
    found = artifacts(tmp_path)
    commands = [step for _, step in steps("wheel", found["wheel"], Path("python"))]
    assert commands[0][-1] == str(found["wheel"])
    assert commands[1][-1] == "--native"
    assert commands[2][-1] == "jaxspec-decoding[serve]"
    assert commands[3][-1] == "--serve"


def test_every_data_file_of_a_package_has_an_origin():
    patterns = re.findall(r"^\| ([\w./*-]+) \| ", NOTICE, re.MULTILINE)
    files = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in CODE
    ]
    assert len(files) > 30
    without = [
        name
        for name in files
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    assert not without, "say in NOTICE where these come from"
    unused = [one for one in patterns if not fnmatch.filter(files, one)]
    assert unused == ["files", "texts"], "the headings of the tables"


def test_license_texts_are_declared_and_named_in_the_notice():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = {
        path.name
        for pattern in tomllib.loads(text)["project"]["license-files"]
        for path in ROOT.glob(pattern)
    }
    assert declared == set(LICENSES.split())
    texts = {name for name in declared if name.endswith(".txt")}
    assert texts == set(re.findall(r"[\w.-]+\.txt", NOTICE.split("| texts |")[1]))


def test_wheels_are_compiled_for_the_oldest_jaxlib():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text)
    (jax,) = (one for one in values["project"]["dependencies"] if one[:4] == "jax>")
    targets = values["tool"]["hatch"]["build"]["targets"]
    (jaxlib,) = targets["wheel"]["hooks"]["custom"]["dependencies"]
    assert jaxlib.removeprefix("jaxlib==") == jax.removeprefix("jax>=")
    # PyPI's classifiers and the wheels' tests name the same versions of Python.
    listed = re.findall(r"Python :: (3\.\d+)", text)
    builds = re.findall(r"cp3(\d+)-", values["tool"]["cibuildwheel"]["build"])
    assert [f"3.{minor}" for minor in builds] == listed
    assert values["project"]["requires-python"] == f">={listed[0]}"


def commands_of(workflow: str) -> list[str]:
    path = ROOT / ".github" / "workflows" / workflow
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [step.get("run", "") for job in jobs.values() for step in job["steps"]]


def test_workflows_run_what_runs_anywhere():
    assert ".ci/run" in commands_of("ci.yml")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    commands = commands_of("release.yml")
    assert any(one.startswith("make release-check") for one in commands)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^release-check: wheel$", makefile, re.MULTILINE)
    # The condition on the tag reads the line where the version is.
    (condition,) = (one for one in commands if one.startswith("grep"))
    script = condition.replace("${GITHUB_REF_NAME#v}", jaxspec.__version__)
    assert subprocess.run(script, shell=True, cwd=ROOT).returncode == 0
    wrong = condition.replace("${GITHUB_REF_NAME#v}", "9.9")
    assert subprocess.run(wrong, shell=True, cwd=ROOT).returncode == 1


def test_smoke_test_fails_if_nothing_is_installed(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True
    )
    smoke = ROOT / "tests" / "release" / "smoke.py"
    command = [tmp_path / "bin" / "python", smoke]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "jaxspec is not installed here" in done.stderr
