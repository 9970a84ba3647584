"""The reading order of a large folder, in its __init__, names every module."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "jaxspec"
FOLDERS = (
    ". bench cli config engine engine/scheduling engine/speculation models "
    "models/gemma program serve"
).split()


@pytest.mark.parametrize("name", FOLDERS)
def test_reading_order_lists_every_module(name: str) -> None:
    folder = ROOT / name
    source = (folder / "__init__.py").read_text(encoding="utf-8")
    order = ast.get_docstring(ast.parse(source)) or ""
    # `name`, or its full path `jaxspec.engine.name`.
    named = re.findall(r"`(?:jaxspec\.)?([a-z_0-9.]+)`", order)
    modules = {path.stem for path in folder.glob("*.py")}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    missing = modules - {"__init__"} - {one.split(".")[0] for one in named}
    assert not missing, f"{name}/__init__.py has no place for {sorted(missing)}"
    for one in named:
        paths = [at / one.replace(".", "/") for at in (folder, ROOT)]
        found = [path.is_dir() or path.with_suffix(".py").exists() for path in paths]
        assert any(found), f"{name}/__init__.py names {one}, which is gone"
