"""Layout of the repository: names of modules, test files, and one list of checks."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxspec", "kernels", "checkpoints", "benchmarks", "tests")
FILES = sorted(
    path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*.py")
)

VAGUE_WORDS = {
    "common",
    "helper",
    "helpers",
    "manager",
    "misc",
    "util",
    "utils",
}
# Module names of vLLM that users' scripts import: `vllm.engine.arg_utils`, and
# `vllm.utils` for `random_uuid`.
ALLOWED_NAMES = {"arg_utils", "argparse_utils"}
ALLOWED_FILES = {
    "jaxspec/utils/__init__.py",
    "jaxspec/utils/argparse_utils.py",
}

# Folders whose modules need no test file each: small ones, and those that only mirror
# vLLM's import paths.
LEAVES = (
    *("engine/memory", "lora", "models/heads"),
    *("serve/requests", "serve/responses", "text", "train", "usage", "utils"),
)
# Modules that another test file tests: that file, and the reason.
TESTED_ELSEWHERE: dict[str, tuple[str, str]] = {
    "jaxspec/bench/flags.py": (
        "tests/bench/test_main.py",
        "the command line is tested as a whole",
    ),
    "jaxspec/bench/offline.py": (
        "tests/bench/test_main.py",
        "it rejects wrong command lines",
    ),
    "jaxspec/bench/scrape.py": (
        "tests/bench/test_serve.py",
        "part of a run against a server",
    ),
    "jaxspec/bench/serve_report.py": (
        "tests/bench/test_serve.py",
        "part of a run against a server",
    ),
    "jaxspec/bench/traffic.py": (
        "tests/bench/test_serve.py",
        "part of a run against a server",
    ),
    "jaxspec/bench/spec.py": (
        "tests/bench/test_whole.py",
        "the offline subcommands share their summaries",
    ),
    "jaxspec/bench/summary.py": (
        "tests/bench/test_whole.py",
        "the offline subcommands share their summaries",
    ),
    "jaxspec/engine/calibration.py": (
        "tests/engine/test_llm_engine.py",
        "it takes turns with the engine's launches",
    ),
    "jaxspec/engine/scheduling/admission.py": (
        "tests/engine/scheduling/test_scheduler.py",
        "a stage of a plan",
    ),
    "jaxspec/engine/scheduling/launch.py": (
        "tests/engine/scheduling/test_commit.py",
        "a commit takes a launch",
    ),
    "jaxspec/engine/scheduling/round_estimates.py": (
        "tests/engine/scheduling/test_lookup_estimator.py",
        "estimates are tested by the choices made from them",
    ),
    "jaxspec/engine/scheduling/slow_masks.py": (
        "tests/e2e/test_grammars.py",
        "real grammars have slow masks",
    ),
    "jaxspec/engine/scheduling/stages.py": (
        "tests/engine/scheduling/test_scheduler.py",
        "values that its stages exchange",
    ),
    "jaxspec/engine/scheduling/draft_prefill.py": (
        "tests/engine/scheduling/test_scheduler.py",
        "it takes turns with the scheduler's other launches",
    ),
    "jaxspec/engine/speculation/constants.py": (
        "tests/engine/speculation/test_policy.py",
        "they are part of the policy",
    ),
    "jaxspec/models/__init__.py": (
        "tests/models/gemma/test_module.py",
        "what it owns is an address",
    ),
    "jaxspec/models/gemma/__init__.py": (
        "tests/models/gemma/test_module.py",
        "what it owns is an address",
    ),
    "jaxspec/models/gemma/turns.py": (
        "tests/text/test_chat_turns.py",
        "a chat is written in turns",
    ),
    "jaxspec/models/matrices.py": (
        "tests/models/test_cpu.py",
        "every form is tested against the dense one",
    ),
    "jaxspec/models/variables.py": (
        "tests/models/gemma/test_module.py",
        "Flax modules are made of its variables",
    ),
    "jaxspec/models/network.py": (
        "tests/support/oracles.py",
        "models run through it",
    ),
    "jaxspec/models/params.py": (
        "tests/models/test_weights.py",
        "weights are made from declarations",
    ),
    "jaxspec/__init__.py": (
        "tests/test_public_names.py",
        "it contains only the list of public names",
    ),
    "jaxspec/config/model.py": (
        "tests/config/test_engine.py",
        "a part of the engine's config, which re-exports it",
    ),
    "jaxspec/serve/app.py": (
        "tests/serve/test_generation.py",
        "every endpoint is called through it",
    ),
    "jaxspec/serve/serving.py": (
        "tests/serve/test_generation.py",
        "every request goes through it",
    ),
    "jaxspec/logger.py": (
        "tests/test_vllm_paths.py",
        "it only needs to be importable",
    ),
    "jaxspec/envs.py": (
        "tests/test_vllm_paths.py",
        "vLLM's name for it",
    ),
    "jaxspec/program/propose/ngram_match.py": (
        "tests/program/propose/test_ngram.py",
        "one match is tested as a lookup, several in test_suffix.py",
    ),
    "jaxspec/program/propose/eagle.py": (
        "tests/e2e/test_heads.py",
        "its drafts are held against a replay of whole texts",
    ),
    "jaxspec/program/propose/eagle3.py": (
        "tests/e2e/test_heads.py",
        "its drafts are held against a replay of whole texts",
    ),
    "jaxspec/program/propose/medusa.py": (
        "tests/e2e/test_heads.py",
        "its drafts are held against a replay of whole texts",
    ),
    "jaxspec/program/propose/hidden_cache.py": (
        "tests/support/heads.py",
        "the heads' drafts are made from the states it stores",
    ),
    "jaxspec/program/propose/draft_sampling.py": (
        "tests/mutants.py",
        "a part of the draft model, and tested with it",
    ),
    "jaxspec/program/step_context.py": (
        "tests/program/test_step.py",
        "every step reads its launch through it",
    ),
    "jaxspec/program/propose/proposal.py": (
        "tests/program/propose/test_draft_model.py",
        "a tuple and a chain: the proposer's test reads every field",
    ),
}


def defines_something(path: Path) -> bool:
    """Return whether a module defines more than aliases or a reading order."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in tree.body
    )


