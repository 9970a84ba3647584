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

from tests.support.source_modules import (
    MODULES,
    PACKAGES,
    extra_of,
    module_name,
)

ROOT = Path(__file__).parents[1]
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
