"""Layout of the repository: modules, imports, test files, and one list of checks.

import-linter checks the direction of imports, with the contracts in pyproject.toml.
"""

import ast
import functools
import importlib
import re
import sys
import tomllib
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

from tests.support.source_modules import (
    MODULES,
    PACKAGES,
    extra_of,
    module_name,
)

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
ALLOWED_NAMES = {"arg_utils", "argparse_utils", "network_utils"}
ALLOWED_FILES = {
    "benchmarks/vllm_tests/stand_in/tests/utils.py",
    "jaxspec/entrypoints/chat_utils.py",
    "jaxspec/utils/__init__.py",
    "jaxspec/utils/argparse_utils.py",
    "jaxspec/utils/network_utils.py",
    "jaxspec/v1/core/kv_cache_utils.py",
}

# Folders of jaxspec with a reading order.
IN_ORDER = (
    *(".", "bench", "cli", "config", "engine", "engine/scheduling", "models"),
    *("engine/speculation", "models/gemma", "program", "serve"),
)

# Folders whose modules need no test file each: small ones, and those that only mirror
# vLLM's import paths.
LEAVES = (
    *("benchmarks", "distributed", "engine/memory", "lora", "models/heads"),
    *("entrypoints", "platforms", "serve/requests", "serve/responses", "text"),
    *("tokenizers", "train", "usage", "utils"),
)
# Modules without a test file of their own: each is a part of another module, whose
# test file tests both.
TESTED_ELSEWHERE = {
    "tests/cli/test_chat.py": ("cli/chat_backend", "cli/chat_server"),
    "tests/bench/test_main.py": ("bench/flags", "bench/offline"),
    "tests/bench/test_methods.py": ("bench/method_report",),
    "tests/bench/test_serve.py": (
        *("bench/scrape", "bench/serve_report", "bench/traffic"),
    ),
    "tests/bench/test_whole.py": ("bench/spec", "bench/summary"),
    "tests/engine/test_llm_engine.py": ("engine/calibration",),
    "tests/engine/scheduling/test_scheduler.py": (
        *("engine/scheduling/admission", "engine/scheduling/stages"),
        *("engine/scheduling/decode_selection", "engine/scheduling/draft_prefill"),
    ),
    "tests/engine/scheduling/test_commit.py": (
        *("engine/scheduling/launch", "engine/scheduling/stats"),
    ),
    "tests/engine/scheduling/test_kv_cache.py": (
        *("engine/scheduling/page_claims", "engine/scheduling/page_releases"),
    ),
    "tests/engine/scheduling/test_request.py": ("engine/scheduling/waiting_queue",),
    "tests/engine/scheduling/test_lookup_estimator.py": (
        "engine/scheduling/round_estimates",
    ),
    "tests/e2e/test_grammars.py": ("engine/scheduling/slow_masks",),
    "tests/engine/speculation/test_policy.py": ("engine/speculation/constants",),
    "tests/models/gemma/test_module.py": (
        *("models/__init__", "models/gemma/__init__", "models/variables"),
    ),
    "tests/text/test_chat_turns.py": ("models/gemma/turns",),
    "tests/models/test_cpu.py": ("models/matrices",),
    "tests/support/oracles.py": ("models/network",),
    "tests/models/test_weights.py": ("models/params",),
    "tests/test_outputs.py": ("logprobs", "metrics"),
    "tests/test_public_names.py": ("__init__", "config/__init__"),
    "tests/test_main.py": ("cli/commands",),
    "tests/config/test_engine.py": ("config/model",),
    "tests/serve/test_development.py": ("serve/corpora",),
    "tests/serve/test_errors.py": ("serve/middleware",),
    "tests/serve/test_flags.py": ("serve/__main__", "serve/settings"),
    "tests/serve/test_generation.py": ("serve/app", "serve/serving"),
    "tests/serve/test_server_info.py": ("serve/load_report",),
    "tests/test_vllm_paths.py": (
        *("logger", "envs", "config/profiler", "engine/stat_loggers"),
    ),
    "tests/program/propose/test_ngram.py": ("program/propose/ngram_match",),
    "tests/e2e/test_heads.py": (
        *("program/propose/eagle", "program/propose/eagle3", "program/propose/medusa"),
        "program/propose/dflash",
    ),
    "tests/support/heads.py": ("program/propose/hidden_cache",),
    "tests/program/test_step.py": ("program/step_context",),
    "tests/program/test_token_batch.py": ("models/batch",),
    "tests/program/propose/test_draft_model.py": ("program/propose/proposal",),
}

# Files that run tests of other modules again, or the checks that tests are made of.
# They name these modules; long suites are due when one of them changes.
RUN_OTHER_TESTS = {"tests/kernels/test_native_builds.py", "tests/mutants.py"}


