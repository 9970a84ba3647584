"""Modules of our packages, and the extras that they need."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def extra_of(path: Path) -> str | None:
    """Return the extra that a module needs, by its path or the nearest folder."""
    for name in [str(path), *(f"{folder}/" for folder in path.parents)]:
        if name in NEED_AN_EXTRA:
            return NEED_AN_EXTRA[name]
    return None
