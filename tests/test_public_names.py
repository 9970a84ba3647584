import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).parents[1]


def test_version_is_the_projects():
    project = ROOT / "pyproject.toml"
    assert (
        jaxspec.__version__ == tomllib.loads(project.read_text())["project"]["version"]
    )


def test_light_names_do_not_import_jax():
    code = (
        "import sys\n"
        "from jaxspec import CompletionOutput, PromptType, RequestOutput\n"
        "from jaxspec import SamplingParams, TextPrompt, TokensPrompt, __version__\n"
        "import jaxspec.config, jaxspec.errors, jaxspec.logprobs\n"
        "import jaxspec.text.tokenizer\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_public_names_are_listed_and_at_vllms_paths():
    listed = dir(jaxspec)
    for name in ("LLM", "LLMEngine", "EngineArgs", "SamplingParams", "__version__"):
        assert name in listed
    args = pytest.importorskip("jaxspec.engine.arg_utils")
    assert jaxspec.EngineArgs is args.EngineArgs
    assert jaxspec.AsyncEngineArgs is args.AsyncEngineArgs


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="PoolingParams"):
        _ = jaxspec.PoolingParams
