import tomllib
from pathlib import Path

import pytest

import jaxspec
from jaxspec import config
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxspec", "kernels/jaxspec_kernels", "checkpoints/jaxspec_checkpoints")


def test_version_is_written_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    path = ROOT / project["tool"]["hatch"]["version"]["path"]
    line = f'__version__ = "{jaxspec.__version__}"'
    assert line in path.read_text(encoding="utf-8").splitlines()
    sources = (file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))
    found = [file for file in sources if jaxspec.__version__ in file.read_text("utf-8")]
    assert found == [path]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str):
    assert (ROOT / package / "py.typed").is_file()


def test_public_names_are_listed_and_at_vllms_paths():
    listed = dir(jaxspec)
    for name in ("LLM", "LLMEngine", "EngineArgs", "SamplingParams", "__version__"):
        assert name in listed
    args = pytest.importorskip("jaxspec.engine.arg_utils")
    assert jaxspec.EngineArgs is args.EngineArgs
    assert jaxspec.AsyncEngineArgs is args.AsyncEngineArgs


def test_light_modules_import_neither_numpy_nor_jax():
    """Importing numpy takes most of the time in which Ctrl-C is not handled yet."""
    code = (
        "import sys, jaxspec.exit\n"
        "assert 'numpy' not in sys.modules\n"
        "from jaxspec import CompletionOutput, PromptType, RequestOutput\n"
        "from jaxspec import SamplingParams, TextPrompt, TokensPrompt, __version__\n"
        "import jaxspec.config, jaxspec.errors, jaxspec.logprobs\n"
        "import jaxspec.text.tokenizer\n"
        "assert 'jax' not in sys.modules\n"
    )
    run_python("-c", code, check=True)


def test_names_are_imported_on_first_use():
    for name in config._MODULES:
        assert getattr(config, name).__name__ == name
    for package, unknown in ((config, "PoolerConfig"), (jaxspec, "PoolingParams")):
        with pytest.raises(AttributeError, match=unknown):
            getattr(package, unknown)