def defines_something(path: Path) -> bool:
    """Return whether a module defines more than aliases or a reading order."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(isinstance(node, kinds) for node in parse(ROOT / path).body)


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
    elsewhere = {
        f"jaxspec/{name}.py": test
        for test, names in TESTED_ELSEWHERE.items()
        for name in names
    }
    untested = [
        f"{path}: write {mirrors_of(path, stems)[0]}"
        for path in modules
        if str(path) not in elsewhere
        and not any((ROOT / mirror).exists() for mirror in mirrors_of(path, stems))
    ]
    assert not untested, "\n".join(untested)
    assert elsewhere.keys() <= {str(path) for path in modules}
    for module, test in elsewhere.items():
        name = module.removesuffix(".py").removesuffix("/__init__").rsplit("/", 1)[-1]
        assert name in (ROOT / test).read_text(encoding="utf-8"), f"{test}: no {name}"


def test_no_test_module_imports_another() -> None:
    imports = re.compile(r"^ *(?:from|import) tests[. ][^(\n]*(?:\([^)]*\))?", re.M)
    importing = {
        path.as_posix()
        for path in FILES
        for found in imports.findall((ROOT / path).read_text(encoding="utf-8"))
        if re.search(r"\btest_", found)
    }
    assert importing == RUN_OTHER_TESTS, "move what tests share to tests/support"


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
    last = "exec make --no-print-directory check long-suites SUITE_ARGS='--minutes 30'"
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


@pytest.mark.parametrize("name", IN_ORDER)
def test_reading_order_lists_every_module(name: str) -> None:
    """The reading order of a large folder is in its __init__."""
    folder = ROOT / "jaxspec" / name
    order = ast.get_docstring(parse(folder / "__init__.py")) or ""
    # `name`, or its full path `jaxspec.engine.name`.
    named = re.findall(r"`(?:jaxspec\.)?([a-z_0-9.]+)`", order)
    modules = {path.stem for path in folder.glob("*.py")}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    missing = modules - {"__init__"} - {one.split(".")[0] for one in named}
    assert not missing, f"{name}/__init__.py has no place for {sorted(missing)}"
    for one in named:
        paths = [at / one.replace(".", "/") for at in (folder, ROOT / "jaxspec")]
        found = [path.is_dir() or path.with_suffix(".py").exists() for path in paths]
        assert any(found), f"{name}/__init__.py names {one}, which is gone"


Import = ast.Import | ast.ImportFrom


def names_of(node: Import) -> list[str]:
    """Return the modules of an import statement; relative ones start with a dot."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["." * node.level + (node.module or "")]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> list[Import]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, Import)]


@functools.cache
def declared_distributions(extra: str | None) -> set[str]:
    """Return the normalized names of the packages that pip installs.

    They are those of one extra, or those without any extra.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    requirements = list(project["dependencies"])
    if extra is not None:
        requirements += project["optional-dependencies"][extra]
    names = [re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0] for line in requirements]
    return {name.lower().replace("_", "-") for name in names}


def test_imports_are_at_the_top_and_absolute() -> None:
    for folder, path in MODULES:
        for node in imports_of(folder / path):
            where = f"{path}:{node.lineno}"
            # This also rejects `if TYPE_CHECKING:` and `try:` around an import.
            assert node in parse(folder / path).body, (
                f"{where}: move the import to the top of the module"
            )
            for name in names_of(node):
                assert not name.startswith("."), f"{where}: write the full module path"
                assert name != "__future__", f"{where}: jaxtyping needs annotations"


def test_third_party_imports_are_declared() -> None:
    # A plain install has no extra, so importing an undeclared package would break it.
    distributions = packages_distributions()
    undeclared = [
        f"{path}: {name}"
        for folder, path in MODULES
        for node in imports_of(folder / path)
        for name in names_of(node)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and top not in PACKAGES
        and not declared_distributions(extra_of(path))
        & {found.lower().replace("_", "-") for found in distributions.get(top, ())}
    ]
    assert not undeclared


def test_modules_that_need_an_extra_are_not_imported_statically_by_others() -> None:
    extras = {module_name(path): extra_of(path) for _, path in MODULES}
    behind = {name: extra for name, extra in extras.items() if extra is not None}
    imported = {
        f"{path}: {name}"
        for folder, path in MODULES
        for node in imports_of(folder / path)
        for name in [
            *names_of(node),
            *(f"{names_of(node)[0]}.{alias.name}" for alias in node.names),
        ]
        if name in behind and behind[name] != extra_of(path)
    }
    assert not imported


def test_every_module_imports() -> None:
    for _, path in MODULES:
        if path.name != "__main__.py":
            importlib.import_module(module_name(path))
