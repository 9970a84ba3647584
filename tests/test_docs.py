"""The documentation site has every page, links with targets, and a full reference."""

import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxspec
from docs.pages import PYTHON_PAGE, REFERENCE, SERVER_PAGE
from jaxspec.command_line import documented
from jaxspec.serve.flags import make_parser
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
NAMES = [name for names in REFERENCE.values() for name in names]
# The bundled pair runs in place of models that need a download.
BUNDLED = {
    "google/gemma-2-9b-it": "jaxspec/tiny-gemma2",
    "google/gemma-2-2b-it": "jaxspec/tiny-gemma2-draft",
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the pages of the site."""
    folder = tmp_path_factory.mktemp("pages")
    # In another process: the tests' type checks would reject the placeholder engine
    # from which `docs.pages` makes the server's application.
    done = run_python("-m", "docs.pages", folder)
    assert done.returncode == 0, done.stderr
    return folder


def navigation() -> list[str]:
    """Return the pages in the navigation of mkdocs.yml."""

    def paths(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [path for value in values for path in paths(value)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return paths(config["nav"])


def test_navigation_has_every_page_once(pages: Path):
    entries = navigation()
    assert len(set(entries)) == len(entries)
    assert not [entry for entry in entries if not (pages / entry).is_file()]
    own = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    own |= {page.name for page in ROOT.glob("*.md")}
    assert not own - set(entries), "add it to `nav` in mkdocs.yml"


def test_links_have_targets(pages: Path):
    num_links = 0
    for page in pages.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if "\n~~~~~~~~" in text:
            continue  # a source
        for link in re.findall(r"\]\(([^)\s#]+)", text):
            if "://" not in link:
                target = page.parent / link
                assert target.is_file(), f"{page.relative_to(pages)}: {link}"
                num_links += 1
    assert num_links > 300
    page = (pages / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "](../jaxspec/llm.py.md)" in page
    assert '<pre class="mermaid"><code>flowchart TB' in page
    source = (pages / "jaxspec" / "llm.py.md").read_text(encoding="utf-8")
    assert (ROOT / "jaxspec" / "llm.py").read_text(encoding="utf-8") in source


def test_reference_has_all_public_names(pages: Path):
    page = (pages / PYTHON_PAGE).read_text(encoding="utf-8")
    for name in NAMES:
        assert f"\n::: {name}\n" in page
    listed = {name.rpartition(".")[2] for name in NAMES}
    exported = {*jaxspec.__all__, *jaxspec._LAZY} - {"__version__", "PromptType"}
    assert not exported - listed


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_docstrings(name: str):
    module, _, last = name.rpartition(".")
    item = getattr(importlib.import_module(module), last)
    assert item.__module__ == module, "name the module that defines it"
    assert item.__doc__ and not item.__doc__.startswith(f"{last}("), name
    if not inspect.isclass(item):
        return
    kinds = property | functools.cached_property | classmethod | staticmethod
    missing = [
        key
        for key, member in vars(item).items()
        if (inspect.isroutine(member) or isinstance(member, kinds))
        and not member.__doc__
    ]
    described = ", ".join(documented(item)).split(", ")
    fields = inspect.get_annotations(item)
    if dataclasses.is_dataclass(item) or issubclass(item, dict | tuple):
        missing += [key for key in fields if key not in described]
    assert not [key for key in missing if not key.startswith("_")]


def test_server_reference_has_all_flags_and_endpoints(pages: Path):
    page = (pages / SERVER_PAGE).read_text(encoding="utf-8")
    flags = set(re.findall(r"--[a-z][\w-]+", make_parser("serve").format_help()))
    assert len(flags) > 100
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `-"))
    assert not {flag for flag in flags if f"`{flag}`" not in rows}
    routes = []
    for source in (ROOT / "jaxspec" / "serve").glob("*.py"):
        text = source.read_text(encoding="utf-8")
        routes += re.findall(r'@router\.(\w+)\("(/[^":]+)', text)
    assert len(routes) > 20
    for method, path in routes:
        assert f"\n### {method.upper()} {path}" in page
    assert "| `json` | string or object |  | A JSON schema, as a dict or as" in page
    # A field with its type, its default and its meaning, and an object's own table.
    assert "| `temperature` | number |  | Divides the logits; 0 is greedy. |" in page
    assert "[StreamOptions](#streamoptions)" in page
    assert "\n### StreamOptions\n" in page


def test_code_of_pages_runs():
    # All blocks run in one process: later blocks use what earlier ones define.
    pages = ["README.md"]
    for name in ("getting_started", "performance", "troubleshooting", "quantization"):
        pages.append(f"docs/{name}.md")
    code = []
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert blocks, page
        code += blocks
    source = "\n".join(code)
    for model, bundled in BUNDLED.items():
        source = source.replace(model, bundled)
    # The process exits without waiting for programs that are still being compiled.
    end = "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"
    done = run_python("-W", "error", "-c", source + end)
    assert done.returncode == 0, done.stderr
    assert re.search(r"accepted \d+% of the drafts\n(yes|no)\n", done.stdout)
    assert "% of the drafts were accepted" in done.stdout
