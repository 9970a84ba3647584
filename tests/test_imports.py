"""Imports are at the top, absolute, and of declared packages; all modules import.

import-linter checks the direction of imports, with the contracts in pyproject.toml.
"""

import ast
import functools
import importlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "jaxspec": ROOT,
    "jaxspec_kernels": ROOT / "kernels",
    "jaxspec_checkpoints": ROOT / "checkpoints",
}
# Pairs: an import root, and a module file relative to it.
MODULES = [
    (folder, path.relative_to(folder))
    for package, folder in PACKAGES.items()
    for path in sorted((folder / package).rglob("*.py"))
]

# Modules, and folders of modules, whose imports an extra installs, and the name of the
# extra; None for modules of these folders that need none. Only modules of the same
# extra may import them at the top.
NEED_AN_EXTRA = {
    "jaxspec/bench/client.py": "serve",
    "jaxspec/bench/lossless.py": "serve",
    "jaxspec/bench/scrape.py": "serve",
    "jaxspec/bench/serve.py": "serve",
    "jaxspec/bench/serve_report.py": "serve",
    "jaxspec/bench/traffic.py": "serve",
    "jaxspec/cli/chat_server.py": "serve",
    "jaxspec/cli/run_batch.py": "serve",
    "jaxspec/entrypoints/openai/chat_completion/protocol.py": "serve",
    "jaxspec/entrypoints/openai/completion/protocol.py": "serve",
    "jaxspec/entrypoints/openai/engine/protocol.py": "serve",
    "jaxspec/serve/": "serve",
    "jaxspec/serve/__init__.py": None,
    "jaxspec/serve/__main__.py": None,
    "jaxspec/serve/responses/__init__.py": None,
    "jaxspec/serve/responses/usage.py": None,
    "jaxspec/tool_parsers/": "serve",
    "jaxspec/train/run.py": "train",
    "jaxspec/train/trainer.py": "train",
    "jaxspec_checkpoints/sources/hub.py": "hub",
    "jaxspec_checkpoints/sources/kaggle.py": "kaggle",
}

Import = ast.Import | ast.ImportFrom


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


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


def extra_of(path: Path) -> str | None:
    """Return the extra that a module needs, by its path or the nearest folder."""
    for name in [str(path), *(f"{folder}/" for folder in path.parents)]:
        if name in NEED_AN_EXTRA:
            return NEED_AN_EXTRA[name]
    return None


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


@pytest.mark.parametrize(
    ("folder", "path"), MODULES, ids=[str(path) for _, path in MODULES]
)
def test_imports_are_at_the_top_and_absolute(folder: Path, path: Path) -> None:
    for node in imports_of(folder / path):
        where = f"{path}:{node.lineno}"
        # This also rejects `if TYPE_CHECKING:` and `try:` around an import.
        assert node in parse(folder / path).body, (
            f"{where}: move the import to the top of the module"
        )
        for name in names_of(node):
            assert not name.startswith("."), f"{where}: write the full module path"
            assert name != "__future__", f"{where}: jaxtyping needs real annotations"


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


@pytest.mark.parametrize(
    "name",
    [module_name(path) for _, path in MODULES if path.name != "__main__.py"],
)
def test_module_imports(name: str) -> None:
    importlib.import_module(name)