def mirrors_of(path: Path, stems: Counter[str]) -> list[Path]:
    """Return the paths that a module's test file may have.

    The path mirrors the module's. If the module's name is unique, the path may also be
    flat.
    """
    if path.parts[0] == "kernels":
        # The modules of a kernel operation have one common test file.
        unit = path.parts[2].removesuffix(".py").strip("_")
        return [Path("tests/kernels", f"test_{unit}.py")]
    if path.stem == "__init__":
        return [Path("tests", *path.parts[1:-2], f"test_{path.parts[-2]}.py")]
    stem = path.stem.strip("_")
    mirrors = [Path("tests", *path.parts[1:-1], f"test_{stem}.py")]
    if stems[path.stem] == 1:
        mirrors.append(Path("tests", f"test_{stem}.py"))
    return mirrors


def source_modules() -> list[Path]:
    """Return the modules of jaxspec (without `LEAVES`) and jaxspec_kernels."""
    leaves = {Path("jaxspec", name) for name in LEAVES}
    return [
        path
        for path in FILES
        if path.parts[0] in ("jaxspec", "kernels")
        and path.parent not in leaves
        and defines_something(path)
    ]


def test_module_names_are_specific() -> None:
    vague = [
        str(path)
        for path in FILES
        for part in (*path.parts[:-1], path.stem)
        if path.as_posix() not in ALLOWED_FILES
        and part.removeprefix("test_") not in ALLOWED_NAMES
        and VAGUE_WORDS & set(part.lower().split("_"))
    ]
    assert not vague, f"{vague}: name what it owns, with a word of the glossary"


def test_every_module_has_tests() -> None:
    modules = source_modules()
    stems = Counter(path.stem for path in modules)
    untested = [
        f"{path}: write {mirrors_of(path, stems)[0]}"
        for path in modules
        if str(path) not in TESTED_ELSEWHERE
        and not any((ROOT / mirror).exists() for mirror in mirrors_of(path, stems))
    ]
    assert not untested, "\n".join(untested)


def test_modules_tested_elsewhere_are_imported_there() -> None:
    modules = {str(path) for path in source_modules()}
    for module, (test, reason) in TESTED_ELSEWHERE.items():
        assert module in modules, f"{module} is gone"
        assert (ROOT / test).exists(), f"{module}: {test} is gone"
        name = module.removesuffix(".py").removesuffix("/__init__").rsplit("/", 1)[-1]
        assert name in (ROOT / test).read_text(encoding="utf-8"), f"{test}: no {name}"
        assert reason, module


@pytest.mark.parametrize("folder", ["kernels", "checkpoints"])
def test_folders_are_not_packages(folder: str) -> None:
    # A bare `kernels` package would shadow the PyPI package of that name.
    assert not (ROOT / folder / "__init__.py").exists()


def test_ci_and_pre_commit_run_one_list() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (checks,) = re.findall(r"^checks := (.+)$", makefile, re.MULTILINE)
    assert re.findall(r"^check: (.+)$", makefile, re.MULTILINE) == ["$(checks)"]

    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"^ +entry: (.+)$", hooks, re.MULTILINE)
    expected = [f"make --no-print-directory {check}" for check in checks.split()]
    assert entries == expected

    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    last = "exec make --no-print-directory check long-suites SUITE_ARGS='--minutes 35'"
    assert script[-1] == last, "long suites that are due, after what always runs"
    assert checks.split()[-1] == "test", "pytest's closing line comes last"


def test_wheel_holds_the_three_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    found = sorted(
        str(path.parent)
        for path in FILES
        if path.name == "__init__.py"
        and not (ROOT / path.parent.parent / "__init__.py").exists()
        and path.parts[0] in ("jaxspec", "kernels", "checkpoints")
    )
    assert found == sorted(packages)


def test_issue_forms_have_what_github_requires() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.stem for form in forms] == ["bug_report", "feature_request"]
    for form in forms:
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert content["name"] and content["description"], form.name
        ids = [field["id"] for field in content["body"] if field["type"] != "markdown"]
        assert ids and len(set(ids)) == len(ids), form.name
