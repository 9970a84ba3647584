"""Writes the pages of the documentation site: `python -m docs.pages FOLDER`.

The folder gets the repository's layout, so that links work on the site as they do in
the repository. It has README.md, the pages of this folder, and everything that these
link to: other pages, pictures and data are copied, a source becomes a page. The
reference is generated: `REFERENCE` lists the Python API, which mkdocstrings reads from
docstrings; the server's flags and endpoints are read from its code.

`make docs` then builds the site with `mkdocs.yml`, which has the navigation.
"""

import argparse
import html
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from jaxspec.command_line import documented
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.sampling_params import (
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxspec.serve.app import make_app
from jaxspec.serve.flags import make_parser
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
PYTHON_PAGE, SERVER_PAGE = "docs/reference/python.md", "docs/reference/server.md"

# The public Python API, by section.
REFERENCE = {
    "Offline": (
        *("jaxspec.llm.LLM", "jaxspec.conversations.ChatOptions"),
        "jaxspec.text.tokenizer.Tokenizer",
    ),
    "Arguments": (
        "jaxspec.engine.arg_utils.EngineArgs",
        "jaxspec.engine.arg_utils.AsyncEngineArgs",
        "jaxspec.config.speculation.SpeculativeConfig",
        "jaxspec.config.structured_outputs.StructuredOutputsConfig",
        "jaxspec.config.kv_events.KvEventsConfig",
    ),
    "Requests": (
        "jaxspec.sampling_params.SamplingParams",
        "jaxspec.sampling_params.RequestOutputKind",
        "jaxspec.config.structured_outputs.StructuredOutputsParams",
        "jaxspec.sampling_params.BeamSearchParams",
        *("jaxspec.inputs.TextPrompt", "jaxspec.inputs.TokensPrompt"),
    ),
    "Outputs": (
        *("jaxspec.outputs.RequestOutput", "jaxspec.outputs.CompletionOutput"),
        "jaxspec.outputs.RequestSpecDecodeMetrics",
        *("jaxspec.outputs.RequestStateStats", "jaxspec.outputs.TokenOrigin"),
        *("jaxspec.logprobs.Logprob", "jaxspec.logprobs.FlatLogprobs"),
        "jaxspec.beam_search.BeamSearchOutput",
        "jaxspec.beam_search.BeamSearchSequence",
    ),
    "Engines": (
        "jaxspec.engine.llm_engine.LLMEngine",
        "jaxspec.engine.async_llm_engine.AsyncLLMEngine",
        "jaxspec.engine.engine_thread.RequestOutputCollector",
    ),
    "Metrics": (
        *("jaxspec.metrics.Metric", "jaxspec.metrics.Counter"),
        *("jaxspec.metrics.Gauge", "jaxspec.metrics.Vector"),
        "jaxspec.metrics.Histogram",
    ),
    "Errors": (
        *("jaxspec.errors.ArgumentError", "jaxspec.errors.ConfigError"),
        *("jaxspec.errors.RequestError", "jaxspec.errors.UnsupportedError"),
        "jaxspec.errors.EngineGenerateError",
        "jaxspec.errors.RetryableRequestError",
        "jaxspec.errors.EngineDeadError",
    ),
    "Kernels": (
        "jaxspec_kernels.paged_attention.paged_attention",
        "jaxspec_kernels.write_kv_pages.write_kv_pages",
        "jaxspec_kernels.write_kv_pages.copy_kv_rows",
        "jaxspec_kernels.rejection_sampling.rejection_sampling",
        "jaxspec_kernels.panel_matmul.panel_matmul",
        "jaxspec_kernels.panel_matmul.panel_rows",
        "jaxspec_kernels.bits.storage_dtype",
    ),
    "Checkpoints": (
        "jaxspec_checkpoints.reading.open_checkpoint",
        "jaxspec_checkpoints.checkpoint.Checkpoint",
        "jaxspec_checkpoints.tensor.Tensor",
        "jaxspec_checkpoints.errors.CheckpointError",
        "jaxspec_checkpoints.bundled.bundled_target",
        "jaxspec_checkpoints.bundled.bundled_draft",
        "jaxspec_checkpoints.bundled.bundled_head",
        "jaxspec_checkpoints.bundled.packaged_gemma3",
    ),
}

_LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Files that browsers show, or save, without a page around them.
_COPIED = {".ipynb", ".json", ".jsonl", ".png", ".svg"}
_LANGUAGES = {".cc": "cpp", ".h": "cpp", ".py": "python"}
_SOURCE = """\
---
search:
  exclude: true
---

# {title}

{fence}{language}
{source}
{fence}
"""


def write_pages(folder: Path) -> None:
    """Write all pages into a folder, and the files that they link to."""
    waiting = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    seen = set(waiting)
    for path in waiting:  # the loop appends to it
        linked = _write_file(path, folder)
        waiting += [one for one in dict.fromkeys(linked) if one not in seen]
        seen |= set(linked)
    for name, text in {PYTHON_PAGE: python_page(), SERVER_PAGE: server_page()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _write_file(path: Path, folder: Path) -> list[Path]:
    """Write a page, or what else is linked; return the files that it links to."""
    target = folder / _place(path).relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in _COPIED:
        shutil.copy(path, target)
        return []
    linked: list[Path] = []
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if _is_shown(one))
        text = "\n".join(f"- [{name}]({name})" for name in names)
        text = f"# {path.relative_to(ROOT)}\n\n{text}\n"
        text, linked = _with_links_of_site(text, path)
    elif path.suffix == ".md":
        text = path.read_text(encoding="utf-8")
        text, linked = _with_links_of_site(text, path.parent)
        text = _DIAGRAM.sub(_diagram, text)
    else:
        title, language = path.relative_to(ROOT), _LANGUAGES.get(path.suffix, "text")
        source = path.read_text(encoding="utf-8")
        text = _SOURCE.format(
            title=title, fence="~" * 8, language=language, source=source
        )
    target.write_text(text, encoding="utf-8")
    return linked


def _is_shown(path: Path) -> bool:
    """Return whether a folder's page links to a file: only to text and pictures."""
    is_known = path.suffix in {".md", *_COPIED, *_LANGUAGES}
    return is_known and not path.name.startswith(".") and path.is_file()


def _place(path: Path) -> Path:
    """Return the place of a file of the repository on the site."""
    if path.is_dir():
        return path / "index.md"
    is_kept = path.suffix == ".md" or path.suffix in _COPIED
    return path if is_kept else path.with_name(f"{path.name}.md")


def _with_links_of_site(text: str, folder: Path) -> tuple[str, list[Path]]:
    """Change links to files that have another place on the site.

    Returns:
        The text, and the files that it links to. mkdocs reports links without a target.
    """
    linked: list[Path] = []

    def place(link: re.Match[str]) -> str:
        name, heading = link[1], link[2] or ""
        target = (folder / name).resolve()
        if "://" in name or not target.is_relative_to(ROOT) or not target.exists():
            return link[0]
        if name:
            if target.is_dir() and (target / "README.md").exists():
                target /= "README.md"
            linked.append(target)
            name = os.path.relpath(_place(target), folder)
        # GitHub keeps the hyphens around a character that it drops from a heading.
        return name + re.sub("-+", "-", heading)

    return _LINK.sub(place, text), linked


def _diagram(block: re.Match[str]) -> str:
    """Write a diagram as the theme expects it."""
    return f'<pre class="mermaid"><code>{html.escape(block[1])}</code></pre>'


def python_page() -> str:
    """Return the reference of the Python API, for mkdocstrings."""
    lines = [
        "# Python API",
        "",
        "`from jaxspec import` LLM, SamplingParams, RequestOutput, CompletionOutput, "
        "TextPrompt, TokensPrompt, EngineArgs, AsyncEngineArgs, LLMEngine and "
        "AsyncLLMEngine. All names are also at vLLM's import paths, such as "
        "`jaxspec.v1.engine.async_llm.AsyncLLM`.",
        "",
        "A shape is written in brackets, with a name for each axis: `[token, vocab]`. "
        "Counts are of tokens, sizes in bytes and times in seconds, unless a name or "
        "its description has another unit.",
    ]
    for section, names in REFERENCE.items():
        lines += ["", f"## {section}"]
        for name in names:
            lines += ["", f"::: {name}", "    options:", "      heading_level: 3"]
    return "\n".join([*lines, ""])


def server_page() -> str:
    """Return the reference of the server: its flags, and its endpoints."""
    lines = [
        "# Server reference",
        "",
        "The flags of `python -m jaxspec serve` and the endpoints of the server. "
        "[The server](../server.md) explains them, and "
        "[vLLM's arguments](../vllm.md) lists the flags of vLLM that have no effect.",
        *_flags(),
        *_endpoints(),
    ]
    return "\n".join([*lines, ""])


def _flags() -> Iterator[str]:
    parser = make_parser("python -m jaxspec serve")
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
        if not actions:
            continue
        yield from ("", f"## Flags: {group.title}", "")
        yield from ("| flag | default | meaning |", "|---|---|---|")
        for action in actions:
            names = ", ".join(f"`{name}`" for name in action.option_strings)
            if action.choices:
                names += ": " + ", ".join(f"`{choice}`" for choice in action.choices)
            meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
            yield _row(names or f"`{action.metavar}`", _default(action), meaning)


def _default(action: argparse.Action) -> str:
    value = action.default
    if isinstance(value, bool):
        return "on" if value else "off"
    is_shown = value not in (None, "", (), argparse.SUPPRESS)
    return f"`{json.dumps(value)}`" if is_shown else ""


def openapi() -> dict[str, Any]:
    """Return the OpenAPI schema of a server with all of its endpoints."""
    config = EngineArgs().create_engine_config()  # the bundled pair; reads no weights
    tokenizer = Tokenizer.from_folder(config.tokenizer)
    engine = SimpleNamespace(config=config, tokenizer=tokenizer)
    settings = ServerSettings(server_dev_mode=True, enable_tokenizer_info_endpoint=True)
    app = make_app(cast(Any, SimpleNamespace(engine=engine)), settings)
    return app.openapi()


def _endpoints() -> Iterator[str]:
    schema = openapi()
    objects = _Objects(schema["components"]["schemas"])
    yield from ("", "## Endpoints", "")
    yield "A server has them as JSON at `/openapi.json` and as a page at `/docs`."
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield from ("", f"### {method.upper()} {path}", "")
            yield operation.get("description", "")
            fields = [
                (one["name"], one["schema"], one["required"])
                for one in operation.get("parameters", ())
            ]
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                fields += objects.fields(body["schema"])
            yield from objects.table(fields)
    yield from ("", "## Objects in requests")
    for name in objects.waiting:  # the loop appends to it
        yield from ("", f"### {name}", "", objects.schemas[name].get("description", ""))
        yield from objects.table(objects.fields({"$ref": f"/{name}"}))


Field = tuple[str, dict[str, Any], bool]


class _Objects:
    """Schemas of objects in requests.

    Attributes:
        schemas: OpenAPI schemas by name.
        waiting: Names of the objects to describe, in the order of their first use.
    """

    def __init__(self, schemas: dict[str, Any]):
        self.schemas = schemas
        self.waiting: list[str] = []
        # Most fields of requests have the name and the meaning of a parameter.
        self._meanings = documented(
            StructuredOutputsParams, BeamSearchParams, SamplingParams
        )

    def fields(self, schema: dict[str, Any]) -> list[Field]:
        """Return each field's name, its schema, and whether it is required."""
        if "$ref" in schema:
            schema = self.schemas[schema["$ref"].rpartition("/")[2]]
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        return [(name, one, name in required) for name, one in properties.items()]

    def table(self, fields: list[Field]) -> Iterator[str]:
        """Yield a table of fields."""
        if not fields:
            return
        yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
        for name, schema, is_required in fields:
            default = "required" if is_required else ""
            if schema.get("default") is not None:
                default = f"`{json.dumps(schema['default'])}`"
            meaning = schema.get("description") or self._meanings.get(name, "")
            yield _row(f"`{name}`", self._type(schema), default, meaning)

    def _type(self, schema: dict[str, Any]) -> str:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self.waiting:
                self.waiting.append(name)
            return f"[{name}](#{name.lower()})"
        if choices := schema.get("anyOf", schema.get("oneOf")):
            types = [self._type(one) for one in choices if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(types))
        if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
            return ", ".join(f"`{json.dumps(value)}`" for value in values)
        if schema.get("type") == "array":
            return f"array of {self._type(schema.get('items', {}))}"
        return schema.get("type", "any")


def _row(*cells: str) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Escape a table's cell, except for code in backticks."""
    parts = text.replace("%%", "%").split("`")
    parts[::2] = [html.escape(part, quote=False) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
